"""How far the sizes of the batches explain that ranks take different times for a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddpkit.step_times.verdicts.history import above_others

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from typing_extensions import Self

    from ddpkit.step_times.verdicts.history import Stretch


@dataclass(frozen=True, kw_only=True)
class SizeEffect:
    """Sizes and times of the same windows on all ranks, compared.

    Attributes:
        relative: sizes, each against the mean of its window, shape ``(ranks, windows)``.
        slope: seconds that a batch takes longer which is larger by the mean of its window.
        correlation: of relative sizes and times, -1 to 1; 0 where one of them does not change.
    """

    relative: NDArray[np.float64]
    slope: float
    correlation: float

    @classmethod
    def of(cls, stretches: Sequence[Stretch]) -> Self:
        """Compare the windows of some stretches."""
        sizes = np.hstack([stretch.sizes for stretch in stretches])
        own = np.hstack([stretch.own for stretch in stretches])
        relative = sizes / np.maximum(sizes.mean(axis=0), 1e-9) - 1.0
        times = own - own.mean(axis=0)
        of_sizes = float(np.mean(relative**2))
        of_times = float(np.mean(times**2))
        if not of_sizes or not of_times:
            return cls(relative=relative, slope=0.0, correlation=0.0)
        together = float(np.mean(relative * times))
        return cls(
            relative=relative,
            slope=together / of_sizes,
            correlation=together / (of_sizes * of_times) ** 0.5,
        )

    @property
    def largest(self) -> float:
        """By how much the largest batch of a window is above the mean, as a share; on average."""
        return float(self.relative.max(axis=0).mean())

    @property
    def lost(self) -> float:
        """Seconds of a step in which an average rank waits for the largest batch."""
        return max(self.slope, 0.0) * self.largest

    def explains(self, rank: int) -> float:
        """Return the seconds that a rank takes longer than the others for its larger batches."""
        larger = above_others(self.relative.mean(axis=1))[rank]
        return max(self.slope, 0.0) * max(float(larger), 0.0)

    def always_largest(self, share: float) -> int | None:
        """Return the rank with the largest batch in that share of the windows; None: no one has."""
        wins = np.bincount(self.relative.argmax(axis=0), minlength=len(self.relative))
        rank = int(wins.argmax())
        return rank if wins[rank] >= share * self.relative.shape[1] else None
