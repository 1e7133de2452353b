"""Rows of the table: the slices of each size together, and how they compare with the smallest
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpkit.run import SliceResult
from ddpkit.see.scale.cells import Cell
from ddpkit.step_times import PHASES

#: Efficiencies from which on a word is right; below the last one more processes hardly pay.
GOOD = 0.9
FAIR = 0.75
POOR = 0.5
#: More than so many processes can give: then the smallest size was slower than it is.
TOO_GOOD = 1.2


@dataclass(frozen=True)
class Row:
    """What was measured of one size.

    Attributes:
        rates: samples per second over all processes, of each slice.
        slice: the one with the median rate; of an even number, the slower of the two in the middle.
        base: likewise of the smallest size.
    """

    rates: Sequence[float]
    slice: SliceResult
    base: SliceResult

    @property
    def name(self) -> str:
        """Way and size in words."""
        return Cell(self.slice.way, self.slice.size).name

    @property
    def is_base(self) -> bool:
        """Whether the others are compared with this one."""
        return self.slice is self.base

    @property
    def rate(self) -> float:
        """Samples per second of all processes."""
        return self.slice.samples_per_second

    @property
    def spread(self) -> float:
        """Half the distance between the slowest and the fastest slice, as a part of the median."""
        return (max(self.rates) - min(self.rates)) / 2 / self.rate

    @property
    def speed_up(self) -> float:
        """The rate, compared with the smallest size."""
        return self.rate / self.base.samples_per_second

    @property
    def efficiency(self) -> float:
        """The speed-up as a part of what so many processes could give, 0 to 1."""
        return self.speed_up * self.base.size / self.slice.size

    @property
    def word(self) -> str:
        """What to think of the efficiency."""
        return word_for(self.efficiency)

    @property
    def work(self) -> float:
        """Samples of a process in a step, compared with the smallest size."""
        own = self.slice.samples_of_step / self.slice.size
        return own * self.base.size / self.base.samples_of_step

    def as_dict(self) -> dict[str, Any]:
        """Return the row for other programs."""
        return {
            "way": self.slice.way,
            "size": self.slice.size,
            "samples_per_second": self.rate,
            "spread": self.spread,
            "speed_up": self.speed_up,
            "efficiency": self.efficiency,
            "word": self.word,
            "step_seconds": self.slice.step,
            "phases": {phase: self.slice.phase(phase) for phase in PHASES},
        }


def word_for(efficiency: float) -> str:
    """Return a word for an efficiency.

    Example:
        >>> word_for(0.95), word_for(0.8), word_for(0.52), word_for(0.3), word_for(8.0)
        ('good', 'fair', 'poor', 'bad', 'doubtful')
    """
    if efficiency > TOO_GOOD:
        return "doubtful"
    for bound, word in (
        (GOOD, "good"),
        (FAIR, "fair"),
        (POOR, "poor"),
    ):
        if efficiency >= bound:
            return word
    return "bad"


def rows_of(slices: Sequence[SliceResult]) -> list[Row]:
    """Return the rows of all slices: the smallest size first, the ways of a size in the order of
    the slices.

    Args:
        slices: at least one.
    """
    groups: dict[tuple[str, int], list[SliceResult]] = {}
    for slice_ in slices:
        groups.setdefault((slice_.way, slice_.size), []).append(slice_)
    ordered = sorted(groups.values(), key=lambda group: group[0].size)
    base = _median_slice(ordered[0])
    return [
        Row([result.samples_per_second for result in group], _median_slice(group), base)
        for group in ordered
    ]


def _median_slice(group: Sequence[SliceResult]) -> SliceResult:
    ordered = sorted(group, key=lambda result: result.samples_per_second)
    return ordered[(len(ordered) - 1) // 2]
