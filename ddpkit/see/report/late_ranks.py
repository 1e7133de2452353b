"""Which rank was the slowest: a table of ranks and phases."""

from __future__ import annotations

from dataclasses import dataclass

from ddpkit.see.report.history import RunHistory
from ddpkit.step_times import PHASES

MOST_ROWS = 16
NO_OWN_TIME = frozenset({"exchange"})  # who waits longest is the fastest


@dataclass(frozen=True)
class LateCell:
    """A rank in a phase.

    Attributes:
        share: of the measured seconds in which it was the slowest there.
        behind: seconds of a step by which it was then behind the median of the others, on average.
        weight: its part of all lateness in the table, from 0 to 1; at most 1 in sum.
    """

    share: float
    behind: float
    weight: float


@dataclass(frozen=True)
class LateRow:
    """A rank.

    Attributes:
        rank: its number.
        cells: one for each of :func:`late_phases`.
        behind: seconds of a step that it is behind the others' median, over all phases and seconds.
    """

    rank: int
    cells: tuple[LateCell, ...]
    behind: float


def late_phases() -> tuple[str, ...]:
    """Return the phases in which a rank can be late: not the wait for the others."""
    return tuple(phase for phase in PHASES if phase not in NO_OWN_TIME)


def late_rows(history: RunHistory) -> list[LateRow]:
    """Return the ranks that were the slowest in some phase, the one that costs most first."""
    late = history.late
    own = {key: behind for key, behind in late.behind.items() if key[1] not in NO_OWN_TIME}
    total = sum(own.values()) or 1.0
    rows = []
    for rank in sorted({rank for rank, _ in own}):
        cells = []
        for phase in late_phases():
            times = late.counts.get((rank, phase), 0)
            seconds = own.get((rank, phase), 0.0)
            mean = seconds / times if times else 0.0
            cells.append(LateCell(times / late.seconds, mean, seconds / total))
        behind = sum(own.get((rank, phase), 0.0) for phase in late_phases()) / late.seconds
        rows.append(LateRow(rank, tuple(cells), behind))
    return sorted(rows, key=lambda row: -row.behind)[:MOST_ROWS]
