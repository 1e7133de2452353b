"""Numbers of a run in columns, a row for each record."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Mapping, Sequence

import numpy as np

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]

STEP = "optimizer_step"


class Table:
    """Columns of numbers; what a record lacks is not-a-number. A million rows take 8 MB a column.

    Example:
        >>> table = Table()
        >>> table.begin_attempt()
        >>> table.append({"optimizer_step": 1, "loss": 0.5})
        >>> table.append({"optimizer_step": 2, "loss": 0.25})
        >>> table.counted([1.0])["loss"].tolist()
        [0.5]
    """

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self._begins: list[int] = []
        self.rows = 0

    def begin_attempt(self) -> None:
        """Note that what follows is of another start of the run."""
        self._begins.append(self.rows)

    def append(self, values: Mapping[str, float]) -> None:
        """Add a row."""
        for name in [value for value in values if value not in self._columns]:
            self._columns[name] = array("d", [math.nan]) * self.rows
        for name, column in self._columns.items():
            column.append(values.get(name, math.nan))
        self.rows += 1

    def counted(self, limits: Sequence[float]) -> dict[str, Numbers]:
        """Return the columns without the rows of steps that were done again after a restart.

        Args:
            limits: for each attempt, its last optimizer step that counts.
        """
        columns = {name: np.array(column) for name, column in self._columns.items()}
        if STEP not in columns:
            return columns
        ends = [*self._begins[1:], self.rows]
        keep = np.ones(self.rows, dtype=bool)
        for begin, end, limit in zip(self._begins, ends, limits, strict=True):
            keep[begin:end] = columns[STEP][begin:end] <= limit
        return {name: column[keep] for name, column in columns.items()}


def thin(x: Numbers, y: Numbers, points: int) -> tuple[Numbers, Numbers]:
    """Leave points out, so that a curve keeps its look: of every stretch its smallest and its
    largest value stay.

    Args:
        x: shape ``(n,)``, ascending.
        y: shape ``(n,)``; not-a-number where there is none.
        points: how many may stay, at least 4.

    Returns:
        ``x`` and ``y`` of what stays, at most ``points`` of each.

    Example:
        >>> x = np.arange(1000.0)
        >>> y = np.where(x == 500, 7.0, 0.0)
        >>> kept_x, kept_y = thin(x, y, 20)
        >>> len(kept_x) <= 20, float(kept_y.max()), float(kept_x[-1])
        (True, 7.0, 999.0)
    """
    if len(x) <= points:
        return x, y
    stretches = max(1, (points - 2) // 2)
    bounds = np.linspace(0, len(x), stretches + 1).astype(int)
    kept = {0, len(x) - 1}
    for begin, end in itertools.pairwise(bounds):
        part = y[begin:end]
        finite = np.isfinite(part)
        if finite.any():
            kept.add(int(begin + np.where(finite, part, np.inf).argmin()))
            kept.add(int(begin + np.where(finite, part, -np.inf).argmax()))
        elif len(part):
            kept.add(int(begin))  # a gap stays one
    order = np.array(sorted(kept))
    return x[order], y[order]


def means(
    x: Numbers,
    columns: Sequence[Numbers],
    points: int,
) -> tuple[Numbers, list[Numbers]]:
    """Average columns over as many stretches as there may be points.

    Args:
        x: shape ``(n,)``, ascending.
        columns: each of shape ``(n,)``; not-a-number is left out of a mean.
        points: how many stretches at most.

    Returns:
        The means of ``x`` and of the columns.

    Example:
        >>> x, (y,) = means(np.arange(4.0), [np.array([1.0, 3.0, 5.0, 7.0])], 2)
        >>> x.tolist(), y.tolist()
        ([0.5, 2.5], [2.0, 6.0])
    """
    if len(x) <= points:
        return x, list(columns)
    begins = np.linspace(0, len(x), points + 1).astype(int)[:-1]

    def mean(column: Numbers) -> Numbers:
        finite = np.isfinite(column)
        total = np.add.reduceat(np.where(finite, column, 0.0), begins)
        count = np.add.reduceat(finite.astype(float), begins)
        return np.divide(
            total,
            count,
            out=np.full_like(total, np.nan),
            where=count > 0,
        )

    return mean(x), [mean(column) for column in columns]
