"""An accumulation window: the micro-batches of one optimizer step, and where in it the loop is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Window:
    """The micro-batches of one optimizer step; where in it the loop is.

    Attributes:
        closes: whether the current micro-batch is the last of its window, after which the optimizer
            steps.
        count: this rank's samples in the current micro-batch; 0 for a repeated one.
        weight: of its loss in the mean of the epoch: the samples, or this rank's part of the batch.
        loss_scale: factor on the current loss before its backward pass.
        scale: the same for a recipe that applies it by itself: reading it sets ``is_weighed``.
        is_weighed: whether the losses of the window are multiplied by ``loss_scale``.
        correction: factor on the gradients of the window, if the weights were not known in advance.
        multiplier: what else the next optimizer step multiplies the gradients by.
        deferred: micro-batches in a row, up to step ``deferred_at``, whose gradients wait for a
            step.
        deferred_at: the last such step; -1 once the optimizers have stepped.
        is_asked: whether the recipe knows that the current micro-batch closes the window.
        has_means: whether gradients of means wait for a step.
        counted: count of the loss sums since the last step; None without loss sums.
        counted_at: the last step that has added to that.
        divisor: what these sums were divided by.
        average: returns, at the window's end, the average of ``counted`` over the ranks.
        is_overdue: whether a window with sums has ended without a step.
        number: of the window; counts on where nothing divides the training into windows.
        stepped_in: number of the last window in which optimizers have stepped.
        skipped_in: number of the last window in which a step was skipped for its gradients.
        clipped_in: number of the last window in which gradients were clipped.

    Ranks: local; ``closes``, ``correction`` and what is deferred is equal on all ranks.

    Example:
        >>> window = Window()
        >>> window.defer(5); window.defer(6); window.num_deferred(6), window.num_deferred(7)
        (2, 0)
    """

    closes: bool = True
    count: int = 1
    weight: float = 1.0
    loss_scale: float = 1.0
    is_weighed: bool = False
    correction: float = 1.0
    multiplier: float | torch.Tensor = 1.0
    deferred: int = 0
    deferred_at: int = -1
    is_asked: bool = False
    has_means: bool = False
    counted: float | torch.Tensor | None = None
    counted_at: int = -1
    divisor: float = 1.0
    average: Callable[[], float | torch.Tensor] | None = None
    is_overdue: bool = False
    number: int = 0
    stepped_in: int = -1
    skipped_in: int = -1
    clipped_in: int = -1

    @property
    def scale(self) -> float:
        """The factor on the current loss before its backward pass. Reading it sets ``is_weighed``:
        the reader multiplies.
        """
        self.is_weighed = True
        return self.loss_scale

    def begin(self) -> None:
        """Note that the coming micro-batch is the first of a window."""
        self.number += 1
        self.is_weighed = self.is_asked = False
        self.is_overdue = self.counted is not None

    def defer(self, step: int) -> None:
        """Note that the gradients of a micro-batch are only accumulated; it may be called more than
        once for one.
        """
        if step != self.deferred_at:
            self.deferred = self.deferred + 1 if step == self.deferred_at + 1 else 1
            self.deferred_at = step

    def num_deferred(self, step: int) -> int:
        """Return how many micro-batches up to ``step`` wait for an optimizer step; 0 if ``step`` is
        not of them.
        """
        return self.deferred if step == self.deferred_at else 0

    def stepped(self) -> float | torch.Tensor:
        """Note that the optimizers step now; return the factor to apply to the gradients first."""
        multiplier = self.multiplier
        if self.is_weighed and self.counted is None:
            multiplier *= self.correction
        self.multiplier = 1.0
        self.deferred = 0
        self.deferred_at = -1
        self.counted = None
        self.average = None
        self.has_means = False
        self.is_overdue = False
        return multiplier
