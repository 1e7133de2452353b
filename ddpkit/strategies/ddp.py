"""torch's wrappers: ``DistributedDataParallel`` for several processes, ``DataParallel`` for one with several GPUs.

With both each process holds the whole model. The hooks that average a bucket of gradients are here, too: as it is, in
half precision, of two ranks in one exchange, or by PowerSGD, whose leftovers go into checkpoints.

Source: what ``forward`` and ``no_sync`` of torch's DDP do was read in torch 2.13: only a forward pass through the
wrapper with synchronisation on arms the reducer, and the backward pass after it reduces all gradients accumulated
so far.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit import distributed
from ddpkit.base import temporarily
from ddpkit.comm import require_agreement
from ddpkit.compat import GradientOrder, TellsWaitsOfBuffers, show_order, version_of, waits_for_gradients
from ddpkit.device import own_first, widest_float
from ddpkit.distributed import exchange_tensor, is_exchanged, start_sum
from ddpkit.errors import BatchError, ConfigError, RankMismatchError
from ddpkit.logger import get_logger
from ddpkit.optim import parameters_of
from ddpkit.strategies.base import (
    NO_CONTEXT,
    Strategy,
    batch_norm_row,
    batch_norms,
    broadcast_from_main,
    has_moving_buffers,
    hooked,
    refuse_shared_parameters,
    refuse_wrapped,
    trained_parameters,
)
from ddpkit.strategies.batch_outputs import BatchOutputs, has_batch_statistics
from ddpkit.strategies.empty_backward import call_without_batch, complete, go_backwards, has_gradients
from ddpkit.strategies.zero_gradients import COMPLETED, ZeroGradients
from ddpkit.syncbn import convert_sync_batchnorm

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ddpkit.run_opts import RunOptions

logger = get_logger(__name__)

APART = 1e-9  # relative difference of the sums of absolute weights, in float64: below it is rounding
ORDER_MATTERS_ABOVE = 2  # ranks: a sum of two numbers is the same either way
UNUSED = (
    "modules[{!r}] has parameters that the last batch of this optimizer step did not use: {}. DDP waits for the "
    "gradient of each before it averages. Return all tensors that the loss is made of from forward(). Where steps "
    "differ in what they use, give --find_unused_parameters, and not --static_graph; freeze what no step uses "
    "(requires_grad_(False))."
)
OTHER_ENTRIES = (
    "the ranks have used different entries of modules in the same steps. Their gradients were averaged together: "
    "checkpoints of this pass are wrong. Use the same, or one entry for all choices (--find_unused_parameters)."
)
UNKNOWN_PART = (
    "the loss of a batch depends on no parameter. With a fit_batch of the recipe, several entries of modules, "
    "accumulation and --find_unused_parameters it is not known what the other processes send in this batch. Put "
    "`with self.no_sync(not self.should_step):` around forward and backward, or return 0.0 * outputs.sum()."
)


class _Clock:
    """Counts batches, and the calls of wrapped modules: for the order of first calls in a batch.

    Attributes:
        batch: backward passes so far.
        calls: first calls so far.
        outputs: what the modules have returned; None where nobody needs it.
    """

    __slots__ = ("batch", "calls", "outputs")

    def __init__(self) -> None:
        self.batch = 0
        self.calls = 0
        self.outputs: BatchOutputs | None = None


class _Reduction:
    """How far the averaging of one module's gradients is. Apart from the module, where each write costs a microsecond.

    Attributes:
        reduced: whether the gradients present are, or are about to be, averages over the ranks.
        armed: whether the next backward pass through the module averages.
        watched: whether DDP calls :func:`_average_or_defer` for each bucket, which then decides.
        defers: whether that hook leaves the gradients of the running backward pass as they are.
        held: whether it does so inside of ``no_sync``: with a static graph, where torch's own way fails.
        entry: name of the module.
        hook: averages a bucket; None: as DDP does it by itself.
        fired: whether a bucket was averaged since :meth:`after_backward` last looked.
        probe: one of the trained parameters.
        before: version of its gradient when the module was last called; -1: there was none.
        called: whether the module was called, with gradients, since the last optimizer step.
        clock: of all wrapped modules.
        awaited: whether, at an optimizer step, an average was expected and no backward pass has come.
        batch: in which the module was last called.
        call: number of its first call there.
        came: whether a bucket has come since the module was called.
        skipped: whether DDP still waits for a backward pass whose gradients are not averaged.
    """

    __slots__ = (
        "armed",
        "awaited",
        "batch",
        "before",
        "call",
        "called",
        "came",
        "clock",
        "defers",
        "entry",
        "fired",
        "held",
        "hook",
        "probe",
        "reduced",
        "skipped",
        "watched",
    )

    def __init__(self, probe: nn.Parameter) -> None:
        self.reduced = self.armed = self.watched = self.defers = self.held = self.fired = False
        self.entry, self.probe, self.before = "", probe, -1
        self.called = self.came = self.skipped = self.awaited = False
        self.clock = _Clock()
        self.batch = -1
        self.call = 0
        self.hook: Callable[..., torch.futures.Future[torch.Tensor]] | None = None

    def is_awaited(self) -> bool:
        """Say whether a backward pass that averages was expected, and none has come to the module since its call."""
        old = self.armed if self.watched else self.before == version_of(self.probe.grad)
        return self.reduced and old

    def after_backward(self) -> None:
        """Record the result of a backward pass, which may have reached this module or not."""
        if self.fired:
            self.reduced, self.armed, self.fired = True, False, False
        elif self.defers or not self.armed:
            self.skipped = self.armed and not self.came
            self.reduced = self.armed = False


def _average_or_defer(state: _Reduction, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks; or leave them as they are."""
    state.came = True
    if not (state.defers or state.held):
        state.fired, state.armed = True, False
        return (state.hook or _average_of_all)(bucket)
    return _done(bucket.buffer())


