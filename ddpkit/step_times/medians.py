"""The median, without the module ``statistics``, which takes long to load."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def median(values: Iterable[float]) -> float:
    """Return the median of some numbers.

    Args:
        values: at least one.

    Example:
        >>> median([3.0, 1.0, 2.0]), median([1.0, 4.0])
        (2.0, 2.5)
    """
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
