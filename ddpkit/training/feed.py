"""What a pass of training takes its batches from, and what each of them weighs.

For a window of micro-batches ``m`` over ranks ``r``, with weights ``w[m, r]`` and losses that are means, the optimizer
steps on ``sum(w * grad) / sum(w)``. DDP averages over the ranks, so that each of them back-propagates
``loss * w * world_size / total``; the total is known from the plan, before the first backward pass of the window.
If ``compute_objectives`` returns a sum and a count, the gradients of the sums are accumulated, the counts are added up
over the ranks once per window, and the division is part of the optimizer step.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ddpkit.control import start_loading
from ddpkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from ddpkit.training.stream_feed import StreamFeed


@dataclass
class Window:
    """The micro-batches of one optimizer step; where in it the loop is.

    Attributes:
        closes: whether the current micro-batch is the last of its window, after which the optimizer steps.
        count: this rank's samples in the current micro-batch; 0 for a repeated one.
        weight: of its loss in the mean of the epoch: the samples, or this rank's part of the batch.
        loss_scale: factor on the current loss before its backward pass.
        scale: the same for a recipe that applies it by itself: reading it sets ``is_weighed``.
        is_weighed: whether the losses of the window are multiplied by ``loss_scale``.
        correction: factor on the gradients of the window, if the weights were not known in advance.
        multiplier: what else the next optimizer step multiplies the gradients by.
        deferred: micro-batches in a row, up to step ``deferred_at``, whose gradients wait for a step.
        deferred_at: the last such step; -1 once the optimizers have stepped.
        is_asked: whether the recipe knows that the current micro-batch closes the window.
        has_means: whether gradients of means wait for a step.
        counted: count of the loss sums since the last step; None without loss sums.
        counted_at: the last step that has added to that.
        divisor: what these sums were divided by.
        average: returns, at the window's end, the average of ``counted`` over the ranks.
        is_overdue: whether a window with sums has ended without a step.

    Ranks: local; ``closes``, ``correction`` and what is deferred is equal on all ranks.

    Example:
        >>> window = Window()
        >>> window.defer(5); window.defer(6); window.pending(6), window.pending(7)
        (2, 0)
    """

    closes: bool = True
    count: int = 1
    weight: float = 1.0
    loss_scale: float = 1.0
    is_weighed: bool = False
    correction: float = 1.0
    multiplier: float | Tensor = 1.0
    deferred: int = 0
    deferred_at: int = -1
    is_asked: bool = False
    has_means: bool = False
    counted: float | Tensor | None = None
    counted_at: int = -1
    divisor: float = 1.0
    average: Callable[[], float | Tensor] | None = None
    is_overdue: bool = False

    @property
    def scale(self) -> float:
        """The factor on the current loss before its backward pass. Who reads it multiplies: it sets ``is_weighed``."""
        self.is_weighed = True
        return self.loss_scale

    @scale.setter
    def scale(self, value: float) -> None:
        self.loss_scale = value

    def begin(self) -> None:
        """Note that the coming micro-batch is the first of a window."""
        self.is_weighed = self.is_asked = False
        self.is_overdue = self.counted is not None

    def defer(self, step: int) -> None:
        """Note that the gradients of a micro-batch are only accumulated; it may be called more than once for one."""
        if step != self.deferred_at:
            self.deferred = self.deferred + 1 if step == self.deferred_at + 1 else 1
            self.deferred_at = step

    def pending(self, step: int) -> int:
        """Return how many micro-batches up to ``step`` wait for an optimizer step; 0 if ``step`` is not of them."""
        return self.deferred if step == self.deferred_at else 0

    def stepped(self) -> float | Tensor:
        """Note that the optimizers step now; return the factor to apply to the gradients first."""
        multiplier = self.multiplier
        if self.is_weighed and self.counted is None:
            multiplier *= self.correction
        self.multiplier, self.deferred, self.deferred_at = 1.0, 0, -1
        self.counted, self.average, self.has_means, self.is_overdue = None, None, False, False
        return multiplier


class Counts(Protocol):
    """Tells how many samples a batch has, here and over all ranks.

    Ranks: local.
    """

    def count(self, batch: int) -> int:
        """Return this rank's number of samples in a batch."""

    def total(self, batch: int) -> int:
        """Return the number of samples of a batch over all ranks."""

    def part(self, batch: int) -> float:
        """Return this rank's part of a batch, where every batch counts the same."""

    def parts(self, batch: int) -> float:
        """Return the sum of all ranks' parts of a batch."""


