"""The numbers of all ranks in one sum: each rank has slots of its own in it, and zeros in those of the others."""

from __future__ import annotations

from typing import NamedTuple

from ddpkit.step_times.memory import MEMORY
from ddpkit.step_times.phases import PHASES, STEP
from ddpkit.step_times.window_times import RankNumbers

_TIMES = (*PHASES, STEP)
_REST = ("samples", "size", "tokens", "host_seconds", "is_host_bound")

#: How many numbers each rank tells.
SLOTS = len(_TIMES) + len(_REST) + len(MEMORY)

_NOTHING = -1.0  # in the place of a number that a rank does not have; all numbers are 0 or more


class RankRow(NamedTuple):
    """What one rank has told: its steps, and its memory in bytes by name.

    Ranks: local.
    """

    numbers: RankNumbers
    memory: dict[str, float]


def filled_slots(row: RankRow | None, rank: int, world_size: int) -> list[float]:
    """Return this rank's part of the sum.

    Args:
        row: None: nothing was measured.
        rank: this one.
        world_size: number of ranks.

    Ranks: local.
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

    Ranks: local.

    Example:
        >>> numbers = RankNumbers(dict.fromkeys((*PHASES, "step"), 0.5), 4.0, 12.0, None, 0.25, 0.0)
        >>> row = RankRow(numbers, {"rss": 8.0})
        >>> rows_of(filled_slots(row, 0, 1), 1) == [row]
        True
    """
    return [_unpacked(sums[rank * SLOTS : (rank + 1) * SLOTS]) for rank in range(world_size)]


def _packed(row: RankRow) -> list[float]:
    numbers = row.numbers
    tokens = _NOTHING if numbers.tokens is None else numbers.tokens
    rest = [numbers.samples, numbers.size, tokens, numbers.host_seconds, numbers.is_host_bound]
    memory = [row.memory.get(name, _NOTHING) for name in MEMORY]
    return [*(numbers.phases[name] for name in _TIMES), *rest, *memory]


def _unpacked(slots: list[float]) -> RankRow:
    times = dict(zip(_TIMES, slots, strict=False))
    samples, size, tokens, host_seconds, bound = slots[len(_TIMES) : len(_TIMES) + len(_REST)]
    memory = dict(zip(MEMORY, slots[-len(MEMORY) :], strict=True))
    there = {name: value for name, value in memory.items() if value >= 0.0}
    known = None if tokens < 0.0 else tokens
    return RankRow(RankNumbers(times, samples, size, known, host_seconds, bound), there)
