"""Several processes, each of which holds the whole model: torch's ``DistributedDataParallel``.

The strategy decides in which backward passes gradients are averaged, and what is averaged at the
step because no backward pass has done it. How far one module is:
:mod:`ddpkit.strategies.gradient_reduction`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit import distributed
from ddpkit.base import reads_device
from ddpkit.comm import require_agreement
from ddpkit.compat import GradientOrder, show_order, version_of, waits_for_gradients
from ddpkit.device import widest_float
from ddpkit.errors import BatchError, RankMismatchError
from ddpkit.logger import get_logger
from ddpkit.optim import parameters_of
from ddpkit.strategies.base import Strategy, removing_hooks
from ddpkit.strategies.batch_norm_layers import batch_norm_row, batch_norms, has_moving_buffers
from ddpkit.strategies.batch_outputs import has_batch_statistics
from ddpkit.strategies.comm_hooks import bytes_of_gradient, bytes_of_hook, hook_of
from ddpkit.strategies.empty_backward import call_without_batch, complete
from ddpkit.strategies.entries import (
    broadcast_from_main,
    refuse_shared_parameters,
    refuse_wrapped,
    trained_parameters,
)
from ddpkit.strategies.gradient_average import average_gradients
from ddpkit.strategies.gradient_reduction import BatchClock, GradientReduction
from ddpkit.strategies.option_refusals import ROUNDED, is_given, refuse_with
from ddpkit.strategies.rank_memory import whole_memory
from ddpkit.strategies.rare_questions import NO_CONTEXT
from ddpkit.strategies.sending import send_from_main
from ddpkit.strategies.switched_attribute import SwitchedAttribute
from ddpkit.strategies.unwrapped_buffers import UnwrappedBuffers
from ddpkit.strategies.wrapped_ddp import WrappedDDP
from ddpkit.strategies.zero_gradients import COMPLETED, ZeroGradients
from ddpkit.syncbn import convert_sync_batchnorm
from ddpkit.training import Accumulation

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies.rank_memory import RankMemory, RehearsedRun


logger = get_logger(__name__)


# relative difference of the sums of absolute weights, in float64: below it is rounding
APART = 1e-9


NOT_WITH: dict[str, dict[str, str]] = {  # an option of DDP -> others -> why not
    "ddp_comm_hook": {
        "auto_micro_batch": "a step that is repeated is averaged at its end, where no hook is asked"
    },
    "ddp_comm_hook=fp16": ROUNDED,
    "ddp_comm_hook=bf16": ROUNDED,
    "ddp_comm_hook=powersgd": {
        **ROUNDED,
        "find_unused_parameters": "it compresses every gradient in every step",
        "static_graph": "DDP rebuilds its buckets too late",
        "precision=fp16": "what is left over of a step would have its scale",
        "skip_nonfinite_grads": "what is not finite would stay in what is left over",
    },
    "static_graph": {
        "find_unused_parameters": ("in a static graph every step uses the same parameters")
    },
}


ORDER_MATTERS_ABOVE = 2  # ranks: a sum of two numbers is the same either way


OTHER_ENTRIES = (
    "the ranks have used different entries of modules in the same steps. Their gradients were "
    "averaged together: checkpoints of this pass are wrong. Use the same, or one entry for all "
    "choices (--find_unused_parameters)."
)


UNKNOWN_PART = (
    "the loss of a batch depends on no parameter. With a fit_batch of the recipe, several entries "
    "of modules, accumulation and --find_unused_parameters it is not known what the other "
    "processes send in this batch. Put `with self.no_sync(not self.should_step):` around forward "
    "and backward, or return 0.0 * outputs.sum()."
)


class DDP(Strategy):
    """Several processes: ``DistributedDataParallel`` around every trainable entry, BatchNorm
    synchronised.

    Args:
        options: of the run, with the device of this rank.
        accumulation: of the run; None: as the options say.
        has_own_fit_batch: whether the recipe has its own ``fit_batch``: a backward pass is then
            told whether to average, whatever the forward pass before it expected (see
            :meth:`backward_pass`).

    Ranks: collective.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> DDP(RunOptions(device="cpu")).name
        'DistributedDataParallel'
    """

    name = "DistributedDataParallel"
    label = "ddp"
    holds = "ddp: each process holds the whole model"

    def __init__(
        self,
        options: RunOptions | None = None,
        accumulation: Accumulation | None = None,
        *,
        has_own_fit_batch: bool = False,
    ) -> None:
        self.wrapped: list[WrappedDDP] = []
        self._trained: dict[str, frozenset[int]] = {}
        self._orders: dict[str, GradientOrder] = {}
        self._noting: list[GradientOrder] = []
        # parameters with a gradient that counts; None: all that have one
        self._used: set[int] | None = None
        self._outside: list[nn.Parameter] = []  # of the optimizers, but in no entry of the modules
        self._order = 0  # a number that follows from the entries that each optimizer step has used
        self._clock = BatchClock()
        self._steps = 0  # optimizer steps for which gradients were finished
        self._frozen: list[nn.Parameter] = []  # as the entries were wrapped: DDP does not know them
        self._zeros = ZeroGradients(self._clock)
        self._entries: list[nn.Module] = []  # of the recipe, once they are wrapped
        self._is_in_pass = False
        if options is not None:
            self.bind(
                options,
                accumulation or Accumulation(options),
                has_own_fit_batch=has_own_fit_batch,
            )

    def check(
        self,
        options: RunOptions,
        *,
        has_own_fit_batch: bool,
    ) -> None:
        """Refuse what does not go with an option of DDP.

        Raises:
            ConfigError: naming the options.
        """
        for chosen, reasons in NOT_WITH.items():
            if is_given(options, chosen):
                refuse_with(
                    chosen,
                    options,
                    reasons,
                )

    def bind(
        self,
        options: RunOptions,
        accumulation: Accumulation,
        *,
        has_own_fit_batch: bool,
    ) -> None:
        """Take the options, and with them what the hook of gradients asks of a step."""
        super().bind(options, accumulation, has_own_fit_batch=has_own_fit_batch)
        self._unwrapped = UnwrappedBuffers(self.device)
        self.sends_fp16 = options.ddp_comm_hook == "fp16"
        # what a hook has kept of gradients that were skipped must go before the next are averaged
        self.awaits_steps = options.ddp_comm_hook is not None

    def wrap(self, modules: nn.ModuleDict) -> None:
        """Convert BatchNorm, and put DDP around every trainable entry that has none yet.

        The parameters and buffers of all entries are set to rank 0's values, as DDP does for its
        own module.

        Raises:
            ConfigError: two entries share a parameter, whose gradient would be averaged twice.
        """
        refuse_shared_parameters(modules)
        self._entries = list(modules.values())
        for name, module in modules.items():
            trained = trained_parameters(module)
            if self._trained.get(name) == trained:
                continue
            refuse_wrapped(
                name,
                module,
                f"strategy={self.label!r}",
            )
            self._trained[name] = trained
            if trained:
                options = self._options(module)
                if options.get("broadcast_buffers") is False:
                    # without the newer forward_sync_buffers, DDP would begin with each rank's own
                    kind = torch.device(self.device).type
                    send_from_main(one for one in module.buffers() if one.device.type == kind)
                wrapped = WrappedDDP(self._converted(module), **options)
                modules[name] = wrapped
                self.wrapped.append(wrapped)
                wrapped.gradient_reduction.entry = name
                wrapped.gradient_reduction.clock = self._clock
                watched = (
                    self.has_own_fit_batch
                    or self.options.static_graph
                    or self.options.find_unused_parameters
                )
                wrapped.choose_hook(hook_of(self.options, module), watched=watched)
                if self._order_matters():
                    self._orders[name] = GradientOrder(wrapped)
                    self._noting.append(self._orders[name])
            else:
                broadcast_from_main(module, self.device)
                modules[name] = self._converted(module)  # its running statistics may move
        self._frozen = [
            parameter for parameter in modules.parameters() if not parameter.requires_grad
        ]
        self._clock.outputs = self._zeros.outputs if self._zeros.outputs.follow(modules) else None
        self._follow_unwrapped(modules)

    def _follow_unwrapped(self, modules: nn.ModuleDict) -> None:
        """Note the entries that DDP is not around, unless no buffers are to be sent."""
        if self.options.broadcast_buffers is not False:
            self._unwrapped.follow(
                module for module in modules.values() if not isinstance(module, WrappedDDP)
            )

    def begin_pass(self, progress: Any) -> None:
        """Note what tells at which batch the training is, before its first one."""
        self._is_in_pass = True
        self._zeros.outputs.begin_pass(progress, self._clock)

    def averages_gradients(self) -> bool:
        """Say whether gradients are averaged in any step of the run."""
        return True

    def _order_matters(self) -> bool:
        """Say whether gradients are averaged, and in an order that DDP follows and their sums
        depend on.
        """
        options = self.options
        matters = (
            options.ddp_comm_hook == "powersgd"
            or torch.distributed.get_world_size() > ORDER_MATTERS_ABOVE
        )
        return self.averages_gradients() and matters and not options.find_unused_parameters

    def begin_epoch(self, modules: nn.ModuleDict) -> None:
        """Wrap new entries, and those again whose trainable parameters have changed since they were
        wrapped.

        DDP averages the gradients of all parameters that were trainable when it was made, and waits
        for all of them.
        """
        self._close_orders()
        self._entries = list(modules.values())
        self.wrapped = [
            module for module in self.wrapped if any(module is entry for entry in modules.values())
        ]
        changed = [
            name
            for name, module in modules.items()
            if self._trained.get(name) != trained_parameters(module)
        ]
        if not changed:
            self._follow_unwrapped(modules)
            return
        logger.info("Other parameters than before are trained in: %s.", ", ".join(changed))
        for name in changed:
            module = modules[name]
            if isinstance(module, WrappedDDP):
                self.wrapped.remove(module)
                modules[name] = module.module
        self.wrap(modules)

    def prepare_optimizers(
        self,
        modules: nn.ModuleDict,
        optimizers: Mapping[str, Any],
    ) -> None:
        """Set to rank 0's values what the optimizers step and no entry has; its gradients are
        averaged in each step.

        Raises:
            RankMismatchError: the ranks have other parameters of that kind. On every rank.
        """
        known = set(map(id, modules.parameters()))
        self._outside = [
            parameter
            for parameter in parameters_of(optimizers.values())
            if id(parameter) not in known
        ]
        shapes = str([tuple(parameter.shape) for parameter in self._outside])
        require_agreement(
            {("shapes of the parameters that an optimizer has and no entry of modules"): shapes}
        )
        broadcast_from_main(nn.ParameterList(self._outside), self.device)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are accumulated without being averaged over ranks."""
        if self.options.static_graph:  # torch's own way averages in the wrong backward passes then
            held = [module.gradient_reduction for module in self.wrapped]
            return SwitchedAttribute(
                held,
                "held",
                during=True,
            )
        return SwitchedAttribute(
            self.wrapped,
            "require_backward_grad_sync",
            during=False,
        )

    def backward_pass(
        self,
        modules: nn.Module,
        *,
        closes: bool,
        counts: bool,
    ) -> AbstractContextManager[None]:
        """Return a context for one backward pass of a window.

        Args:
            modules: the trained modules.
            closes: whether the micro-batch is the last of its window. Gradients are averaged only
                then.
            counts: whether this rank's gradients count. If not they become zero, also for an
                infinite loss, which a weight of 0 would turn into NaN.
        """
        self._clock.batch += 1
        watched = [
            module.gradient_reduction
            for module in self.wrapped
            if module.gradient_reduction.watched
        ]
        uncounted = (
            []
            if counts
            else [
                parameter
                for parameter in (*modules.parameters(), *self._outside)
                if parameter.requires_grad
            ]
        )
        return (
            self._watched_pass(
                watched,
                uncounted,
                closes=closes,
            )
            if watched or uncounted
            else NO_CONTEXT
        )

    @contextlib.contextmanager
    def _watched_pass(
        self,
        watched: list[GradientReduction],
        uncounted: list[nn.Parameter],
        *,
        closes: bool,
    ) -> Iterator[None]:
        defers = self._defers(closes=closes)
        for reduction in watched:
            reduction.defers = defers
        try:
            with removing_hooks(
                [
                    parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
                    for parameter in uncounted
                ]
            ):
                yield
            for reduction in watched:
                reduction.after_backward()
        finally:
            for reduction in watched:
                reduction.defers = False

    def _defers(self, *, closes: bool) -> bool:
        """Say whether a backward pass leaves gradients as they are, where it is told so."""
        # In the last batch of a window DDP does not know what those before have used, unless
        # no_sync was around them.
        differ = self.options.find_unused_parameters and self.accumulation.factor > 1
        return not closes or (differ and self.has_own_fit_batch)

    def without_backward(
        self,
        modules: nn.ModuleDict,
        *,
        closes: bool,
        counts: bool = True,
        retain_graph: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context in the place of a backward pass: takes part in what the other ranks send
        in theirs.

        Args:
            modules: the trained modules.
            closes: whether the micro-batch is the last of its window.
            counts: whether this rank's gradients count.
            retain_graph: whether another loss of the batch follows.

        Raises:
            BatchError: it is not known what the others send.
        """
        if self._clock.outputs is not None and has_batch_statistics(modules):
            return self._backward_of_zeros(
                modules,
                retain_graph=retain_graph,
                closes=closes,
                counts=counts,
            )
        return self._without_backward(closes=closes)

    @contextlib.contextmanager
    def _backward_of_zeros(
        self,
        modules: nn.ModuleDict,
        *,
        retain_graph: bool,
        closes: bool,
        counts: bool,
    ) -> Iterator[None]:
        """Go backwards from what the modules have returned: the others wait in the layers that
        share statistics.
        """
        starts = self._zeros.starts(self.wrapped, retain_graph=retain_graph)
        yield
        without = self._zeros.without_loss(self.wrapped)
        reductions = {module: module.gradient_reduction for module in self.wrapped}
        batch = self._clock.batch
        defers = self._defers(closes=closes)
        armed = [
            module for module, state in reductions.items() if state.batch == batch and state.reduced
        ]
        averaged = [module for module in armed if not (defers and reductions[module].watched)]
        backward_pass = self.backward_pass(
            modules,
            closes=closes,
            counts=counts,
        )
        self._zeros.go_backwards(starts, without, averaged, f"{self._steps}/{batch}", backward_pass)

    @contextlib.contextmanager
    def _without_backward(self, *, closes: bool) -> Iterator[None]:
        """Take part without the outputs of a batch: nothing is sent but gradients."""
        sending = [
            module
            for module in self.wrapped
            if module.require_backward_grad_sync and not module.gradient_reduction.held
        ]
        is_known = len(sending) == 1 or not self.has_own_fit_batch
        # in each backward pass that the forward pass has armed
        sends_use = self.options.find_unused_parameters
        if sending and sends_use and not closes and not is_known:
            raise BatchError(UNKNOWN_PART)
        if sending and not any(module.gradient_reduction.reduced for module in sending):
            call_without_batch(sending)
        yield
        self._clock.batch += 1
        awaited = [module for module in sending if module.gradient_reduction.is_awaited()]
        if is_known and (closes or sends_use):
            self._complete(awaited, closes=closes)
        elif not closes or (sends_use and self.accumulation.factor > 1):
            for module in awaited:  # as after a backward pass whose gradients are not averaged
                module.gradient_reduction.skipped = True
                module.gradient_reduction.reduced = module.gradient_reduction.armed = False

    def _complete(
        self,
        modules: list[WrappedDDP],
        *,
        closes: bool,
    ) -> None:
        """Take part in the averages of modules, without gradients of the last batch, in the order
        of a backward pass.

        Args:
            modules: called in this batch.
            closes: whether it is the last of its window.
        """
        modules.sort(key=lambda module: module.gradient_reduction.call, reverse=True)
        watched = [
            module.gradient_reduction for module in modules if module.gradient_reduction.watched
        ]
        with self._watched_pass(
            watched,
            [],
            closes=closes,
        ):
            for module in modules:
                complete(module, self._steps)
        for module in modules:
            module.gradient_reduction.before = COMPLETED
            module.gradient_reduction.awaited = False

    def _complete_unused(self, optimizers: Collection[Any]) -> None:
        """Complete the averages of what was called, if no backward pass of this rank has come to
        any of it.
        """
        skipped = [module for module in self.wrapped if module.gradient_reduction.skipped]
        for module in sorted(
            skipped,
            key=lambda module: module.gradient_reduction.call,
            reverse=True,
        ):
            module.pass_over()
        armed = [
            module
            for module in self.wrapped
            if module.gradient_reduction.reduced and module.is_stepped_by(optimizers)
        ]
        if all(
            module.gradient_reduction.awaited and not waits_for_gradients(module)
            for module in armed
        ):
            self._complete(armed, closes=True)

    def finish_gradients(self, optimizers: Collection[Any] = ()) -> None:
        """Average gradients that DDP has not averaged; drop gradients of batches with weight 0."""
        is_only = len(self.wrapped) == 1
        if not is_only:
            self._order = hash(
                (self._order, *[module.gradient_reduction.reduced for module in self.wrapped])
            )
        is_waiting = False
        for module in self.wrapped:  # without a call for each: this is every step
            reduction = module.gradient_reduction
            old = (
                reduction.armed
                if reduction.watched
                else reduction.before == version_of(reduction.probe.grad)
            )
            reduction.awaited = reduction.reduced and old
            is_waiting = is_waiting or reduction.awaited or reduction.skipped
        if is_waiting and not self.options.static_graph:
            self._complete_unused(optimizers)
        self._steps += 1
        zeros = self._zeros.announce_leftovers(self._steps) if self._zeros.versions else []
        for module in self.wrapped:
            module.reduce_leftovers(optimizers, is_only=is_only)
        if others := [
            parameter for parameter in (*self._outside, *self._frozen) if parameter.requires_grad
        ]:
            average_gradients(others)
        if zeros or self._used is not None or self._noting:
            self._tidy_gradients(zeros)
        if self._unwrapped.modules:
            self._unwrapped.send()

    def leave_step_out(self) -> None:
        """Send buffers that move without a step, too, and that no forward pass sends."""
        self._unwrapped.send()

    def _tidy_gradients(self, announced: Sequence[WrappedDDP]) -> None:
        """Drop what no loss of any rank has given, once it is averaged."""
        self._zeros.drop_leftovers(announced, self._steps)
        if self._used is not None:
            self._drop_unused(self._used)
            self._used = None
        if self._noting:
            self._close_orders()

    def _drop_unused(self, used: set[int]) -> None:
        """Drop the gradients of parameters that only batches with weight 0 have used, on any
        rank.
        """
        parameters = self._parameters()
        sums = distributed.sum_over_ranks(
            [float(id(parameter) in used) for parameter in parameters]
        )
        for parameter, number in zip(
            parameters,
            sums,
            strict=True,
        ):
            if not number:
                parameter.grad = None

    def sent_bytes(self, parameters: Iterable[torch.Tensor]) -> float:
        """Return the bytes of all gradients, in the form in which they travel."""
        return sum(bytes_of_gradient(self.options, parameter) for parameter in parameters)

    def recording_use(self, *, counts: bool) -> AbstractContextManager[None]:
        """Return a context for a micro-batch that counts on some ranks only.

        A batch that counts nothing gives gradients of zero. A parameter that only such batches use
        must end up without a gradient, as on one process: an optimizer may move what has a gradient
        of zero.

        Args:
            counts: whether it counts on this rank.
        """
        if not self.options.find_unused_parameters:  # then all parameters are used by every batch
            return NO_CONTEXT
        parameters = self._parameters()
        if self._used is None:
            # of the window's earlier ones
            self._used = {id(parameter) for parameter in parameters if parameter.grad is not None}
        used = self._used
        trained: list[Any] = parameters if counts else []

        def note(parameter: torch.Tensor) -> None:
            # else the rank has none, and only takes part in an average
            if parameter.grad is not None:
                used.add(id(parameter))

        return removing_hooks(
            [parameter.register_post_accumulate_grad_hook(note) for parameter in trained]
        )

    def _parameters(self) -> list[nn.Parameter]:
        return [
            parameter
            for module in self.wrapped
            for parameter in module.module.parameters()
            if parameter.requires_grad
        ]

    def _close_orders(self) -> None:
        self._noting = [order for order in self._noting if not order.close()]

    @reads_device
    def diverged_entries(self, modules: nn.Module) -> list[str]:
        """Return the trained entries whose weights differ between ranks.

        Compared are sums of absolute values, within :data:`APART`: ranks on other hardware may
        round them differently.
        """
        wide = widest_float(self.device)
        own = {
            name: float(
                sum(parameter.detach().abs().sum(dtype=wide) for parameter in module.parameters())
            )
            for name, module in modules.named_children()
            if self._trained.get(name)
        }
        everybody = distributed.exchange(own)
        found = {name: [sizes[name] for sizes in everybody] for name in own}
        return [
            name for name, sizes in found.items() if max(sizes) - min(sizes) > APART * max(sizes)
        ]

    def rank_state(self) -> dict[str, Any]:
        """Return the order in which each entry's gradients became ready, where DDP follows it, and
        what communication hooks keep from step to step.
        """
        return {
            "gradients": {
                name: list(noted.order) for name, noted in self._orders.items() if noted.is_complete
            },
            "hooks": {entry: hook.state_dict() for entry, hook in self._compressing().items()},
        }

    def load_rank_state(
        self,
        modules: nn.ModuleDict,
        state: Mapping[str, Any],
    ) -> None:
        """Restore the order of gradient sums of the run that wrote a checkpoint, then what its
        hooks have kept.

        Args:
            modules: wrapped, and not trained yet.
            state: what :meth:`rank_state` returned there.
        """
        for name, order in state.get("gradients", {}).items():
            noted = self._orders.get(name)
            if noted is not None and not noted.order and show_order(modules[name], order):
                noted.order[:] = order
        states = state.get("hooks", {})
        found = self._compressing()
        for entry in found.keys() & states.keys():
            found[entry].load_state_dict(states[entry], self.device)

    def forget_errors(self) -> None:
        """Drop what hooks have kept, after gradients that are not finite."""
        for hook in self._compressing().values():
            hook.forget()

    def _compressing(self) -> dict[str, Any]:
        found = {
            module.gradient_reduction.entry: module.gradient_reduction.hook
            for module in self.wrapped
        }
        return {entry: hook for entry, hook in found.items() if hasattr(hook, "forget")}

    def end_pass(self, modules: nn.ModuleDict) -> None:
        """Give every rank the batch statistics of rank 0, where each rank has its own.

        Raises:
            RankMismatchError: the ranks have used other entries of modules in their steps.
        """
        self._zeros.outputs.forget()
        if (
            len(self.wrapped) > 1
            and len(set(distributed.exchange(self._order, site="entries"))) > 1
        ):
            raise RankMismatchError(OTHER_ENTRIES)
        self._send_statistics(modules.values())
        self._is_in_pass = False

    def _send_statistics(self, entries: Iterable[nn.Module]) -> None:
        """Give every rank the batch statistics of rank 0, where each has its own."""
        if self.options.sync_batchnorm is False:
            layers = [layer for entry in entries for layer in batch_norms(entry)]
            send_from_main(buffer for part in layers for buffer in part.buffers(recurse=False))

    def evaluating(self, length: int | None) -> AbstractContextManager[None]:
        """Give every rank the buffers of rank 0, as the next training batch would do: what is
        evaluated is what a checkpoint holds.

        Args:
            length: not needed here.
        """
        if self._is_in_pass:
            self._send_statistics(self._entries)
        for module in self.wrapped:
            if module.broadcast_buffers:
                send_from_main(module.module.buffers())
        self._unwrapped.send_all()
        return NO_CONTEXT

    def startup_rows(self, modules: nn.Module) -> dict[str, str]:
        """Return rows on what each process holds, on batch statistics, and on how gradients
        travel.
        """
        hook = self.options.ddp_comm_hook
        return {
            "strategy": self.holds,
            "batch norm": batch_norm_row(modules, self.options.sync_batchnorm),
            "gradients": ""
            if hook is None
            else (f"sent between processes as {hook} (--ddp_comm_hook)"),
        }

    def rank_memory(self, run: RehearsedRun) -> RankMemory:
        """Return the memory of the whole model, with the buckets in which gradients travel: they
        have their memory from the first step on, and gradients are views of them, or copies.
        """
        whole = whole_memory(run)
        options = run.options
        is_view = _or_default(options.gradient_as_bucket_view, not run.has_own_fit_batch)
        # what is accumulated under no_sync is no view
        buckets = 0.0 if is_view and run.micro_batches == 1 else whole.gradients
        hook = bytes_of_hook(options, run.gradients)
        return dataclasses.replace(
            whole,
            exchange=buckets + hook.in_passes,
            after_backward=buckets + hook.in_passes,
            in_step=buckets + hook.kept,
            keeps_gradients=is_view or whole.keeps_gradients,
        )

    def _converted(self, module: nn.Module) -> nn.Module:
        return module if self.options.sync_batchnorm is False else convert_sync_batchnorm(module)

    def _options(self, module: nn.Module) -> dict[str, Any]:
        given = self.options
        accepted = inspect.signature(DistributedDataParallel).parameters
        buffers = (
            "forward_sync_buffers" if "forward_sync_buffers" in accepted else "broadcast_buffers"
        )
        return {
            "device_ids": [torch.device(self.device)] if self.device.startswith("cuda") else None,
            "find_unused_parameters": given.find_unused_parameters,
            "static_graph": given.static_graph,
            "bucket_cap_mb": given.bucket_cap_mb,
            # A recipe's fit_batch may keep a gradient; a view is overwritten by the next backward
            # pass.
            "gradient_as_bucket_view": _or_default(
                given.gradient_as_bucket_view, not self.has_own_fit_batch
            ),
            buffers: _or_default(given.broadcast_buffers, has_moving_buffers(module)),
        }


def _or_default(given: bool | None, default: bool) -> bool:
    return default if given is None else given
