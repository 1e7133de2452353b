"""How often a sample came before in an epoch."""

from __future__ import annotations

import hashlib
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


def count_repeats(indices: Iterable[Any], seen: dict[int, int]) -> list[int]:
    """Return how often each index came before: in ``seen``, which is brought up to date, or in the
    same list.

    Args:
        indices: of samples.
        seen: how often each came so far, by its number.

    Example:
        >>> count_repeats([3, 5, 3, 3], {5: 1})
        [0, 1, 1, 2]
    """
    counts = []
    for index in indices:
        number = index_number(index)
        counts.append(seen.get(number, 0))
        seen[number] = counts[-1] + 1
    return counts


def index_number(index: Any) -> int:
    """Return an index as a number; any other value, such as a tuple, by its ``repr``.

    Args:
        index: what a sampler yields for one sample.

    Ranks: local; equal on all ranks if the ``repr`` is.

    Example:
        >>> index_number(3), index_number((3, 224)) == index_number((3, 224))
        (3, True)
    """
    if type(index) is int:
        return index
    try:
        return operator.index(index)
    except TypeError:
        return int.from_bytes(
            hashlib.blake2b(repr(index).encode(), digest_size=8).digest(),
            "little",
        )
