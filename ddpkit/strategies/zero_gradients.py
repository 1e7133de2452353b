"""Backward passes with gradients of zero, of a rank whose loss depends on no parameter, and what
becomes of them.

Where no rank has a loss in a whole step, its parameters must end up without gradients, as on one
process: an optimizer may move what has a gradient of zero. So ranks without a loss tell each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit.errors import BatchError
from ddpkit.strategies.batch_outputs import BatchOutputs, go_backwards_from, has_batch_statistics
from ddpkit.strategies.empty_backward import (
    NOT_CALLED,
    STATISTICS,
    announce,
    drop_if_all_are_without,
    drop_zeros,
    gradient_versions,
)
from ddpkit.strategies.no_gradients import has_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    import torch

    from ddpkit.strategies.wrapped_ddp import WrappedDDP

OTHER_LOSSES = (
    "the loss of a batch depends on no parameter, and backward(loss, retain_graph=True) says that "
    "another loss of the batch follows. The other processes wait for this one in the "
    "SyncBatchNorm layers, and it is not known in which. Return 0.0 * outputs.sum() for such a "
    "loss."
)
NO_OUTPUTS = (
    "the loss of a batch depends on no parameter, and what modules[{!r}] has returned has no "
    "tensor with a gradient. The other processes wait for this one in its SyncBatchNorm layers. "
    "Return tensors, or 0.0 * outputs.sum() as the loss."
)
COMPLETED = -2  # in the place of a version


class ZeroGradients:
    """Goes backwards with gradients of zero, and knows which gradients of this rank come from no
    loss.

    Args:
        clock: has ``batch``, the number of backward passes so far.

    Attributes:
        outputs: what the modules have returned in the batch.
        versions: of gradients since the last step that may come from no loss, by module. Without
            one no step asks more.

    Ranks: collective.

    Example:
        >>> ZeroGradients(None).versions
        {}
    """

    def __init__(self, clock: Any) -> None:
        self.outputs = BatchOutputs()
        self._clock = clock
        self.versions: dict[WrappedDDP, list[tuple[int, int]]] = {}

    def starts(
        self,
        wrapped: Sequence[WrappedDDP],
        *,
        retain_graph: bool,
    ) -> list[torch.Tensor]:
        """Return the tensors from which to go backwards in this batch.

        Args:
            wrapped: all modules that are trained.
            retain_graph: whether another loss of the batch follows.

        Raises:
            BatchError: it is not known what the other ranks do.
        """
        found = self.outputs.now()
        called = self._called(wrapped)
        if not called:
            names = ", ".join(f"modules[{module.gradient_reduction.entry!r}]" for module in wrapped)
            raise BatchError(NOT_CALLED.format(names, STATISTICS))
        if retain_graph:
            raise BatchError(OTHER_LOSSES)
        for module in called:
            is_found = any(tensors for caller, tensors in found if caller is module)
            if not is_found and has_batch_statistics(module):
                raise BatchError(NO_OUTPUTS.format(module.gradient_reduction.entry))
        starts = [tensor for _, tensors in found for tensor in tensors]
        if not starts:
            raise BatchError(NO_OUTPUTS.format(called[0].gradient_reduction.entry))
        return starts

    def _called(self, wrapped: Sequence[WrappedDDP]) -> list[WrappedDDP]:
        return [
            module for module in wrapped if module.gradient_reduction.batch == self._clock.batch
        ]

    def without_loss(self, wrapped: Sequence[WrappedDDP]) -> list[WrappedDDP]:
        """Return the modules whose gradients, if any, come from no loss of this rank."""
        return [
            module for module in wrapped if not has_gradients(module) or self._is_of_zeros(module)
        ]

    def _is_of_zeros(self, module: WrappedDDP) -> bool:
        return module in self.versions and self.versions[module] == gradient_versions(module)

    def go_backwards(
        self,
        starts: list[torch.Tensor],
        without: Sequence[WrappedDDP],
        averaged: Sequence[WrappedDDP],
        number: str,
        backward_pass: AbstractContextManager[None],
    ) -> None:
        """Go backwards as the other ranks do.

        Args:
            starts: from where.
            without: what :meth:`without_loss` returned.
            averaged: modules whose gradients are averaged in this pass.
            number: of the pass; equal on all ranks.
            backward_pass: context for it.
        """
        told = [module for module in averaged if module in without]
        for module in told:
            announce(module, number)
        with backward_pass:
            go_backwards_from(starts)
        self.outputs.forget()
        for module in told:
            drop_if_all_are_without(module, number)
            module.gradient_reduction.before = COMPLETED
        left = [module for module in without if module not in told and has_gradients(module)]
        self.versions = {module: gradient_versions(module) for module in left}

    def announce_leftovers(self, step: int) -> list[WrappedDDP]:
        """Return the modules that are averaged at an optimizer step, with no loss of this rank;
        tell the other ranks.

        Args:
            step: its number.
        """
        known = [version for version in self.versions if self._is_of_zeros(version)]
        found = [module for module in known if not module.gradient_reduction.reduced]
        for module in found:
            announce(module, f"{step}/leftovers")
        self.versions = {}
        return found

    def drop_leftovers(self, announced: Sequence[WrappedDDP], step: int) -> None:
        """Drop their gradients after the average, if they come from no loss of any rank.

        Args:
            announced: what :meth:`announce_leftovers` returned.
            step: as there.
        """
        for module in announced:
            drop_if_all_are_without(module, f"{step}/leftovers")

    def drop_own(self) -> None:
        """Drop gradients of zero that come from no loss, where the step is this rank's own."""
        for module in filter(self._is_of_zeros, self.versions):
            drop_zeros(module)
        self.versions = {}
