"""The memory of each rank over a whole run, in few points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpkit.step_times.seconds import SecondOfSteps

#: Points that are kept: when there are more, every other one goes.
MOST_POINTS = 64


@dataclass(frozen=True)
class MemoryPoint:
    """The memory at one moment.

    Attributes:
        at: seconds of training before it.
        optimizer_step: updates since the run began.
        used: bytes by name, of each rank.
    """

    at: float
    optimizer_step: int
    used: list[dict[str, float]]


class MemoryRecord:
    """Keeps points of a run, however long it is, at even distances.

    Attributes:
        points: the oldest first.
    """

    def __init__(self) -> None:
        self.points: list[MemoryPoint] = []
        self._apart = 1
        self._seen = 0
        self._at = 0.0

    def note(self, second: SecondOfSteps) -> None:
        """Take the memory of a second, or leave it out."""
        self._at += second.seconds
        self._seen += 1
        if self._seen % self._apart:
            return
        self.points.append(MemoryPoint(self._at, second.optimizer_step, second.memory))
        if len(self.points) > MOST_POINTS:
            self.points = self.points[1::2]
            self._apart *= 2
