"""DDP around one entry of the modules.

Source: what ``forward`` and ``no_sync`` of torch's DDP do was read in torch 2.13: only a forward
pass through the wrapper with synchronisation on arms the reducer, and the backward pass after it
reduces all gradients accumulated so far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit.base import temporarily
from ddpkit.compat import TellsWaitsOfBuffers, version_of, waits_for_gradients
from ddpkit.errors import ConfigError
from ddpkit.optim import parameters_of
from ddpkit.strategies.attribute_forwarding import AttributeForwarding
from ddpkit.strategies.gradient_average import average_gradients
from ddpkit.strategies.gradient_reduction import GradientReduction, average_or_defer
from ddpkit.strategies.no_gradients import go_backwards, has_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


UNUSED = (
    "modules[{!r}] has parameters that the last batch of this optimizer step did not use: {}. DDP "
    "waits for the gradient of each before it averages. Return all tensors that the loss is made "
    "of from forward(). Where steps differ in what they use, give --find_unused_parameters, and "
    "not --static_graph; freeze what no step uses (requires_grad_(False))."
)


class WrappedDDP(AttributeForwarding, TellsWaitsOfBuffers):
    """DDP through which attributes can be reached, and that stays out of the way when nothing is
    trained.

    Without gradients, or in eval mode, the module runs by itself: no collective, so that ranks may
    evaluate different numbers of batches. An attribute that DDP has itself (``device``, ``logger``,
    ``join``, ...) hides the module's; ``Brain.raw_modules`` has those.

    Attributes:
        gradient_reduction: whether the last backward pass averages the gradients over the ranks.

    Ranks: collective, in training mode.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.gradient_reduction = GradientReduction(
            next(parameter for parameter in module.parameters() if parameter.requires_grad)
        )
        # DDP's `dim` is only for one process with several devices; a model's own is not hidden.
        self.__dict__.pop("dim", None)
        self._is_made = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support copying: DDP rebuilds its own parts."""
        super().__setstate__({**state, "_is_made": False})  # type: ignore[no-untyped-call]
        self._is_made = True
        self._register_hook()

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; where nothing is trained, without a detour through this one, unless it
        has hooks.
        """
        if (
            (self.training and torch.is_grad_enabled())
            or self._forward_hooks
            or self._forward_pre_hooks
        ):
            return super().__call__(*inputs, **kwargs)
        # Past __getattr__: this is every batch.
        return self.__dict__["_modules"]["module"](*inputs, **kwargs)

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
        """Let DDP go on after a batch that was not to be averaged and gave no gradient."""
        reduction = self.gradient_reduction
        reduction.skipped = False
        with temporarily(reduction, defers=True):
            go_backwards(self)

    def choose_hook(
        self,
        hook: Callable[..., Any] | None,
        *,
        watched: bool,
    ) -> None:
        """Have DDP call a hook for each bucket.

        Args:
            hook: averages a bucket; None: DDP does.
            watched: DDP decides when a backward pass comes, not in the forward pass before it,
                whether it averages.
        """
        self.gradient_reduction.hook = hook
        self.gradient_reduction.watched = watched
        self._register_hook()

    def _register_hook(self) -> None:
        if self.gradient_reduction.watched or self.gradient_reduction.hook is not None:
            self.register_comm_hook(self.gradient_reduction, average_or_defer)

    def reduce_leftovers(
        self,
        optimizers: Collection[Any] = (),
        *,
        is_only: bool = False,
    ) -> None:
        """Average gradients that DDP has not: accumulated under ``no_sync``, or made past its
        ``forward``.

        The ranks may have taken different branches. A rank without any gradient takes part if it
        has called the module.

        Args:
            optimizers: that step now. For others the backward pass through the module may come
                later.
            is_only: whether no other module is wrapped: then this one always takes part.
        """
        reduction = self.gradient_reduction
        was_called = reduction.called
        reduction.called = False
        if reduction.reduced:
            reduction.reduced = False
            # DDP averages when all gradients of a bucket are there. While it waits, some are this
            # rank's own.
            if waits_for_gradients(self):
                named = self.module.named_parameters()
                unused = [
                    name
                    for name, parameter in named
                    if parameter.requires_grad and parameter.grad is None
                ]
                words = ", ".join(unused) or "some that an earlier batch used"
                raise ConfigError(UNUSED.format(reduction.entry, words))
            if not reduction.awaited or not self.is_stepped_by(optimizers):
                return  # else no backward pass has come here since the module was called
            was_called = is_only = False  # alike on all ranks
        # Without gradients, too: other ranks that have called the module may have some, and would
        # wait for this one.
        if has_gradients(self) or ((was_called or is_only) and self.is_stepped_by(optimizers)):
            parameters = [
                parameter for parameter in self.module.parameters() if parameter.requires_grad
            ]
            average_gradients(parameters, self.process_group)

    def is_stepped_by(self, optimizers: Collection[Any]) -> bool:
        """Say whether one of some optimizers has a parameter of the module."""
        return not set(map(id, parameters_of(optimizers))).isdisjoint(
            map(id, self.module.parameters())
        )
