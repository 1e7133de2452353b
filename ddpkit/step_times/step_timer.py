"""Measures optimizer steps on this rank. The training loop and its parts tell it what happens."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, Protocol

from ddpkit.base import WAITS
from ddpkit.compat import CallNotice, call_at_arrival
from ddpkit.step_times.device_stopwatch import DeviceStopwatch, event_recorder
from ddpkit.step_times.phases import DATA, EXCHANGE, MOVE, OPTIMIZER, OTHER
from ddpkit.step_times.sampled_windows import SampledWindows
from ddpkit.step_times.stopwatch import Stopwatch
from ddpkit.step_times.tensor_sizes import first_tensor
from ddpkit.step_times.window_times import WindowTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from ddpkit.step_times.named_ranges import NamedRanges


class _Window(Protocol):
    """What the timer reads of the loop's accumulation window."""

    closes: bool
    count: int


class _Progress(Protocol):
    """What the timer reads of the run's progress."""

    step: int


class StepTimer:
    """Measures some of the optimizer steps of a training: how long each phase of them takes on this
    rank.

    The loop's other parts look at :attr:`measures` first: in a step that is not measured nothing is
    called.

    Args:
        progress: tells how many batches there were.
        modules: returns the models; the forward pass begins when one of them is called.
        every: measure every step, from the second of a pass on; else about 50 a second.
        exchanges: whether a backward pass may wait for other ranks.
        device: of this rank; on ``"cuda"`` the times are those of the GPU.

    Attributes:
        measures: whether the present step is measured.
        gradient_norm: of the last optimizer step whose norm is known; None before it.

    Ranks: local. The same steps are measured on all ranks.

    Example:
        >>> from types import SimpleNamespace
        >>> progress, window = SimpleNamespace(step=0), SimpleNamespace(closes=True, count=2)
        >>> feed = SimpleNamespace(batches=lambda _: iter("abc"))
        >>> timer = StepTimer(progress, list)
        >>> for batch in timer.batches(feed, window):
        ...     progress.step += 1
        ...     timer.plan(progress.step, progress.step + 1, 1)
        >>> timer.stop(); len(timer.taken())
        2
    """

    def __init__(
        self,
        progress: _Progress,
        modules: Callable[[], Iterable[torch.nn.Module]],
        *,
        every: bool = False,
        exchanges: bool = False,
        device: str = "cpu",
    ) -> None:
        self.measures = False
        self.gradient_norm: float | None = None
        self._progress = progress
        self._modules = modules
        self._exchanges = exchanges
        self._chosen = SampledWindows(every=every)
        self._new_watch = watch_maker(device)
        self._every = every
        self._ranges: NamedRanges | None = None
        self._is_first = False
        self._watch = Stopwatch()
        self._now = WindowTimes()
        self._finished: list[tuple[WindowTimes, Stopwatch]] = []
        self._notices: list[CallNotice] = []
        self._arrival: Any = None

    # ------------------------------------------------------------------ the loop

    def batches(self, feed: Any, window: _Window) -> Iterator[Any]:
        """Yield the batches of a feed; measure what happens from one to the next.

        Args:
            feed: has ``batches(window)``.
            window: is set by the feed for each batch.
        """
        self.stop()
        self._chosen.start()
        if self._ranges is not None:
            self._begin_step()
            self._is_first = True
        batches = iter(feed.batches(window))
        for batch in batches:
            if self.measures:
                self._note_batch(batch, window)
            yield batch
            if self.measures:
                self._end_batch(window)
            self._choose(window)
            if not self.measures:
                # Not one line for each of these batches: for tiny models that costs more than what
                # is measured.
                yield from itertools.islice(batches, self._chosen.unmeasured(self._progress.step))
                self._choose(window)

    def _choose(self, window: _Window) -> None:
        """After the last batch of a step: begin to measure the next one, if it is due."""
        if not window.closes:
            return
        if self._progress.step >= self._chosen.due:
            self._begin_step()
        elif self._notices:
            self._drop_notices()

    def plan(
        self,
        step: int,
        next_sync: int,
        per_second: int,
    ) -> None:
        """Choose the steps to be measured up to the next sync of the ranks.

        Args:
            step: batches so far; equal on all ranks, as is the next.
            next_sync: batches at the next sync.
            per_second: batches in a second.
        """
        self._chosen.plan(step, next_sync, per_second)

    def taken(self) -> list[WindowTimes]:
        """Return the steps measured since the last time; end the present one, which waits for a
        sync of the ranks.

        Nothing is waited for. A GPU may not have come to the end of the newest step, which is kept
        for the next time, on all ranks. The others are done: the loop has read a newer loss.
        """
        if self.measures and self._now.batches:  # else, at the end of a pass, it has not begun
            self._finish_step()
            self._now.is_cut = self._watch.is_late
        kept = 1 if self._watch.is_late else 0
        number = max(len(self._finished) - kept, 0)
        finished = self._finished[:number]
        self._finished = self._finished[number:]
        for window, watch in finished:
            window.seconds = watch.phase_seconds()
        return [window for window, _ in finished]

    def mark(self, ranges: NamedRanges) -> None:
        """Mark the phases of every step, from the first of the next pass on, until a profile is
        over.

        Args:
            ranges: in the profile.
        """
        self._ranges = ranges
        self._chosen.every = True

    def _end_marks(self) -> None:
        self._ranges = None
        self._chosen.every = self._every
        self._chosen.start()

    def stop(self) -> None:
        """Measure nothing until a step begins; forget the one that is not over."""
        self.measures = self._is_first = False
        if self._ranges is not None:
            self._ranges.end()
        WAITS.watch = None
        self._drop_notices()
        self._end_arrival()

    def _begin_step(self) -> None:
        if self._ranges is not None and self._ranges.is_over:
            self._end_marks()  # the next sync plans anew
            return
        self._chosen.begin(self._progress.step)
        if not self._notices:
            self._notices = [CallNotice(module, self._note_call) for module in self._modules()]
        self._now = WindowTimes()
        self._watch = self._new_watch()
        if self._ranges is not None:
            self._watch.mark(self._ranges)
        WAITS.watch = self._watch
        self.measures = True

    def _note_batch(self, batch: Any, window: _Window) -> None:
        tensor = first_tensor(batch)
        self._now.size += 0 if tensor is None else tensor.numel()
        self._now.samples += window.count
        self._now.batches += 1
        self._watch.switch(MOVE)

    def _end_batch(self, window: _Window) -> None:
        if window.closes:
            self._finish_step()
        else:
            self._watch.switch(DATA)

    def _finish_step(self) -> None:
        self.measures = False
        WAITS.watch = None
        self._watch.finish()
        self._now.host_seconds = sum(self._watch.seconds.values())
        self._now.is_host_bound = self._watch.is_host_bound
        if self._ranges is not None:
            self._ranges.end()
        if not self._is_first:  # that one has waited for the loader to start
            self._finished.append((self._now, self._watch))
        self._is_first = False

    def _drop_notices(self) -> None:
        for notice in self._notices:
            notice.remove()
        self._notices.clear()

    # ------------------------------------------------------------------ inside of a batch

    def _note_call(self) -> None:
        if self.measures:
            self._watch.note_call()

    def begin_backward(self, loss: torch.Tensor) -> None:
        """Note that a backward pass begins.

        Args:
            loss: from which it goes.
        """
        if self._exchanges and loss.requires_grad:
            self._arrival = call_at_arrival(loss, self._note_arrival)
        self._watch.begin_backward()

    def _note_arrival(self) -> None:
        if self.measures:
            self._watch.switch(EXCHANGE)

    def end_backward(self) -> None:
        """Note that a backward pass is over, with its wait for other ranks."""
        self._watch.switch(OTHER)
        self._end_arrival()

    def _end_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.remove()
            self._arrival = None

    def note_count(self, count: torch.Tensor | float) -> None:
        """Note the count of a batch's loss sum.

        Args:
            count: a number, or a tensor of one element that nobody writes into; it is read later.
        """
        self._now.counts.append(count)

    def begin_optimizer(self) -> None:
        """Note that the optimizers' step begins."""
        self._watch.switch(OPTIMIZER)

    def end_optimizer(self) -> None:
        """Note that it is over."""
        self._watch.switch(OTHER)

    def begin_reading(self) -> None:
        """Note that the loop waits for the next batch again, after a strategy's own work on the one
        before.
        """
        self._watch.switch(DATA)

    def begin_other(self) -> None:
        """Note that a strategy works on the last batch, while the loop waits for the next."""
        self._watch.switch(OTHER)


def watch_maker(device: str) -> Callable[[], Stopwatch]:
    """Return what makes a stopwatch for a device.

    Args:
        device: such as ``"cuda:1"``.

    Example:
        >>> watch_maker("cpu")().is_late
        False
    """
    if device.startswith("cuda"):
        return functools.partial(DeviceStopwatch, event_recorder(device))
    return Stopwatch
