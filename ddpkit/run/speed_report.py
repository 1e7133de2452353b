"""What the ranks tell each other about measured steps, about once a second. It is written to the
run's log.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.base import host_name
from ddpkit.distributed import (
    exchange,
    get_rank,
    get_world_size,
    if_main_process,
    sum_over_ranks,
)
from ddpkit.logger import get_logger
from ddpkit.optim import rate_factor
from ddpkit.step_times import (
    DATA,
    STEP,
    CoreWaits,
    GpuClocks,
    NamedRanges,
    RankRow,
    SecondOfSteps,
    StepTimer,
    VerdictFinder,
    WindowTimes,
    filled_slots,
    host_load,
    memory_use,
    rows_of,
    speed_fields,
    summarized,
)
from ddpkit.train_logger import run_event
from ddpkit.training import FeedThrough

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddpkit.control import PeriodicSync, SyncReport
    from ddpkit.training import RunContext, TrainStep

logger = get_logger(__name__)

OFF = "off"
ALL = "all"
LEAST_SECONDS = 0.9  # from one report to the next
FIRST_WINDOWS = 8  # steps of the first report of a run, if it comes sooner
SURELY_EARLY = 0.5  # of these seconds: a sync that is expected before has no rows of the ranks

_NONE = float("nan")
_OF_MAIN = 3  # numbers that the main process tells for all: seconds, norm, learning rate


class SpeedReport:
    """Measures the steps of a training as ``--measure_steps`` says, and reports them.

    Args:
        context: of the run.
        train_step: gets the timer.

    Attributes:
        timer: of this call of ``fit``; None with ``--measure_steps=off``.
        last: the newest second of steps; None before the first.
        flops_per_step: floating-point operations of a step on this rank; None: not known.
        peak_per_second: what this rank's device can do at most; None: not known.

    Ranks: collective: all ranks make the same calls.
    """

    def __init__(self, context: RunContext, train_step: TrainStep) -> None:
        self.timer: StepTimer | None = None
        self.last: SecondOfSteps | None = None
        self.flops_per_step: float | None = None
        self.peak_per_second: float | None = None
        self._train_step = train_step
        self._context = context
        self._marking: StepTimer | None = None  # for a profile alone: it reports nothing
        self._hosts: tuple[str, ...] = ()
        self._since = 0.0
        self._bytes = 0
        self._windows: list[WindowTimes] = []
        self._rows: list[RankRow] = []
        self._is_near = True  # whether a report may be due at the next sync
        self._of_main = [_NONE] * _OF_MAIN
        self._core_waits = CoreWaits()
        self._clocks = GpuClocks("cpu")
        self._verdicts = VerdictFinder()

    def prepare(self) -> None:
        """Make the timer for a call of ``fit``, or none; let the ranks know each other's
        machines.
        """
        train_step = self._train_step
        options = self._context.options
        self.last = None
        if options.measure_steps == OFF:
            self.timer = self._marking = None
            train_step.timer = self._context.strategy.timer = None
            return
        self.timer = self._give(self._new_timer())
        self._clocks = GpuClocks(self._context.device)
        if len(self._hosts) != get_world_size():
            self._hosts = tuple(exchange(host_name(), site="machines of measured steps"))

    def _new_timer(self) -> StepTimer:
        return StepTimer(
            self._context.progress,
            self._models,
            every=self._measures_all,
            exchanges=self._context.strategy.is_distributed(),
            device=self._context.device,
        )

    def _give(self, timer: StepTimer) -> StepTimer:
        """Have the parts of a step tell a timer what happens."""
        self._train_step.timer = self._context.strategy.timer = timer
        return timer

    def mark_ranges(self, *, once: bool) -> NamedRanges:
        """Have the phases of the coming pass marked in a profile, also with
        ``--measure_steps=off``.

        Args:
            once: whether the profile ends in this call of ``fit``.

        Returns:
            What marks them, to be told of the profiler's steps.
        """
        ranges = NamedRanges(once=once)
        timer = self.timer or self._marking
        if timer is None:
            timer = self._marking = self._give(self._new_timer())
        timer.mark(ranges)
        return ranges

    def _models(self) -> Iterable[torch.nn.Module]:
        return self._context.modules.values()

    def begin_pass(self, feed: Any, loader: Any) -> Any:
        """Note that a pass of training begins; return its feed, whose batches the timer sees.

        Args:
            feed: of the pass.
            loader: what it reads.
        """
        timer = self.timer or self._marking
        if timer is None:
            return feed
        if not self._windows:
            self._since = time.monotonic()
        self._is_near = True
        self._bytes = self._context.strategy.exchanged_bytes(self._context.modules)
        self._core_waits.share()  # from now on
        self._verdicts.num_workers = getattr(loader, "num_workers", None)
        return FeedThrough(feed, functools.partial(timer.batches, feed))

    def note_flops(self, per_step: float, peak_per_second: float | None) -> None:
        """Report from now on how fast this rank computes.

        Args:
            per_step: floating-point operations of an optimizer step on this rank.
            peak_per_second: what its device can do at most; None: not known.
        """
        self.flops_per_step = per_step
        self.peak_per_second = peak_per_second

    def pause(self) -> None:
        """Measure nothing until the next pass.

        If every step is measured, and nothing has been reported yet, the ranks exchange once more:
        a short run has a report, too.
        """
        timer = self.timer or self._marking
        if timer is None:
            return
        if self.timer is not None and self._measures_all and self.last is None:
            self._report_rest(self.timer)
        timer.stop()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context between two steps whose time counts for none of them.

        Ranks: local.
        """
        timer = self.timer or self._marking
        if timer is not None:
            timer.stop()
        began = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - began

    def tell_if_nothing_found(self) -> None:
        """At the end of a training without a verdict, say so, and on what figures that rests.

        Ranks: all; the main process tells.
        """
        words = self._verdicts.words_if_nothing_found() if if_main_process() else ""
        if words:
            logger.info("%s", words)

    def stop(self) -> None:
        """Measure nothing any more, whatever has ended the call of ``fit``; nothing is exchanged.

        After a failure the other ranks are elsewhere: an exchange would wait for them.

        Ranks: local.
        """
        timer = self.timer or self._marking
        if timer is not None:
            timer.stop()

    @property
    def _measures_all(self) -> bool:
        return bool(self._context.options.measure_steps == ALL)

    def _report_rest(self, timer: StepTimer) -> None:
        self._windows += timer.taken()
        if not self._windows:
            return
        losses = list(self._context.progress.meter.sums()[:2])
        own = [*self._facts_of_main(timer), *self._own_slots()]
        sums = sum_over_ranks([*losses, *own], "steps of a short run")
        self._take(sums[len(losses) :])
        loss_sum, count = sums[: len(losses)]
        self._report(self._context.progress.step, loss_sum / count if count else _NONE)

    # ------------------------------------------------------------------ at a sync of the ranks

    def adding(
        self,
        add_up: Callable[[list[float]], list[float]],
    ) -> Callable[[list[float]], list[float]]:
        """Return what adds up the numbers of a sync over the ranks, and those of the measured steps
        with them.

        Args:
            add_up: of the numbers alone.
        """

        def add(numbers: list[float]) -> list[float]:
            own = self._own_numbers()
            sums = add_up([*numbers, *own])
            if own:
                self._take(sums[len(numbers) :])
            return sums[: len(numbers)]

        return add

    def _own_numbers(self) -> list[float]:
        timer = self.timer
        if timer is None:
            return []
        self._windows += timer.taken()
        facts = self._facts_of_main(timer)
        return [*facts, *self._own_slots()] if self._may_report() else facts

    def _may_report(self) -> bool:
        """Say whether a report may be due at this sync; alike on all ranks, before they have told
        each other anything.

        The rows of the ranks cost more than the rest of a sync, and the first syncs of a pass are
        close.
        """
        return bool(self._windows) and (self._is_near or self._is_first())

    def _is_first(self) -> bool:
        return self.last is None and len(self._windows) >= FIRST_WINDOWS

    def _own_slots(self) -> list[float]:
        row = RankRow(
            summarized(self._windows),
            memory_use(self._context.device),
            self._core_waits.share(),
            self._clocks.read(),
            host_load(),
        )
        return filled_slots(row, get_rank() or 0, get_world_size())

    def _facts_of_main(self, timer: StepTimer) -> list[float]:
        """Return what is equal on all ranks in the main process's words; zeros on the others."""
        if not if_main_process():
            return [0.0] * _OF_MAIN
        seconds = time.monotonic() - self._since
        rate = self._learning_rate()
        norm = timer.gradient_norm
        return [seconds, _NONE if norm is None else norm, _NONE if rate is None else rate]

    def _learning_rate(self) -> float | None:
        for optimizer in self._train_step.named_optimizers().values():
            for group in getattr(optimizer, "param_groups", ()):
                rate = group.get("lr")
                if isinstance(rate, torch.Tensor) and not rate.is_cpu:  # it would be waited for
                    return None
                if rate is not None:
                    return float(rate) * rate_factor(optimizer)
        return None

    def _take(self, sums: list[float]) -> None:
        self._of_main = sums[:_OF_MAIN]
        slots = sums[_OF_MAIN:]
        self._rows = rows_of(slots, get_world_size()) if slots else []

    def on_sync(self, report: SyncReport, sync: PeriodicSync) -> None:
        """Report the steps that were measured since the last sync; choose the next ones.

        Args:
            report: what the ranks have learnt.
            sync: knows when the next one is.
        """
        if self.timer is None:
            if self._marking is not None:
                self._marking.taken()
            return
        passed = self._of_main[0]
        if self._is_due():
            self._report(report.step, report.loss)
            passed = 0.0
        expected = passed + sync.interval * (sync.due - report.step) / sync.steps_per_interval
        self._is_near = expected >= SURELY_EARLY * LEAST_SECONDS
        self.timer.plan(report.step, sync.due, sync.steps_per_interval)

    def _report(self, step: int, loss: float) -> None:
        self.last = self._second(step, loss)
        self._windows = []
        self._since = time.monotonic()
        if if_main_process():
            self._tell(self.last)

    def _is_due(self) -> bool:
        """Say whether it is time for a report: about a second after the last one; alike on all
        ranks.

        The first syncs of a pass come sooner. Of a short run there is one report all the same.
        """
        if not self._rows:
            return False
        return self._is_first() or self._of_main[0] >= LEAST_SECONDS

    def data_wait(self) -> float:
        """Return the share of a step that the loop waits for data on the slowest rank, 0 to 1; 0:
        not known.
        """
        if self.last is None:
            return 0.0
        return max(phase[DATA] / max(phase[STEP], 1e-9) for phase in self.last.phases)

    def _tell(self, second: SecondOfSteps) -> None:
        """Write a second of steps to the run's log, and what it shows for the first time."""
        run_event("speed", **speed_fields(second, self.flops_per_step, self.peak_per_second))
        for verdict in self._verdicts.note(second):
            logger.warning("%s", verdict.line())
            run_event("verdict", **verdict.event())

    def _second(self, step: int, loss: float) -> SecondOfSteps:
        rows = [row.numbers for row in self._rows]
        seconds, norm, rate = self._of_main
        tokens = [row.tokens or 0.0 for row in rows]
        has_tokens = any(row.tokens is not None for row in rows)
        facts: dict[str, Any] = {
            "epoch": self._context.progress.epoch,
            "step": step,
            "optimizer_step": self._context.progress.optimizer_step,
            "loss": loss,
        }
        return SecondOfSteps(
            **facts,
            seconds=seconds,
            windows=len(self._windows),
            batches_per_window=sum(window.batches for window in self._windows) / len(self._windows),
            world_size=len(rows),
            phases=[row.phases for row in rows],
            samples=[row.samples for row in rows],
            sizes=[row.size for row in rows],
            tokens=tokens if has_tokens else None,
            memory=[row.memory for row in self._rows],
            host_seconds=[row.host_seconds for row in rows],
            is_host_bound=[row.is_host_bound for row in rows],
            exchanged_bytes=self._bytes,
            gradient_norm=_known(norm),
            learning_rate=_known(rate),
            host_names=self._hosts,
            **self._details(),
        )

    def _details(self) -> dict[str, Any]:
        """Return what the verdicts look at beside medians."""
        singles = [row.numbers.singles for row in self._rows]
        clocks = [row.gpu_clocks for row in self._rows]
        loads = [row.host_load for row in self._rows]
        return {
            "single_sizes": [[single.size for single in row] for row in singles],
            "single_own": [[single.own for single in row] for row in singles],
            "single_exchange": [[single.exchange for single in row] for row in singles],
            "core_waits": [row.core_waits for row in self._rows],
            "gpu_clocks": None if None in clocks else clocks,
            "host_loads": None if None in loads else loads,
        }


def _known(number: float) -> float | None:
    return None if number != number else number  # noqa: PLR0124 -- not a number
