"""What a pass of training takes its batches from, and what each of them weighs.

For a window of micro-batches ``m`` over ranks ``r``, with weights ``w[m, r]`` and losses that are means, the optimizer
steps on ``sum(w * grad) / sum(w)``. DDP averages over the ranks, so that each of them back-propagates
``loss * w * world_size / total``; the total is known from the plan, before the first backward pass of the window.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ddpkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass
class Window:
    """The micro-batches of one optimizer step; where in it the loop is.

    Attributes:
        closes: whether the current micro-batch is the last of its window, after which the optimizer steps.
        count: this rank's samples in the current micro-batch; 0 for a repeated one.
        scale: what the current loss is multiplied by before its backward pass.
        correction: what the gradients of the window must be multiplied by, where the weights were not known in advance.
        multiplier: what the next optimizer step multiplies the gradients by: the correction, if ``scale`` was used.
        deferred: micro-batches in a row, up to step ``deferred_at``, that were accumulated under ``no_sync``.
        deferred_at: the last such step; -1 once the optimizers have stepped.

    Ranks: local; all but ``count`` and ``scale`` is equal on all ranks.

    Example:
        >>> window = Window()
        >>> window.defer(5); window.defer(6); window.pending(6), window.pending(7)
        (2, 0)
    """

    closes: bool = True
    count: int = 1
    scale: float = 1.0
    correction: float = 1.0
    multiplier: float = 1.0
    deferred: int = 0
    deferred_at: int = -1

    def defer(self, step: int) -> None:
        """Note that the gradients of a step are only accumulated; a step may say so more than once."""
        if step != self.deferred_at:
            self.deferred = self.deferred + 1 if step == self.deferred_at + 1 else 1
            self.deferred_at = step

    def pending(self, step: int) -> int:
        """Return how many micro-batches up to ``step`` wait for an optimizer step; 0 if ``step`` is not of them."""
        return self.deferred if step == self.deferred_at else 0

    def stepped(self) -> float:
        """Note that the optimizers step now; return what the gradients are multiplied by first."""
        multiplier, self.multiplier, self.deferred, self.deferred_at = self.multiplier, 1.0, 0, -1
        return multiplier


class Counts(Protocol):
    """Tells how many samples a batch has, here and over all ranks.

    Ranks: local.

    Example:
        >>> Counts.__name__
        'Counts'
    """

    def count(self, batch: int) -> int:
        """Return this rank's number of samples in a batch."""
        ...

    def total(self, batch: int) -> int:
        """Return the number of samples of a batch over all ranks."""
        ...


@dataclass
class Feed:
    """What a pass of training takes its batches from.

    Attributes:
        loader: yields this rank's micro-batches.
        length: their number, the same on every rank; None when it is not known.
        counts: samples of each batch; None when they are not known, and every batch weighs the same.
        factor: micro-batches per optimizer step.
        world_size: number of ranks.
        start: micro-batches of this epoch done before.
        agree: adds up an integer over the ranks; needed when ``length`` is None.

    Ranks: collective when ``length`` is None, else local.

    Example:
        >>> window = Window()
        >>> feed = Feed(loader="abc", length=3, factor=2)
        >>> [(batch, window.closes, window.scale) for batch in feed.batches(window)]
        [('a', False, 0.5), ('b', True, 0.5), ('c', True, 1.0)]
    """

    loader: Iterable[Any]
    length: int | None = None
    counts: Counts | None = None
    factor: int = 1
    world_size: int = 1
    start: int = 0
    agree: Callable[[int], int] = int

    def batches(self, window: Window) -> Iterator[Any]:
        """Yield the batches, each after setting ``window`` for it."""
        if self.length is None:
            return self._unknown(window)
        return self._known(window, self.length)

    def _known(self, window: Window, length: int) -> Iterator[Any]:
        total = 1
        window.correction = 1.0
        for number, batch in enumerate(itertools.islice(self.loader, max(length - self.start, 0)), self.start):
            place = number % self.factor
            if place == 0 or number == self.start:
                total = self._total(range(number, min(number - place + self.factor, length)))
            window.count = 1 if self.counts is None else self.counts.count(number)
            window.scale = window.count * self.world_size / total
            window.closes = place == self.factor - 1 or number == length - 1
            yield batch

    def _total(self, window: range) -> int:
        """Return the number of samples of a window over all ranks; every batch counts one where sizes are unknown."""
        if self.counts is None:
            return len(window) * self.world_size
        return sum(self.counts.total(number) for number in window)

    def _unknown(self, window: Window) -> Iterator[Any]:
        """Agree with the other ranks, batch by batch, on whether there is another one."""
        inner = iter(self.loader)
        batch, present = None, False
        for _ in range(self.start + 1):  # what was done before is read again and left out
            following, present = _take(inner)
            batch = following if present else batch
        ranks = self.agree(int(present))
        if not self.start and ranks < self.world_size:
            raise DataError(
                f"the stream gives a first batch to {ranks} of {self.world_size} rank(s) only: it is empty, or has too "
                "few items for this many processes and this batch size. Look at the stream, start fewer processes, or "
                "use a smaller batch_size."
            )
        place = done = 0
        while ranks:
            following, present_next = _take(inner)
            ranks_next = self.agree(int(present_next))
            place, done = place + 1, done + ranks
            window.count = int(present)
            window.scale = window.count / self.factor
            window.closes = place == self.factor or not ranks_next
            if window.closes:
                window.correction = self.factor * self.world_size / done
                place = done = 0
            yield batch
            batch = following if present_next else batch
            present, ranks = present_next, ranks_next


def _take(iterator: Iterator[Any]) -> tuple[Any, bool]:
    for item in iterator:
        return item, True
    return None, False
