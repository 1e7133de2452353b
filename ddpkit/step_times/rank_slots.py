"""The numbers of all ranks in one sum. Each rank writes into slots of its own, and zeros into those
of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpkit.step_times.memory import MEMORY
from ddpkit.step_times.phases import PHASES, STEP
from ddpkit.step_times.seconds import SINGLE_WINDOWS
from ddpkit.step_times.window_times import RankNumbers, SingleWindow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_TIMES = (*PHASES, STEP)
_REST = ("samples", "size", "tokens", "host_seconds", "is_host_bound", "core_waits")
_CLOCKS = ("share", "reasons")
_LOAD = ("load", "cores")
_SINGLE = len(SingleWindow._fields)

_GROUPS = (_TIMES, _REST, MEMORY, _CLOCKS, _LOAD)
_SINGLES = _SINGLE * SINGLE_WINDOWS

#: How many numbers each rank tells.
SLOTS = sum(map(len, _GROUPS)) + _SINGLES

_NOTHING = -1.0  # in the place of a number that a rank does not have; all numbers are 0 or more


@dataclass(frozen=True)
class RankRow:
    """What one rank has told.

    Attributes:
        numbers: of its measured steps.
        memory: bytes by name.
        core_waits: share of the time without a core.
        gpu_clocks: ``"share"`` and ``"reasons"``; None: not known.
        host_load: ``"load"`` and ``"cores"`` of its machine; None: not known.
    """

    numbers: RankNumbers
    memory: dict[str, float]
    core_waits: float = 0.0
    gpu_clocks: dict[str, float] | None = None
    host_load: dict[str, float] | None = None


def filled_slots(row: RankRow | None, rank: int, world_size: int) -> list[float]:
    """Return this rank's part of the sum.

    Args:
        row: None: nothing was measured.
        rank: this one.
        world_size: number of ranks.
    """
    slots = [0.0] * (SLOTS * world_size)
    if row is not None:
        slots[rank * SLOTS : (rank + 1) * SLOTS] = _packed(row)
    return slots


def rows_of(sums: list[float], world_size: int) -> list[RankRow]:
    """Return what the ranks have told.

    Args:
        sums: over all ranks, of :func:`filled_slots`.
        world_size: number of ranks.

    Example:
        >>> times = dict.fromkeys((*PHASES, "step"), 0.5)
        >>> numbers = RankNumbers(times, 4.0, 12.0, None, 0.25, 0.0, [SingleWindow(12.0, 0.5, 0.0)])
        >>> row = RankRow(numbers, {"rss": 8.0})
        >>> rows_of(filled_slots(row, 0, 1), 1) == [row]
        True
    """
    begins = range(0, world_size * SLOTS, SLOTS)
    return [_unpacked(iter(sums[begin : begin + SLOTS])) for begin in begins]


def _packed(row: RankRow) -> list[float]:
    numbers = row.numbers
    singles = [*numbers.singles[-SINGLE_WINDOWS:]]
    missing = SINGLE_WINDOWS - len(singles)
    return [
        *(numbers.phases[name] for name in _TIMES),
        numbers.samples,
        numbers.size,
        _NOTHING if numbers.tokens is None else numbers.tokens,
        numbers.host_seconds,
        numbers.is_host_bound,
        row.core_waits,
        *_values(row.memory, MEMORY),
        *_values(row.gpu_clocks or {}, _CLOCKS),
        *_values(row.host_load or {}, _LOAD),
        *(value for single in singles for value in single),
        *[_NOTHING] * (missing * _SINGLE),
    ]


def _unpacked(slots: Iterator[float]) -> RankRow:
    times = {name: next(slots) for name in _TIMES}
    rest = {name: next(slots) for name in _REST}
    memory = {name: next(slots) for name in MEMORY}
    clocks = {name: next(slots) for name in _CLOCKS}
    load = {name: next(slots) for name in _LOAD}
    singles = [SingleWindow(*(next(slots) for _ in range(_SINGLE))) for _ in range(SINGLE_WINDOWS)]
    core_waits = rest.pop("core_waits")
    tokens = rest.pop("tokens")
    numbers = RankNumbers(
        phases=times,
        tokens=None if tokens < 0.0 else tokens,
        singles=[single for single in singles if single.size >= 0.0],
        **rest,
    )
    return RankRow(
        numbers,
        _there(memory),
        core_waits,
        _there(clocks) or None,
        _there(load) or None,
    )


def _values(
    found: Mapping[str, float],
    names: tuple[str, ...],
) -> list[float]:
    return [found.get(name, _NOTHING) for name in names]


def _there(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if value >= 0.0}
