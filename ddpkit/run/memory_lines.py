"""A straight line for the bytes that grow with the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """Bytes by the number of samples.

    Args:
        fixed: of no sample.
        per_sample: of each.

    Example:
        >>> Line(100, 3).at(10)
        130
    """

    fixed: float
    per_sample: float

    def at(
        self,
        samples: int,
    ) -> float:
        """Return the bytes of so many samples."""
        return self.fixed + self.per_sample * samples

    def as_dict(self) -> dict[str, float]:
        """Return the fields by name."""
        return dataclasses.asdict(self)


def line_through(points: Sequence[tuple[int | None, float]]) -> Line:
    """Return the line through one or two points.

    Args:
        points: samples and bytes, the fewest samples first. Of one point nothing grows.

    Example:
        >>> line_through([(10, 130.0), (20, 160.0)]), line_through([(None, 7.0)])
        (Line(fixed=100.0, per_sample=3.0), Line(fixed=7.0, per_sample=0.0))
    """
    (few, low), *others = points
    if not others or few is None:
        return Line(low, 0.0)
    many, high = others[-1]
    if many is None:
        return Line(low, 0.0)
    # what shrinks with the batch is chance, such as another kernel
    slope = max((high - low) / (many - few), 0.0)
    return Line(max(high - slope * many, 0.0), slope)
