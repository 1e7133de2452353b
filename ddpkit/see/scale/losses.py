"""Where a size loses time against the smallest one. The parts add up to what is lost.

A process that works on ``work`` times the samples of the smallest size would take ``work`` times
its step. What a step takes beyond that is lost. It is the sum of what its phases take beyond
``work`` times theirs, on the rank that waits longest for the others: what it does itself is no
other rank's fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddpkit.run import SliceResult
from ddpkit.see.scale.summary import Row
from ddpkit.step_times import BACKWARD, DATA, EXCHANGE, FORWARD, MOVE, OPTIMIZER, OTHER

COMPUTING = (MOVE, FORWARD, BACKWARD)
#: Ranks wait for their cores: so large a part of the time, 0 to 1.
CORE_WAIT = 0.1
#: A size whose smaller batches take longer per sample computes too small ones.
SMALL_WORK = 0.95
#: A rank that comes last in so large a part of the steps is late.
OFTEN_LAST = 0.75


@dataclass(frozen=True)
class Losses:
    """Seconds of a step that are lost against the smallest size, by cause; negative where it gains.

    Attributes:
        data: waiting for the loader.
        transfer: waiting for gradients on their way.
        late: waiting for a rank that comes late.
        cores: computing slower, as the processes share the cores of a machine.
        batch: computing slower per sample, as the batch of a process is smaller.
        computing: computing slower, and it is not known why.
        optimizer: in the optimizer.
        other: in the rest of the loop and of the recipe.
    """

    data: float = 0.0
    transfer: float = 0.0
    late: float = 0.0
    cores: float = 0.0
    batch: float = 0.0
    computing: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0

    @property
    def by_cause(self) -> Mapping[str, float]:
        """The seconds by name."""
        return vars(self)

    @property
    def largest(self) -> str:
        """The cause that costs most."""
        return max(self.by_cause, key=lambda cause: self.by_cause[cause])

    @property
    def total(self) -> float:
        """Seconds of a step that are lost."""
        return sum(self.by_cause.values())


def losses_of(row: Row) -> Losses:
    """Return where a size loses time.

    Args:
        row: of the size.
    """
    early = earliest_rank(row.slice)
    base = earliest_rank(row.base)

    def beyond(*phases: str) -> float:
        now = sum(row.slice.phases[early][phase] for phase in phases)
        before = sum(row.base.phases[base][phase] for phase in phases)
        return now - row.work * before

    transfer = row.slice.transfer_seconds - row.work * row.base.transfer_seconds
    parts = {
        "data": beyond(DATA),
        "transfer": transfer,
        "late": beyond(EXCHANGE) - transfer,
        "optimizer": beyond(OPTIMIZER),
        "other": beyond(OTHER),
        cause_of_slower_computing(row): beyond(*COMPUTING),
    }
    if late_rank(row.slice) is None and waits_for_cores(row):
        parts["cores"] = parts.get("cores", 0.0) + parts.pop("late")  # whose turn it was
    return Losses(**parts)


def earliest_rank(result: SliceResult) -> int:
    """Return the rank that waits longest for the others: its own work is all that a step needs."""
    return max(range(len(result.phases)), key=lambda rank: result.phases[rank][EXCHANGE])


def late_rank(result: SliceResult) -> int | None:
    """Return the rank that comes last to nearly all exchanges; None where it is now one and now
    another.
    """
    if result.world_size == 1 or not result.last:
        return None
    often = max(range(len(result.last)), key=lambda rank: result.last[rank])
    return often if result.last[often] >= OFTEN_LAST else None


def cause_of_slower_computing(row: Row) -> str:
    """Return why forward and backward passes take longer per sample, if they do."""
    if row.slice.device == "cpu" and (has_fewer_threads(row) or waits_for_cores(row)):
        return "cores"
    return "batch" if row.work < SMALL_WORK else "computing"


def has_fewer_threads(row: Row) -> bool:
    """Return whether a process has fewer threads than one of the smallest size."""
    return row.slice.threads < row.base.threads


def waits_for_cores(row: Row) -> bool:
    """Return whether the processes wait for cores, and those of the smallest size did less."""
    now, before = (max(result.core_waits, default=0.0) for result in (row.slice, row.base))
    return now > before + CORE_WAIT
