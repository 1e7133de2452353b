"""The last seconds of a run, of even length, without what its beginning and its epochs disturb.

A step that is measured alone tells little: on a busy machine any rank is late now and then. So what
is looked at are medians of stretches of at least half a second, and what they have in common.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddpkit.step_times.machine_load import is_busy
from ddpkit.step_times.medians import median
from ddpkit.step_times.phases import EXCHANGE, PHASES, STEP
from ddpkit.step_times.verdicts.memory_record import MemoryRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ddpkit.step_times.seconds import SecondOfSteps

#: Seconds at the beginning of a run that are not looked at: caches and allocators are cold.
WARM_UP_SECONDS = 2.0
#: Of what the other ranks wait more for a core, that counts: the rest falls into the exchange.
HIDDEN = 0.5
#: So many steps tell enough even at the beginning of an epoch, as their median does not mind one.
SETTLED_WINDOWS = 4
#: Seconds of a stretch, at least: an epoch begins with syncs that are closer than a second.
STRETCH_SECONDS = 0.5
#: How many stretches are looked at, and how many of them must agree.
LOOKED_AT = 6
AGREEING = 5
#: How many are looked at where the ranks of a machine take its cores from each other: there one of
#: them comes off badly for several seconds, and then another.
LOOKED_AT_IF_CROWDED = 18
#: Of the time: from here on that is so.
CROWDED = 0.25


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Half a second of steps or more. Arrays have an entry, or a row, for each rank.

    Attributes:
        last: the last second of it.
        seconds: of wall time, in all of it.
        windows: measured, in all of it.
        phases: seconds per window of each phase, shape ``(ranks, phases)``.
        samples: per window.
        sizes: elements of a batch, by window, shape ``(ranks, windows)``.
        own: seconds of a window without the exchange, likewise.
        exchange: seconds of the exchange, likewise.
        core_waits: share of the time without a core.
    """

    last: SecondOfSteps
    seconds: float
    windows: int
    phases: NDArray[np.float64]
    samples: NDArray[np.float64]
    sizes: NDArray[np.float64]
    own: NDArray[np.float64]
    exchange: NDArray[np.float64]
    core_waits: NDArray[np.float64]

    @functools.cached_property
    def step(self) -> float:
        """Seconds of a step."""
        return max(float(np.median(self.phases.sum(axis=1))), 1e-9)

    def of_phase(self, phase: str) -> NDArray[np.float64]:
        """Return the seconds per window of one phase, by rank."""
        return self.phases[:, PHASES.index(phase)]

    @functools.cached_property
    def lateness(self) -> NDArray[np.float64]:
        """By how many seconds per window each rank comes later than the others, by its own fault.

        The rank that comes last waits least: it has to be late by its own times and by its wait.
        What it waited for a core, more than the other ranks of its machine, is not its fault: they
        share the cores, and take them from each other. What they waited more hides that it is late.
        """
        waits = self.of_phase(EXCHANGE)
        by_times = above_others(self.phases.sum(axis=1) - waits)
        by_waits = -above_others(waits)
        more = self._above_others_of_host(self.core_waits) * self.step
        explained = np.where(more > 0.0, more, HIDDEN * more)
        lateness: NDArray[np.float64] = np.minimum(by_times, by_waits) - explained
        return lateness

    def late_windows(self, share: float) -> NDArray[np.float64]:
        """Return for each rank the part of the single windows in which it was late.

        Args:
            share: of a step, by which it has to be late.
        """
        least = share * self.step
        late = np.zeros(len(self.own))
        for own, exchange in zip(self.own.T, self.exchange.T, strict=True):
            lateness = np.minimum(above_others(own), -above_others(exchange))
            late += lateness >= least
        parts: NDArray[np.float64] = late / self.own.shape[1]
        return parts

    def busy_words(self, rank: int) -> str:
        """Return a sentence about the machine of a rank, if it has more to do than it has cores
        for; else nothing.
        """
        loads = self.last.host_loads
        if loads is None:
            return ""
        load = loads[rank]["load"]
        cores = loads[rank]["cores"]
        if not is_busy(load, cores):
            return ""
        return f"The machine is busy: load {load:.1f} on {cores:.0f} cores."

    def _above_others_of_host(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        hosts = np.array(self.last.host_names or ("",) * len(values))
        above = np.zeros(len(values))
        for host in set(hosts.tolist()):
            above[hosts == host] = above_others(values[hosts == host])
        return above


def above_others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how much each value is above the median of the others; zeros where there are none.

    Example:
        >>> above_others(np.array([1.0, 2.0, 9.0])).tolist()
        [-4.5, -3.0, 7.5]
    """
    count = len(values)
    if count == 1:
        return np.zeros(1)
    order = np.argsort(values)
    ordered = values[order]
    places = np.empty(count, dtype=np.int64)
    places[order] = np.arange(count)
    # in the middle of the others
    lower = (count - 2) // 2
    upper = (count - 1) // 2
    below = ordered[lower + (places <= lower)]
    above = ordered[upper + (places <= upper)]
    return np.asarray(values - (below + above) / 2.0)


def _joined(seconds: Sequence[SecondOfSteps]) -> Stretch:
    """Return one stretch of several seconds; each counts by its windows."""
    weights = np.array([second.windows for second in seconds], dtype=np.float64)

    def mean(rows_of: Callable[[SecondOfSteps], object]) -> NDArray[np.float64]:
        return np.average(
            [np.asarray(rows_of(second)) for second in seconds],
            axis=0,
            weights=weights,
        )

    world_size = seconds[-1].world_size
    return Stretch(
        last=seconds[-1],
        seconds=sum(second.seconds for second in seconds),
        windows=sum(second.windows for second in seconds),
        phases=mean(lambda second: [[times[phase] for phase in PHASES] for times in second.phases]),
        samples=mean(lambda second: second.samples),
        sizes=np.hstack([_single_sizes(second) for second in seconds]),
        own=np.hstack([_single_own(second) for second in seconds]),
        exchange=np.hstack([_single_exchange(second) for second in seconds]),
        core_waits=mean(lambda second: second.core_waits or [0.0] * world_size),
    )


def _single_sizes(second: SecondOfSteps) -> NDArray[np.float64]:
    """Return the sizes by rank and window; without single windows, those of a typical one."""
    rows = second.single_sizes or [[value] for value in second.sizes]
    return np.array(rows, dtype=np.float64)


def _single_own(second: SecondOfSteps) -> NDArray[np.float64]:
    rows = second.single_own or [[times[STEP] - times[EXCHANGE]] for times in second.phases]
    return np.array(rows, dtype=np.float64)


def _single_exchange(second: SecondOfSteps) -> NDArray[np.float64]:
    rows = second.single_exchange or [[times[EXCHANGE]] for times in second.phases]
    return np.array(rows, dtype=np.float64)


class History:
    """The last stretches of a run.

    Args:
        hosts: of each rank; empty where they are not known.
        num_workers: of the training loader in each rank; None where that is not known.

    Attributes:
        recent: the last stretches, the newest at the end; at most :data:`LOOKED_AT`.
        record: likewise, but more of them: :data:`LOOKED_AT_IF_CROWDED`.
        memory: of the whole run.
    """

    def __init__(self, hosts: Sequence[str] = (), num_workers: int | None = None) -> None:
        self.hosts = tuple(hosts)
        self.num_workers = num_workers
        self.recent: deque[Stretch] = deque(maxlen=LOOKED_AT)
        self.record: deque[Stretch] = deque(maxlen=LOOKED_AT_IF_CROWDED)
        self.memory = MemoryRecord()
        self._gathered: list[SecondOfSteps] = []
        self._epoch: int | None = None
        self._passed = 0.0

    def note(self, second: SecondOfSteps) -> bool:
        """Take a second; return whether a stretch has become complete.

        The first few steps of an epoch are left out if they come alone: its loader begins.
        """
        if second.host_names:
            self.hosts = second.host_names
        self.memory.note(second)
        self._passed += second.seconds
        is_first = second.epoch != self._epoch and second.windows < SETTLED_WINDOWS
        self._epoch = second.epoch
        if is_first or self._passed < WARM_UP_SECONDS:
            return False
        self._gathered.append(second)
        if sum(times.seconds for times in self._gathered) < STRETCH_SECONDS:
            return False
        self.recent.append(_joined(self._gathered))
        self.record.append(self.recent[-1])
        self._gathered = []
        return True

    @property
    def is_long_enough(self) -> bool:
        """Whether there are as many stretches as have to agree."""
        return len(self.recent) >= AGREEING

    @property
    def newest(self) -> Stretch:
        """The last stretch."""
        return self.recent[-1]

    @property
    def step(self) -> float:
        """Seconds of a typical step."""
        return median(stretch.step for stretch in self.recent)

    def typical(self, values_of: Callable[[Stretch], object]) -> NDArray[np.float64]:
        """Return the medians over the stretches of an array, or a number, of each."""
        values = [np.asarray(values_of(stretch), dtype=np.float64) for stretch in self.recent]
        return np.asarray(np.median(values, axis=0))

    def is_crowded(self, rank: int) -> bool:
        """Say whether all ranks of a rank's machine wait for its cores much of the time.

        A rank that is alone on its machine takes no core from another one.
        """
        newest = self.newest
        hosts = newest.last.host_names or ("",) * newest.last.world_size
        ranks = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        if len(ranks) == 1:
            return False
        waits = self.typical(lambda stretch: stretch.core_waits)
        if not waits.any():  # no Linux: its load has to tell
            return bool(newest.busy_words(rank))
        return bool(waits[ranks].min() >= CROWDED)

    def agrees(self, has: Callable[[Stretch], bool]) -> bool:
        """Say whether as many stretches as have to agree have something.

        Mostly none has: then few are looked at.
        """
        may_miss = len(self.recent) - AGREEING
        for stretch in self.recent:
            if not has(stretch):
                may_miss -= 1
            if may_miss < 0:
                return False
        return may_miss >= 0

    def host(self, rank: int) -> str | None:
        """Return the machine of a rank; None where it is not known."""
        return self.hosts[rank] if rank < len(self.hosts) else None