_average_or_defer.__annotations__.clear()  # DDP compares them with types, and here they are strings


class AttributeForwarding(nn.Module):
    """Makes the attributes of the wrapped ``module`` reachable through its wrapper, for reading and for writing.

    What the wrapper has itself, or got while it was made, is its own; all else is the module's. A base class, beside
    torch's own wrapper.

    Ranks: local.
    """

    _is_made = False

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if value.__class__ is bool and name in own:
            own[name] = value  # DDP writes one in every forward pass; torch's own way takes a microsecond
        elif name in own or not self._is_made or name == "module" or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)

    def __len__(self) -> int:
        return len(self.module)

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("module")
            if inner is None:
                raise
            return getattr(inner, name)


class WrappedDDP(AttributeForwarding, TellsWaitsOfBuffers):
    """DDP through which attributes can be reached, and that stays out of the way when nothing is trained.

    Without gradients, or in eval mode, the module runs by itself: no collective, so that ranks may evaluate
    different numbers of batches. An attribute that DDP has itself (``device``, ``logger``, ``join``, ...) hides the
    module's; ``Brain.raw_modules`` has those.

    Attributes:
        gradient_reduction: whether the last backward pass averages the gradients over the ranks.

    Ranks: collective, in training mode.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.gradient_reduction = _Reduction(next(one for one in module.parameters() if one.requires_grad))
        self.__dict__.pop("dim", None)  # only for one process with several devices; a model's own `dim` is not hidden
        self._is_made = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support copying: DDP rebuilds its own parts."""
        super().__setstate__({**state, "_is_made": False})  # type: ignore[no-untyped-call]
        self._is_made = True
        self._register_hook()

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; where nothing is trained, without a detour through this one, unless it has hooks."""
        if (self.training and torch.is_grad_enabled()) or self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*inputs, **kwargs)
        return self.__dict__["_modules"]["module"](*inputs, **kwargs)  # past __getattr__: this is every batch

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; with gradients, through DDP."""
        if not (self.training and torch.is_grad_enabled()):
            return self.module(*inputs, **kwargs)
        reduction = self.gradient_reduction
        if reduction.skipped:
            self.pass_over()
        reduction.called = True
        reduction.came = False
        clock = reduction.clock
        if reduction.batch != clock.batch:
            reduction.batch = clock.batch
            reduction.call = clock.calls
            clock.calls += 1
        reduction.reduced = reduction.armed = self.require_backward_grad_sync and not reduction.held
        reduction.before = -1 if reduction.probe.grad is None else version_of(reduction.probe.grad)
        if clock.outputs is None:
            return DistributedDataParallel.forward(self, *inputs, **kwargs)  # type: ignore[no-untyped-call]
        clock.outputs.forget_earlier()  # before this pass takes memory
        output = DistributedDataParallel.forward(self, *inputs, **kwargs)  # type: ignore[no-untyped-call]
        clock.outputs.note(self, output)
        return output

    def pass_over(self) -> None:
        """Let DDP go on after a batch whose gradients it was not to average, and of which none has come."""
        reduction = self.gradient_reduction
        reduction.skipped = False
        with temporarily(reduction, defers=True):
            go_backwards(self)

    def choose_hook(self, hook: Callable[..., Any] | None, *, watched: bool) -> None:
        """Have DDP call a hook for each bucket.

        Args:
            hook: averages a bucket; None: DDP does.
            watched: DDP decides when a backward pass comes, not in the forward pass before it, whether it averages.
        """
        self.gradient_reduction.hook, self.gradient_reduction.watched = hook, watched
        self._register_hook()

    def _register_hook(self) -> None:
        if self.gradient_reduction.watched or self.gradient_reduction.hook is not None:
            self.register_comm_hook(self.gradient_reduction, _average_or_defer)

    def reduce_leftovers(self, optimizers: Collection[Any] = (), *, is_only: bool = False) -> None:
        """Average gradients that DDP has not: accumulated under ``no_sync``, or made past its ``forward``.

        The ranks may have taken different branches. A rank without any gradient takes part if it has called the module.

        Args:
            optimizers: that step now. For others the backward pass through the module may come later.
            is_only: whether no other module is wrapped: then this one always takes part.
        """
        reduction = self.gradient_reduction
        was_called = reduction.called
        reduction.called = False
        if reduction.reduced:
            reduction.reduced = False
            if waits_for_gradients(self):
                named = self.module.named_parameters()
                unused = [name for name, one in named if one.requires_grad and one.grad is None]
                words = ", ".join(unused) or "some that an earlier batch used"
                raise ConfigError(UNUSED.format(reduction.entry, words))
            if not reduction.awaited or not self.is_stepped_by(optimizers):
                return  # else no backward pass has come here since the module was called
            was_called = is_only = False  # alike on all ranks
        if has_gradients(self) or ((was_called or is_only) and self.is_stepped_by(optimizers)):
            parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            average_gradients(parameters, self.process_group)

    def is_stepped_by(self, optimizers: Collection[Any]) -> bool:
        """Say whether one of some optimizers has a parameter of the module."""
        return not set(map(id, parameters_of(optimizers))).isdisjoint(map(id, self.module.parameters()))


