"""Batches of a stream, whose length is unknown, and what each weighs.

Each rank announces the size of its next batch one or two batches ahead. All ranks end together; a
rank without batches repeats one with weight 0 (another rank's, if it has read that too, else its
own last). Every sample weighs the same.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpkit.base import do_nothing
from ddpkit.control import start_loading
from ddpkit.data import guess_batch_size, one_by_one
from ddpkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from ddpkit.training.window import Window


def _alone(numbers: list[float]) -> Callable[[], list[float]]:
    return lambda: numbers


def _nothing(**_: bool) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(eq=False)
class StreamFeed:
    """Batches of a training pass over a stream, whose length is unknown.

    The weights of a window's later batches are not known when the first one is worked on. So each
    is weighed as if the window were full and all its batches had as many samples as the first; the
    error is corrected at its end. For equal batches there is nothing to correct, to the last bit.

    The sums are started before a batch is worked on, and waited for after it. They need a group of
    processes that gradients do not travel on.

    Attributes:
        loader: yields this rank's micro-batches, however many.
        factor: micro-batches per optimizer step.
        weighting: ``"samples"``: every sample counts the same; ``"batches"``: every batch of all
            ranks together does.
        full_step_weight: what a full step weighs, where gradients are summed over the ranks; 0:
            they are averaged.
        whole_batches: whether the data yields whole batches; with ``"batches"`` every rank's batch
            then counts one.
        world_size: number of ranks.
        start: micro-batches of this epoch done before.
        left_out: how many of those the loader yields again; they are skipped.
        ready: called once, after the batches left out have been read, and as many ahead as this
            feed always reads; where it returns something that is true, none is yielded.
        start_sum: starts to add up a few numbers over the ranks, and returns what waits for the
            sums.
        size_of: counts the samples of a batch; None for another rank's batch, which does not count
            here.
        uneven: makes a context for a batch that does not count on all ranks, from whether it does
            on this one.
        length: None: unknown.
        repeated: samples of this rank's batches that were repeated to keep step, so far.

    Ranks: collective; every rank must have a first batch.

    Example:
        >>> from ddpkit.training import Window
        >>> window = Window()
        >>> feed = StreamFeed(iter(["abc", "def", "g"]), factor=2)
        >>> [
        ...     (batch, window.closes, window.scale, window.correction)
        ...     for batch in feed.batches(window)
        ... ]
        [('abc', False, 0.5, 1.0), ('def', True, 0.5, 1.0), ('g', True, 0.5, 2.0)]
    """

    loader: Iterable[Any]
    factor: int = 1
    weighting: str = "samples"
    world_size: int = 1
    start: int = 0
    full_step_weight: float = 0.0
    whole_batches: bool = False
    start_sum: Callable[[list[float]], Callable[[], list[float]]] = _alone
    size_of: Callable[[Any], int | None] = guess_batch_size
    uneven: Callable[..., AbstractContextManager[None]] = _nothing
    length: int | None = None
    left_out: int = 0
    ready: Callable[[], object] = do_nothing
    repeated: int = 0
    _ahead: deque[_StreamBatch] = field(default_factory=deque, init=False, repr=False)

    def batches(self, window: Window) -> Iterator[Any]:
        """Yield the batches, each after setting ``window`` for it.

        Raises:
            DataError: the stream has no first batch for every rank. On all ranks.
        """
        read = self._read(one_by_one(start_loading(self.loader)))
        ahead = self._ahead = deque([next(read)])
        self._require_batches(ahead[0])
        while len(ahead) < min(self.factor, 2):  # as many as at the moment of a save
            ahead.append(next(read))
        if self.ready():
            return
        position = self.start % self.factor
        seen_weight = 0.0  # of the window's batches so far, on all ranks
        assumed_weight = 0.0  # of the whole window, as its first batch lets one guess
        window.correction = 1.0
        while ahead[0].sums().ranks:
            current = ahead.popleft()
            while len(ahead) < min(self.factor, 2):
                ahead.append(next(read))
            if position == 0:
                window.begin()
            position += 1
            window.count = current.count
            self.repeated += current.repeated
            window.weight, batch_weight = self._weigh(current)
            # A backward pass cannot wait for the window's end. So the first batch stands for all,
            # and its guess is kept for the whole window: all losses are off by one factor, which
            # the step puts right in the gradients:
            #     loss_scale = weight on this rank * ranks / assumed_weight
            #     correction = assumed_weight / seen_weight, once the window is over
            assumed_weight = assumed_weight or self.full_step_weight or self.factor * batch_weight
            seen_weight += batch_weight
            averaged_over = 1 if self.full_step_weight else self.world_size
            window.loss_scale = (
                window.weight * averaged_over / assumed_weight if assumed_weight else 0.0
            )
            window.closes = position == self.factor or not ahead[0].sums().ranks
            window.correction = (
                assumed_weight / seen_weight if window.closes and seen_weight else 1.0
            )
            if window.closes:
                position = 0
                seen_weight = 0.0
                assumed_weight = 0.0
            with (
                self.uneven(counts=current.count > 0)
                if current.sums().ranks < self.world_size
                else _nothing()
            ):
                yield current.batch

    def is_at_end(self, step: int) -> bool:
        """Say whether no batch follows; wait for the other ranks, which tell it at the next batch
        in any case.

        Ranks: collective, after the same batch.
        """
        return not self._ahead[0].sums().ranks

    def _read(self, batches: Iterator[Any]) -> Iterator[_StreamBatch]:
        """Read the batches, the last one again and again after the end; start telling the other
        ranks of each.
        """
        last = None
        able = 0.0
        last_size = 0
        # the last of which may have to be repeated
        for done in itertools.islice(batches, self.left_out):
            last = done
            able = 1.0
            last_size = guess_batch_size(done)
        while True:
            size = None
            for batch in itertools.islice(batches, 1):
                last = batch
                able = 1.0
                size = self.size_of(batch)
                # None: another rank's
                last_size = guess_batch_size(batch) if size is None else size
            present = int(size is not None)
            count = size or 0
            repeated = 0 if present else last_size
            sums = self.start_sum([float(present), float(count), able])
            yield _StreamBatch(
                last,
                present,
                count,
                repeated,
                functools.cache(lambda sums=sums: _RankSums(*sums())),
            )

    def _weigh(self, batch: _StreamBatch) -> tuple[float, float]:
        """Return the weight of a batch on this rank, and on all ranks together."""
        ranks, samples, _ = batch.sums()
        if self.weighting == "samples":
            return batch.count, samples
        if self.whole_batches:
            return batch.present, ranks
        return (batch.count / samples, 1.0) if samples else (0.0, 0.0)

    def _require_batches(self, first: _StreamBatch) -> None:
        if first.sums().able < self.world_size:
            raise DataError(
                f"the stream gives a first batch to {first.sums().able:.0f} of {self.world_size} "
                "rank(s) only: it is empty, or has too few items for this many processes and this "
                "batch size, or yields nothing when it is iterated again. Look at the stream, "
                "start fewer processes, or use a smaller batch_size."
            )


class _RankSums(NamedTuple):
    """Sums over all ranks for one batch."""

    ranks: float  # number of ranks with a batch that is not repeated
    samples: float  # of all ranks
    able: float  # number of ranks with a batch, repeated or not


@dataclass(eq=False)
class _StreamBatch:
    """One batch of every rank."""

    batch: Any
    present: int
    count: int
    repeated: int  # samples, of a batch that is repeated
    sums: Callable[[], _RankSums]  # waits for the other ranks once
