"""What a pass of training takes its batches from, where their number is known: how many, and what
each weighs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpkit.base import do_nothing
from ddpkit.control import start_loading
from ddpkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddpkit.training.sample_counts import Counts
    from ddpkit.training.window import Window


@dataclass(eq=False)
class Feed:
    """What a pass of training takes its batches from.

    Attributes:
        loader: yields this rank's micro-batches.
        length: their number, the same on every rank.
        counts: samples of each batch; None when they are not known, and every batch weighs the
            same.
        factor: micro-batches per optimizer step.
        world_size: number of ranks.
        start: micro-batches of this epoch done before.
        left_out: how many of those the loader yields again, to be left out.
        ready: called once, after the batches left out have been read and before the next one is;
            where it returns something that is true, none is.
        weighting: ``"samples"``: every sample counts the same; ``"batches"``: every batch of all
            ranks together does.

    Example:
        >>> from ddpkit.training import Window
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
    ready: Callable[[], object] = do_nothing

    def batches(self, window: Window) -> Iterator[Any]:
        """Yield the batches, each after setting ``window`` for it."""
        length = self.length
        total = 1.0
        done = self.start
        window.correction = 1.0
        window.count = 1
        window.weight = 1.0
        source = itertools.islice(
            start_loading(self.loader),
            max(length - self.start, 0) + self.left_out,
        )
        if not self._begins(source):
            return
        counts = self.counts
        by_samples = self.weighting == "samples"
        # what a batch of this number weighs on all ranks together
        weight_of: Callable[[int], float] = self._weight_without_counts
        if counts is not None:
            weight_of = counts.total if by_samples else counts.parts
        for number, batch in enumerate(source, self.start):
            index_in_window = number % self.factor
            if index_in_window == 0 or number == self.start:
                window.begin()
                after = number - index_in_window + self.factor
                is_one = after == number + 1
                total = (
                    weight_of(number)
                    if is_one
                    else sum(map(weight_of, range(number, min(after, length))))
                )
            if counts is not None:
                window.count = window.weight = counts.count(number)
                if not by_samples:
                    window.weight = counts.part(number)
            window.loss_scale = window.weight * self.world_size / total
            window.closes = index_in_window == self.factor - 1 or number == length - 1
            done = number + 1
            yield batch
        if done < length:
            raise DataError(
                f"the training loader ended after {done} of {length} batches: its length must be "
                "the number of batches that it yields, on every process."
            )

    def _begins(self, source: Iterator[Any]) -> bool:
        """Read the batches that are left out; return whether others follow."""
        for _ in range(self.left_out):
            next(source, None)
        return not self.ready()

    def is_at_end(self, step: int) -> bool:
        """Say whether no batch follows.

        Args:
            step: batches of the epoch so far.
        """
        return step >= self.length

    def _weight_without_counts(self, _: int) -> float:
        """Every batch weighs the same: one on each rank."""
        return self.world_size
