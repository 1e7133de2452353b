"""What a strategy is asked. By itself it is the strategy of one process on one device.

To add a strategy, write a subclass in a file of this package. Every method has a default that fits
one process. A strategy that averages gradients overrides :attr:`~Strategy.name`,
:attr:`~Strategy.is_distributed`, :meth:`~Strategy.wrap`, :meth:`~Strategy.no_sync`,
:meth:`~Strategy.backward_pass`, :meth:`~Strategy.without_backward`,
:meth:`~Strategy.finish_gradients` and :meth:`~Strategy.startup_rows`; it is simplest to derive it
from ``DDP``. A strategy that divides weights or optimizers also overrides
:attr:`~Strategy.saves_alone` and :meth:`~Strategy.whole_states`. The other places are named in
``strategies/choice.py``.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ddpkit.comm import start_sum
from ddpkit.device import widest_float

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ddpkit.step_times import StepTimer

NO_CONTEXT: AbstractContextManager[None] = contextlib.nullcontext()


class WholeState(NamedTuple):
    """Placeholder that is saved instead of a sharded object: its full state."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """Return the full, unsharded state."""
        return self.state


class Strategy:
    """One process, one device: nothing to wrap. Base class of the other strategies.

    Attributes:
        is_distributed: whether gradients are averaged over processes by torch.
        virtual_ranks: over how many the data is divided; None: over the ranks.
        shards: how many parts of every batch each rank works on.
        same_bits: whether no bit may depend on the number of processes: losses and logged values
            are then added up without rounding, and outside of batches all ranks draw the same
            random numbers.
        saves_alone: whether the main process has all that a checkpoint needs; not where each rank
            has a part of the weights, or of what the optimizers know.
        divides: whether :meth:`wrap` leaves each rank a part of the weights: no rank has to hold
            all of them before.
        roots: the entries that are divided so far.
        unrepeatable: why an optimizer step cannot be repeated; empty where nothing of it is sent
            under :meth:`no_sync` before :meth:`finish_gradients`.
        averages_weights: whether :meth:`after_window` must be called.
        steps_locally: whether the next optimizer step is made with this rank's own gradients.
        weights_differ: whether the ranks' weights differ until the next average: a checkpoint must
            wait.
        timer: measures steps; or None.

    Ranks: local.

    Example:
        >>> Strategy().name
        'one device'
    """

    name = "one device"
    is_distributed = False
    virtual_ranks: int | None = None
    shards = 1
    same_bits = False
    saves_alone = True
    divides = False
    roots: Sequence[Any] = ()
    unrepeatable = ""
    averages_weights = steps_locally = weights_differ = False
    timer: StepTimer | None = None

    def wrap(self, modules: nn.ModuleDict) -> None:
        """Wrap every trainable entry that is not wrapped yet, in place."""

    def begin_epoch(self, modules: nn.ModuleDict) -> None:
        """Wrap entries again in which a recipe has frozen or unfrozen parameters."""

    def prepare_optimizers(
        self,
        modules: nn.ModuleDict,
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        """Prepare optimizers before a checkpoint is loaded into them; refuse those that the
        strategy cannot step.
        """

    def feed(
        self,
        feed: Any,
        progress: Any,
        seed: int,
    ) -> Any:
        """Wrap the batches of a training pass, so that the strategy sees each of them."""
        self.set_progress(progress)
        return feed

    def set_progress(self, progress: Any) -> None:
        """Note what tells at which batch the training is, where its batches do not come by
        :meth:`feed`.
        """

    def evaluated(
        self,
        batches: Iterable[Any],
        seed: int,
        *place: int,
    ) -> Iterable[Any]:
        """Return the batches of a divided evaluation.

        Args:
            batches: of this rank.
            seed: of the run.
            place: numbers that name the evaluation.
        """
        return batches

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are accumulated without being averaged over ranks."""
        return NO_CONTEXT

    def backward_pass(
        self,
        modules: nn.Module,
        *,
        closes: bool,
        counts: bool,
    ) -> AbstractContextManager[None]:
        """Return a context for one backward pass of a window."""
        return NO_CONTEXT

    def without_backward(
        self,
        modules: nn.ModuleDict,
        *,
        closes: bool,
        counts: bool = True,
        retain_graph: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context in the place of a backward pass, for a loss that depends on no
        parameter.
        """
        return NO_CONTEXT

    def finish_gradients(self, optimizers: Collection[Any] = ()) -> None:
        """Make sure that the gradients present are averages over the ranks.

        Args:
            optimizers: that step now.
        """

    def after_window(self, modules: nn.ModuleDict) -> None:
        """Average over the ranks, after an optimizer step, what the strategy has let differ, if it
        is time.
        """

    def recording_use(self, *, counts: bool) -> AbstractContextManager[None]:
        """Return a context for a micro-batch that does not count on all ranks: what only others use
        has no gradient.
        """
        return NO_CONTEXT

    def end_pass(self, modules: nn.ModuleDict) -> None:
        """Make equal on all ranks, at the end of a training pass, what the strategy has let
        differ.
        """

    def startup_rows(self, modules: nn.Module) -> dict[str, str]:
        """Return rows for the start-up block: ``strategy``, and what is not computed as in one
        process.
        """
        return {"strategy": "single: one process"}

    def diverged_entries(self, modules: nn.Module) -> list[str]:
        """Return the trained entries whose weights differ between ranks."""
        return []

    def gradient_orders(self) -> dict[str, list[int]]:
        """Return the order in which each entry's gradients became ready, where that bears on their
        sums.
        """
        return {}

    def load_gradient_orders(self, modules: nn.ModuleDict, orders: Mapping[str, list[int]]) -> None:
        """Restore the order of gradient sums of the run that wrote a checkpoint."""

    def hook_states(self) -> dict[str, dict[str, Any]]:
        """Return the state that gradient averaging keeps on this rank between steps, by entry."""
        return {}

    def load_hook_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on with what :meth:`hook_states` returned on this rank."""

    def forget_errors(self) -> None:
        """Drop what the averaging of gradients has kept, after gradients that are not finite."""

    def evaluating(self, length: int | None) -> AbstractContextManager[None]:
        """Return a context for an evaluation. Collective.

        Args:
            length: number of batches of this rank, if each rank evaluates the same data; None: they
                may differ.
        """
        return NO_CONTEXT

    def whole_states(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make the states of objects whole before rank 0 saves them: collective, on every rank in
        the same order.

        Called only where :attr:`saves_alone` is False.

        Args:
            objects: what a checkpoint stores as ``torch.save`` does, by name.

        Returns:
            By name what to save on rank 0 in the place of some of them: has ``state_dict``, which
            needs no other rank.
        """
        return {}

    def start_average(
        self,
        count: torch.Tensor | float,
        device: str,
    ) -> Callable[[], torch.Tensor | float]:
        """Start averaging a number over the ranks, before the backward pass, without waiting for it
        or for the device.

        Args:
            count: a number, or a tensor of one element.
            device: of this rank.

        Returns:
            What waits for the others and gives the average, shape ``()``; in one process a number
            stays a number.
        """
        if not self.is_distributed:
            own = (
                count.detach().to(widest_float(device))
                if isinstance(count, torch.Tensor)
                else count
            )
            return lambda: own
        total = wide_number(count, device)
        wait = start_sum(total)

        def average() -> torch.Tensor:
            wait()
            return total / torch.distributed.get_world_size()

        return average


@contextlib.contextmanager
def removing_hooks(handles: list[Any]) -> Iterator[None]:
    """Return a context at whose end hooks are removed.

    Args:
        handles: what registering them has returned.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> with removing_hooks([weight.register_hook(torch.zeros_like)]):
        ...     weight.sum().backward()
        >>> weight.grad
        tensor([0.])
    """
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def wide_number(count: torch.Tensor | float, device: str) -> torch.Tensor:
    """Return a copy of a number, or of a tensor of one element, in the widest dtype of a device,
    without waiting for the device.

    Example:
        >>> wide_number(torch.tensor([3]), "cpu")
        tensor(3., dtype=torch.float64)
    """
    wide = widest_float(device)
    if isinstance(count, torch.Tensor):
        return count.detach().reshape(()).to(device, wide, copy=True, non_blocking=True)
    return torch.full((), count, dtype=wide, device=device)