@dataclass
class Feed:
    """What a pass of training takes its batches from.

    Attributes:
        loader: yields this rank's micro-batches.
        length: their number, the same on every rank.
        counts: samples of each batch; None when they are not known, and every batch weighs the same.
        factor: micro-batches per optimizer step.
        world_size: number of ranks.
        start: micro-batches of this epoch done before.
        left_out: how many of those the loader yields again, to be left out.
        ready: called once, after the batches left out have been read and before the next one is.
        weighting: ``"samples"``: every sample counts the same; ``"batches"``: every batch of all ranks together does.

    Ranks: local.

    Example:
        >>> window = Window()
        >>> feed = Feed(loader="abc", length=3, factor=2)
        >>> [(batch, window.closes, window.scale) for batch in feed.batches(window)]
        [('a', False, 0.5), ('b', True, 0.5), ('c', True, 1.0)]
    """

    loader: Iterable[Any]
    length: int
    counts: Counts | None = None
    factor: int = 1
    world_size: int = 1
    start: int = 0
    weighting: str = "samples"
    left_out: int = 0
    ready: Callable[[], object] = bool  # does nothing

    def batches(self, window: Window) -> Iterator[Any]:
        """Yield the batches, each after setting ``window`` for it."""
        length = self.length
        total, done = 1.0, self.start
        window.correction, window.count, window.weight = 1.0, 1, 1.0
        source = itertools.islice(start_loading(self.loader), max(length - self.start, 0) + self.left_out)
        for _ in range(self.left_out):
            next(source, None)
        self.ready()
        counts, by_samples = self.counts, self.weighting == "samples"
        whole = self._weight_of_all()
        for number, batch in enumerate(source, self.start):
            place = number % self.factor
            if place == 0 or number == self.start:
                window.begin()
                after = number - place + self.factor
                is_one = after == number + 1
                total = whole(number) if is_one else sum(map(whole, range(number, min(after, length))))
            if counts is not None:
                window.count = window.weight = counts.count(number)
                if not by_samples:
                    window.weight = counts.part(number)
            window.loss_scale = window.weight * self.world_size / total
            window.closes = place == self.factor - 1 or number == length - 1
            done = number + 1
            yield batch
        if done < length:
            raise DataError(
                f"the training loader ended after {done} of {length} batches: its length must be the number of batches "
                "that it yields, on every process."
            )

    def _weight_of_all(self) -> Callable[[int], float]:
        """Return what tells the weight of a batch over all ranks."""
        if self.counts is None:
            return lambda _: self.world_size
        return self.counts.total if self.weighting == "samples" else self.counts.parts


@dataclass
class FeedThrough:
    """A feed whose batches pass through something that follows the steps.

    Attributes:
        inner: yields this rank's micro-batches.
        batches: yields what ``inner.batches`` does, for a window.

    Ranks: as the inner feed.

    Example:
        >>> feed = Feed(loader="abc", length=3)
        >>> list(FeedThrough(feed, lambda window: map(str.upper, feed.batches(window))).batches(Window()))
        ['A', 'B', 'C']
    """

    inner: Feed | StreamFeed
    batches: Callable[[Window], Iterator[Any]]

    @property
    def length(self) -> int | None:
        """The number of micro-batches of this rank in an epoch, or None."""
        return self.inner.length

    @property
    def factor(self) -> int:
        """The number of micro-batches in an optimizer step."""
        return self.inner.factor
