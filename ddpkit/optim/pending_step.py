"""A step whose skip decision was made on the GPU; its norm has not been read yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ddpkit.base import reads_device
from ddpkit.optim.clipping import StepResult, result_of_norm

if TYPE_CHECKING:
    from collections.abc import Callable


class PendingStep:
    """A step whose skip decision was made on the GPU; its norm has not been read yet.

    Args:
        norm: of the gradients, shape ``()``, on their device; as in :class:`StepResult`.
        max_norm: to which they are scaled down; None or <= 0: not at all.

    Attributes:
        is_resolving: whether :meth:`resolve` runs, or has run.

    Ranks: local; equal on every rank when the gradients are.

    Example:
        >>> step = PendingStep(torch.tensor(3.0), 1.0)
        >>> step.then(print)
        >>> step.resolve()
        StepResult(stepped=True, norm=3.0, clipped=True)
    """

    def __init__(self, norm: torch.Tensor, max_norm: float | None) -> None:
        self.is_resolving = False
        self._max_norm = max_norm
        self._then: Callable[[StepResult], object] | None = None
        self._norm = norm.to("cpu", non_blocking=True)
        self._event = None
        if norm.is_cuda:  # then the copy is on its way to pinned memory
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(norm.device))

    @reads_device
    def result(self) -> StepResult:
        """Wait for the norm, which was sent before the optimizers' kernels, and return the
        result.
        """
        if self._event is not None:
            self._event.synchronize()
        return result_of_norm(self._norm.item(), self._max_norm)

    def then(self, callback: Callable[[StepResult], object]) -> None:
        """Have a function called with the result when the step is resolved."""
        self._then = callback

    def resolve(self) -> None:
        """Wait for the norm, and call what follows the step; once."""
        self.is_resolving = True
        result = self.result()
        if self._then is not None:
            self._then(result)


LateStep = PendingStep  # its name in earlier versions
