"""The number of the last epoch of a call of ``fit``, which the progress bar shows."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpkit.training import RunLength


def last_epoch(epoch_counter: Any, length: RunLength) -> int | None:
    """Return the number of the last epoch that a counter will yield, if nothing stops the run
    before.

    Args:
        epoch_counter: as ``fit`` was given it.
        length: of the call.

    Returns:
        None where it is not known, or where the numbers are not one after the other.

    Ranks: local; equal on all ranks.

    Example:
        >>> from ddpkit.training import RunLength
        >>> (
        ...     last_epoch(range(5, 9), RunLength(epochs=4)),
        ...     last_epoch(range(5, 9), RunLength(epochs=2)),
        ... )
        (8, 6)
        >>> last_epoch([3, 1, 2], RunLength(epochs=3)) is None
        True
    """
    if not length.epochs:
        return None
    limit = getattr(epoch_counter, "limit", None)
    if isinstance(limit, int):
        return min(limit, length.epochs)
    if not isinstance(epoch_counter, Sequence) or not epoch_counter:
        return None
    numbers = epoch_counter[: length.epochs]
    first = numbers[0]
    if not isinstance(first, int):
        return None
    expected = range(first, first + len(numbers))
    is_range = isinstance(
        numbers,
        range,
    )  # which may be long: it is compared without a look at each number
    in_a_row = numbers == expected if is_range else all(map(operator.eq, numbers, expected))
    return expected[-1] if in_a_row else None