class _Switched:
    """A context in which an attribute of some objects has another value. A class: a window enters it in each batch."""

    __slots__ = ("_before", "_during", "_name", "_owners")

    def __init__(self, owners: Sequence[Any], name: str, *, during: bool) -> None:
        self._owners, self._name, self._during = owners, name, during
        self._before: list[Any] = []

    def __enter__(self) -> None:
        name = self._name
        self._before = [getattr(one, name) for one in self._owners]
        for one in self._owners:
            setattr(one, name, self._during)

    def __exit__(self, *_: object) -> None:
        for one, before in zip(self._owners, self._before, strict=True):
            setattr(one, self._name, before)


def average_gradients(parameters: Sequence[nn.Parameter], group: torch.distributed.ProcessGroup | None = None) -> None:
    """Average gradients over the ranks, where DDP does not. A rank that has none of a parameter gets the others'.

    Args:
        parameters: at least one, the same on all ranks.
        group: of the ranks.

    Ranks: collective.
    """
    own_ones = [one.grad is not None for one in parameters]
    sums = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    present = torch.tensor(own_ones, dtype=sums[0].dtype)
    # One length on all ranks, whatever each has: NCCL does not notice where they differ.
    flat = torch.cat([one.flatten() for one in (*sums, present.to(sums[0].device, non_blocking=True))])
    start_sum(flat, group)()
    flat /= torch.distributed.get_world_size(group)
    *averages, present = torch.split(flat, [one.numel() for one in (*sums, present)])
    exists = own_ones if all(own_ones) else present.tolist()
    for parameter, own, average, anywhere in zip(parameters, sums, averages, exists, strict=True):
        if anywhere:  # a rank that took another branch gets the others' gradients
            own.copy_(average.view_as(own))
            parameter.grad = own


class DDP(Strategy):
    """Several processes: ``DistributedDataParallel`` around every trainable entry, BatchNorm synchronised.

    Args:
        options: of the run, with the device of this rank.
        decides_late: a backward pass is told whether to average, whatever the forward pass before it expected: for a
            ``fit_batch`` that does not say so before (see :meth:`backward_pass`).

    Ranks: collective.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> DDP(RunOptions(device="cpu")).name
        'DistributedDataParallel'
    """

    name = "DistributedDataParallel"
    is_distributed = True
    holds = "ddp: each process holds the whole model"

    def __init__(self, options: RunOptions, *, decides_late: bool = False) -> None:
        self.device, self.options, self.decides_late = str(options.device), options, decides_late
        self.wrapped: list[WrappedDDP] = []
        self._trained: dict[str, frozenset[int]] = {}
        self._orders: dict[str, GradientOrder] = {}
        self._noting: list[GradientOrder] = []
        self._used: set[int] | None = None  # parameters with a gradient that counts; None: all that have one
        self._modules = nn.ModuleDict()
        self._outside: list[nn.Parameter] = []  # of the optimizers, but in no entry of the modules
        self._order = 0  # a number that follows from the entries that each optimizer step has used
        self._clock = _Clock()
        self._steps = 0  # optimizer steps for which gradients were finished
        self._frozen: list[nn.Parameter] = []  # as the entries were wrapped: DDP does not know them
        self._zeros = ZeroGradients(self._clock)

    def wrap(self, modules: nn.ModuleDict) -> None:
        """Convert BatchNorm, and put DDP around every trainable entry that has none yet.

        The parameters and buffers of all entries are set to rank 0's values, as DDP does for its own module.

        Raises:
            ConfigError: two entries share a parameter, whose gradient would be averaged twice.
        """
        refuse_shared_parameters(modules)
        self._modules = modules
        for name, module in modules.items():
            trained = trained_parameters(module)
            if self._trained.get(name) == trained:
                continue
            refuse_wrapped(name, module, f"strategy={'zero1' if self.options.strategy == 'zero1' else 'ddp'!r}")
            self._trained[name] = trained
            if trained:
                wrapped = WrappedDDP(self._converted(module), **self._options(module))
                modules[name] = wrapped
                self.wrapped.append(wrapped)
                wrapped.gradient_reduction.entry = name
                wrapped.gradient_reduction.clock = self._clock
                watched = self.decides_late or self.options.static_graph or self.options.find_unused_parameters
                wrapped.choose_hook(_hook_of(self.options, module), watched=watched)
                if self._order_matters():
                    self._orders[name] = GradientOrder(wrapped)
                    self._noting.append(self._orders[name])
            else:
                broadcast_from_main(module, self.device)
                modules[name] = self._converted(module)  # its running statistics may move
        self._frozen = [one for one in modules.parameters() if not one.requires_grad]
        self._clock.outputs = self._zeros.outputs if self._zeros.outputs.follow(modules) else None

    def follow_batches(self, progress: Any) -> None:
        """Note what tells at which batch the training is, before its first one."""
        self._zeros.outputs.begin_pass(progress, self._clock)

    def _order_matters(self) -> bool:
        """Say whether gradients are averaged, and in an order that DDP follows and their sums depend on."""
        options, hook = self.options, self.options.ddp_comm_hook
        averages = hook != "post_local_sgd" or bool(options.local_sgd_start)
        matters = hook == "powersgd" or torch.distributed.get_world_size() > ORDER_MATTERS_ABOVE
        return averages and matters and not options.find_unused_parameters

    def replace_modules(self, modules: nn.ModuleDict) -> None:
        """Know other modules from now on."""
        self._modules = modules

    def follow(self, modules: nn.ModuleDict) -> None:
        """Wrap new entries, and those again whose trainable parameters have changed since they were wrapped.

        DDP averages the gradients of all parameters that were trainable when it was made, and waits for all of them.
        """
        self._close_orders()
        self.wrapped = [one for one in self.wrapped if any(one is entry for entry in modules.values())]
        changed = [name for name, one in modules.items() if self._trained.get(name) != trained_parameters(one)]
        if not changed:
            return
        logger.info("Other parameters than before are trained in: %s.", ", ".join(changed))
        for name in changed:
            module = modules[name]
            if isinstance(module, WrappedDDP):
                self.wrapped.remove(module)
                modules[name] = module.module
        self.wrap(modules)

    def prepare_optimizers(self, optimizers: Mapping[str, Any]) -> None:
        """Set to rank 0's values what the optimizers step and no entry has; its gradients are averaged in each step.

        Raises:
            RankMismatchError: the ranks have other parameters of that kind. On every rank.
        """
        known = set(map(id, self._modules.parameters()))
        self._outside = [one for one in parameters_of(optimizers.values()) if id(one) not in known]
        shapes = str([tuple(one.shape) for one in self._outside])
        require_agreement({"shapes of the parameters that an optimizer has and no entry of modules": shapes})
        broadcast_from_main(nn.ParameterList(self._outside), self.device)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are accumulated without being averaged over ranks."""
        if self.options.static_graph:  # torch's own way averages in the wrong backward passes then
            held = [one.gradient_reduction for one in self.wrapped]
            return _Switched(held, "held", during=True)
        return _Switched(self.wrapped, "require_backward_grad_sync", during=False)

    def backward_pass(self, modules: nn.Module, *, closes: bool, counts: bool) -> AbstractContextManager[None]:
        """Return a context for one backward pass of a window.

        Args:
            modules: the trained modules.
            closes: whether the micro-batch is the last of its window. Gradients are averaged only then.
            counts: whether this rank's gradients count. If not they become zero, also for an infinite loss, which a
                weight of 0 would turn into NaN.
        """
        self._clock.batch += 1
        watched = [module.gradient_reduction for module in self.wrapped if module.gradient_reduction.watched]
        uncounted = [] if counts else [one for one in (*modules.parameters(), *self._outside) if one.requires_grad]
        return self._watched_pass(watched, uncounted, closes=closes) if watched or uncounted else NO_CONTEXT

    @contextlib.contextmanager
    def _watched_pass(
        self, watched: list[_Reduction], uncounted: list[nn.Parameter], *, closes: bool
    ) -> Iterator[None]:
        defers = self._defers(closes=closes)
        for reduction in watched:
            reduction.defers = defers
        try:
            with hooked([one.register_hook(torch.zeros_like) for one in uncounted]):  # type: ignore[no-untyped-call]
                yield
            for reduction in watched:
                reduction.after_backward()
        finally:
            for reduction in watched:
                reduction.defers = False

    def _defers(self, *, closes: bool) -> bool:
        """Say whether a backward pass leaves gradients as they are, where it is told so."""
        # In the last batch of a window DDP does not know what those before have used, unless no_sync was around them.
        differ = self.options.find_unused_parameters and self.options.grad_accumulation_factor > 1
        return not closes or (differ and self.decides_late)

    def without_backward(
        self, *, closes: bool, counts: bool = True, retain_graph: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context in the place of a backward pass: takes part in what the other ranks send in theirs.

        Args:
            closes: whether the micro-batch is the last of its window.
            counts: whether this rank's gradients count.
            retain_graph: whether another loss of the batch follows.

        Raises:
            BatchError: it is not known what the others send.
        """
        if self._clock.outputs is not None and has_batch_statistics(self._modules):
            return self._backward_of_zeros(retain_graph=retain_graph, closes=closes, counts=counts)
        return self._without_backward(closes=closes)

    @contextlib.contextmanager
    def _backward_of_zeros(self, *, retain_graph: bool, closes: bool, counts: bool) -> Iterator[None]:
        """Go backwards from what the modules have returned: the others wait in the layers that share statistics."""
        starts = self._zeros.starts(self.wrapped, retain_graph=retain_graph)
        yield
        without = self._zeros.without_loss(self.wrapped)
        reductions = {one: one.gradient_reduction for one in self.wrapped}
        batch, defers = self._clock.batch, self._defers(closes=closes)
        armed = [one for one, state in reductions.items() if state.batch == batch and state.reduced]
        averaged = [one for one in armed if not (defers and reductions[one].watched)]
        backward_pass = self.backward_pass(self._modules, closes=closes, counts=counts)
        self._zeros.go_backwards(starts, without, averaged, f"{self._steps}/{batch}", backward_pass)

    @contextlib.contextmanager
    def _without_backward(self, *, closes: bool) -> Iterator[None]:
        """Take part without the outputs of a batch: nothing is sent but gradients."""
        sending = [
            module
            for module in self.wrapped
            if module.require_backward_grad_sync and not module.gradient_reduction.held
        ]
        is_known = len(sending) == 1 or not self.decides_late
        sends_use = self.options.find_unused_parameters  # in each backward pass that the forward pass has armed
        if sending and sends_use and not closes and not is_known:
            raise BatchError(UNKNOWN_PART)
        if sending and not any(one.gradient_reduction.reduced for one in sending):
            call_without_batch(sending)
        yield
        self._clock.batch += 1
        awaited = [one for one in sending if one.gradient_reduction.is_awaited()]
        if is_known and (closes or sends_use):
            self._complete(awaited, closes=closes)
        elif not closes or (sends_use and self.options.grad_accumulation_factor > 1):
            for one in awaited:  # as after a backward pass whose gradients are not averaged
                one.gradient_reduction.skipped = True
                one.gradient_reduction.reduced = one.gradient_reduction.armed = False

    def _complete(self, modules: list[WrappedDDP], *, closes: bool) -> None:
        """Take part in the averages of modules, without gradients of the last batch, in the order of a backward pass.

        Args:
            modules: called in this batch.
            closes: whether it is the last of its window.
        """
        modules.sort(key=lambda one: one.gradient_reduction.call, reverse=True)
        watched = [one.gradient_reduction for one in modules if one.gradient_reduction.watched]
        with self._watched_pass(watched, [], closes=closes):
            for module in modules:
                complete(module, self._steps)
        for module in modules:
            module.gradient_reduction.before = COMPLETED
            module.gradient_reduction.awaited = False

    def _complete_unused(self, optimizers: Collection[Any]) -> None:
        """Complete the averages of what was called, if no backward pass of this rank has come to any of it."""
        skipped = [one for one in self.wrapped if one.gradient_reduction.skipped]
        for module in sorted(skipped, key=lambda one: one.gradient_reduction.call, reverse=True):
            module.pass_over()
        armed = [
            module
            for module in self.wrapped
            if module.gradient_reduction.reduced and module.is_stepped_by(optimizers)
        ]
        if all(one.gradient_reduction.awaited and not waits_for_gradients(one) for one in armed):
            self._complete(armed, closes=True)

    def finish_gradients(self, optimizers: Collection[Any] = ()) -> None:
        """Average gradients that DDP has not averaged; drop gradients of batches with weight 0."""
        is_only = len(self.wrapped) == 1
        if not is_only:
            self._order = hash((self._order, *[one.gradient_reduction.reduced for one in self.wrapped]))
        is_waiting = False
        for module in self.wrapped:  # without a call for each: this is every step
            reduction = module.gradient_reduction
            old = reduction.armed if reduction.watched else reduction.before == version_of(reduction.probe.grad)
            reduction.awaited = reduction.reduced and old
            is_waiting = is_waiting or reduction.awaited or reduction.skipped
        if is_waiting and not self.options.static_graph:
            self._complete_unused(optimizers)
        self._steps += 1
        zeros = self._zeros.announce_leftovers(self._steps) if self._zeros.versions else []
        for module in self.wrapped:
            module.reduce_leftovers(optimizers, is_only=is_only)
        if others := [one for one in (*self._outside, *self._frozen) if one.requires_grad]:
            average_gradients(others)
        if zeros or self._used is not None or self._noting:
            self._tidy_gradients(zeros)

    def _tidy_gradients(self, announced: Sequence[WrappedDDP]) -> None:
        """Drop what no loss of any rank has given, once it is averaged."""
        self._zeros.drop_leftovers(announced, self._steps)
        if self._used is not None:
            self._drop_unused(self._used)
            self._used = None
        if self._noting:
            self._close_orders()

    def _drop_unused(self, used: set[int]) -> None:
        """Drop the gradients of parameters that only batches with weight 0 have used, on any rank."""
        parameters = self._parameters()
        sums = distributed.sum_over_ranks([float(id(one) in used) for one in parameters])
        for parameter, number in zip(parameters, sums, strict=True):
            if not number:
                parameter.grad = None

    def noting_use(self, *, counts: bool) -> AbstractContextManager[None]:
        """Return a context for a micro-batch that counts on some ranks only.

        A batch that counts nothing gives gradients of zero. A parameter that only such batches use must end up without
        a gradient, as on one process: an optimizer may move what has a gradient of zero.

        Args:
            counts: whether it counts on this rank.
        """
        if not self.options.find_unused_parameters:  # then all parameters are used by every batch
            return NO_CONTEXT
        parameters = self._parameters()
        if self._used is None:
            self._used = {id(one) for one in parameters if one.grad is not None}  # of the window's earlier ones
        used = self._used
        trained: list[Any] = parameters if counts else []

        def note(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:  # else the rank has none, and only takes part in an average
                used.add(id(parameter))

        return hooked([one.register_post_accumulate_grad_hook(note) for one in trained])

    def _parameters(self) -> list[nn.Parameter]:
        return [one for module in self.wrapped for one in module.module.parameters() if one.requires_grad]

    def _close_orders(self) -> None:
        self._noting = [order for order in self._noting if not order.close()]

    def diverged_entries(self, modules: nn.Module) -> list[str]:
        """Return the trained entries whose weights differ between ranks.

        Compared are sums of absolute values, within :data:`APART`: ranks on other hardware may round them differently.
        """
        wide = widest_float(self.device)
        own = {
            name: float(sum(one.detach().abs().sum(dtype=wide) for one in module.parameters()))
            for name, module in modules.named_children()
            if self._trained.get(name)
        }
        everybody = distributed.exchange(own)
        found = {name: [sizes[name] for sizes in everybody] for name in own}
        return [name for name, sizes in found.items() if max(sizes) - min(sizes) > APART * max(sizes)]

    def gradient_orders(self) -> dict[str, list[int]]:
        """Return the order in which each entry's gradients became ready, where DDP follows it."""
        return {name: list(noted.order) for name, noted in self._orders.items() if noted.is_complete}

    def load_gradient_orders(self, modules: nn.ModuleDict, orders: Mapping[str, list[int]]) -> None:
        """Restore the order of gradient sums of the run that wrote a checkpoint.

        Args:
            modules: wrapped, and not trained yet.
            orders: what :meth:`gradient_orders` returned there.
        """
        for name, order in orders.items():
            noted = self._orders.get(name)
            if noted is not None and not noted.order and show_order(modules[name], order):
                noted.order[:] = order

    def hook_states(self) -> dict[str, dict[str, Any]]:
        """Return by entry what this rank's communication hooks keep from step to step."""
        return {entry: hook.state_dict() for entry, hook in self._compressing().items()}

    def load_hook_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on with what the hooks of this rank have kept, after :meth:`load_gradient_orders`.

        Args:
            states: what :meth:`hook_states` returned.
        """
        found = self._compressing()
        for entry in found.keys() & states.keys():
            found[entry].load_state_dict(states[entry], self.device)

    def forget_errors(self) -> None:
        """Drop what hooks have kept, after gradients that are not finite."""
        for hook in self._compressing().values():
            hook.forget()

    def _compressing(self) -> dict[str, Any]:
        found = {one.gradient_reduction.entry: one.gradient_reduction.hook for one in self.wrapped}
        return {entry: hook for entry, hook in found.items() if hasattr(hook, "forget")}

    def end_pass(self, modules: nn.ModuleDict) -> None:
        """Give every rank the batch statistics of rank 0, where each rank has its own.

        Raises:
            RankMismatchError: the ranks have used other entries of modules in their steps.
        """
        self._zeros.outputs.forget()
        if len(self.wrapped) > 1 and len(set(distributed.exchange(self._order, site="entries"))) > 1:
            raise RankMismatchError(OTHER_ENTRIES)
        if self.options.sync_batchnorm is False:
            for part in batch_norms(modules):
                for buffer in part.buffers(recurse=False):
                    torch.distributed.broadcast(buffer, src=0)

    def start_rows(self, modules: nn.Module) -> dict[str, str]:
        """Return rows on what each process holds, on batch statistics, and on how gradients travel."""
        hook = self.options.ddp_comm_hook
        return {
            "strategy": self.holds,
            "batch norm": batch_norm_row(modules, self.options.sync_batchnorm),
            "gradients": "" if hook is None else f"sent between processes as {hook} (--ddp_comm_hook)",
        }

    def _converted(self, module: nn.Module) -> nn.Module:
        return module if self.options.sync_batchnorm is False else convert_sync_batchnorm(module)

    def _options(self, module: nn.Module) -> dict[str, Any]:
        given, accepted = self.options, inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in accepted else "broadcast_buffers"
        return {
            "device_ids": [torch.device(self.device)] if self.device.startswith("cuda") else None,
            "find_unused_parameters": given.find_unused_parameters,
            "static_graph": given.static_graph,
            "bucket_cap_mb": given.bucket_cap_mb,
            # A recipe's fit_batch may keep a gradient; a view is overwritten by the next backward pass.
            "gradient_as_bucket_view": _or(given.gradient_as_bucket_view, not self.decides_late),
            buffers: _or(given.broadcast_buffers, has_moving_buffers(module)),
        }


def _hook_of(options: RunOptions, module: nn.Module) -> Callable[..., Any] | None:
    """Return the hook that averages a module's buckets; None if gradients are sent unchanged."""
    if options.ddp_comm_hook in {None, "post_local_sgd"}:
        trained = [one for one in module.parameters() if one.requires_grad]
        # Ranks that use different parameters have their buckets in another order: they must not wait for each.
        return _average_of_pair if is_exchanged(trained) and not options.find_unused_parameters else None
    if options.ddp_comm_hook == "powersgd":
        return PowerSGD(options["matrix_approximation_rank"], options["start_powersgd_iter"])
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    half = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    return functools.partial(half[options.ddp_comm_hook], None)  # type: ignore[arg-type]  # torch's default group


_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")  # by number of bucket
_EPSILON = 1e-8  # a gradient of zero has no direction


class PowerSGD:
    """torch's PowerSGD for one module in DDP, with a state for checkpoints.

    Gradients travel as products of thin matrices, and what is lost is added to the next step's.

    Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", 2019, https://arxiv.org/abs/1905.13727; ``powerSGD_hook.py`` of torch 2.13.

    Args:
        rank: columns of the thin matrices.
        start: optimizer steps before, in which gradients travel as they are; at least 2, since DDP makes its buckets
            anew after the first.

    Ranks: local; what is called with a bucket is collective.

    Example:
        >>> PowerSGD(1, 10).state_dict()["iter"]
        0
    """

    def __init__(self, rank: int, start: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self._average = powerSGD_hook.powerSGD_hook
        self.state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=start, orthogonalization_epsilon=_EPSILON
        )

    def __call__(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the ranks; wait for it, since the collectives of two buckets could mix."""
        known = self.state.error_dict.get(bucket.index())
        if known is not None and known.shape != bucket.buffer().shape:
            self.forget()  # of a run with buckets of another size
        return _done(self._average(self.state, bucket).wait())

    def forget(self) -> None:
        """Drop what earlier steps have left: after a gradient that is not finite it is not finite either."""
        for name in _MEMORIES:
            getattr(self.state, name).clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the random stream, and what is left over: as large as the gradients."""
        _, keys, position, *_ = self.state.rng.get_state()
        found: dict[str, Any] = {"iter": self.state.iter, "random": [*map(int, keys), position]}
        for name in _MEMORIES:
            found[name] = {bucket: one.to("cpu", copy=True) for bucket, one in getattr(self.state, name).items()}
        return found

    def load_state_dict(self, state: Mapping[str, Any], device: str) -> None:
        """Go on from a state.

        Args:
            state: of the same rank.
            device: of this rank.
        """
        *keys, position = state["random"]
        self.state.rng.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
        self.state.iter = state["iter"]
        for name in _MEMORIES:
            getattr(self.state, name).update({key: one.to(device, copy=True) for key, one in state[name].items()})


def _done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def _average_of_all(bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # torch's default group


def _average_of_pair(bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over two ranks, as DDP does: each gradient is divided first."""
    own = bucket.buffer()
    if own.layout is not torch.strided:  # of nn.Embedding(sparse=True)
        return _average_of_all(bucket)
    own.div_(2)
    return _done(own.add_(exchange_tensor(own)()))  # waiting: the thread of a collective is not to enter Python


def _or(given: bool | None, default: bool) -> bool:
    return default if given is None else given


# ------------------------------------------------------------------------------------------------ DataParallel


class WrappedDataParallel(AttributeForwarding, nn.DataParallel[nn.Module]):
    """``nn.DataParallel`` through which attributes can be reached; its replicas compute in the caller's precision.

    Ranks: local (one process, several GPUs).

    Example:
        >>> WrappedDataParallel(torch.nn.Linear(2, 1)).in_features
        2
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._is_made = True

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run each replica in a thread, which torch tells that autocast is on, but not in which dtype: that is ours.

        Source: ``torch/nn/parallel/parallel_apply.py`` of torch 2.13; the dtype of autocast is kept per thread.
        """
        kind = self.src_device_obj.type
        dtype = torch.get_autocast_dtype(kind)
        in_dtype: Any = [functools.partial(_run_in, kind, dtype, replica) for replica in replicas]
        return super().parallel_apply(in_dtype, inputs, kwargs)


def _run_in(kind: str, dtype: torch.dtype, module: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
    """Run a module under autocast to a dtype, where autocast is on in this thread."""
    with torch.autocast(kind, dtype=dtype, enabled=torch.is_autocast_enabled(kind)):
        return module(*inputs, **kwargs)


class DataParallel(Strategy):
    """One process, ``nn.DataParallel`` around every trainable entry of the modules, on all GPUs.

    Args:
        device: where the modules are, such as ``"cuda:1"``; its GPU comes first, as ``nn.DataParallel`` wants it.

    Raises:
        ConfigError: this machine has no GPU.

    Ranks: local.

    Example:
        >>> DataParallel("cpu")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: data_parallel_backend=True needs a GPU, ...
    """

    name = "nn.DataParallel"
    unrepeatable = "whose GPUs have parts of one batch"

    def __init__(self, device: str) -> None:
        if not device.startswith("cuda"):
            raise ConfigError(
                f"data_parallel_backend=True needs a GPU, and the device is {device!r}. Leave it out, or use several "
                "processes: torchrun --standalone --nproc_per_node=2 train.py hparams.yaml --device=cpu"
            )
        self.device = device

    def start_rows(self, modules: nn.Module) -> dict[str, str]:
        """Return rows on the GPUs, and on batch statistics, which each GPU takes from its own rows."""
        gpus = f"data parallel: one process, with {torch.cuda.device_count()} GPU(s) (nn.DataParallel)"
        return {"strategy": gpus, "batch norm": "each GPU by its own rows" if batch_norms(modules) else ""}

    def wrap(self, modules: nn.ModuleDict) -> None:
        """Put ``nn.DataParallel`` around every trainable entry."""
        for name, module in modules.items():
            if trained_parameters(module) and not isinstance(module, nn.DataParallel):
                modules[name] = WrappedDataParallel(module, device_ids=own_first(self.device))
