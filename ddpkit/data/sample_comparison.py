"""Checks that all ranks read the same data. They compare the first items of a stream, or a few
samples of a dataset.

What is dealt out to the ranks must be the same on all of them: else samples are lost, and others
come twice, in silence. So the ranks compare summaries of the first items. Numbers, texts and shapes
must be equal. Noise from a generator that nobody has seeded is harmless: each rank reads its items
twice, and what differs between the two is not compared. In a stream, which is not read again,
floats may differ where something else tells the items apart, and is the same on all ranks. Both are
warned of.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from numbers import Integral
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ddpkit.distributed import exchange
from ddpkit.errors import RankMismatchError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Set as AbstractSet

logger = get_logger(__name__)

# of a dataset, spread over it: with one alone, splits that share sample 0 look the same
FEW_ITEMS = 4
MOST_ITEMS = 8  # that are looked at
# of an item
_MOST_LEAVES = 64
_MOST_ENTRIES = 8
_MOST_DEPTH = 6
_MOST_VALUES = 16  # of an array of floats
_LONGEST_SHOWN = 60
_CLOSE = 1e-3  # of the mean size of an array: other processors round in other ways

Summary = dict[str, Any]
#: Where items are: as epoch and block of a stream, as indices of a dataset. Ranks elsewhere do not
#: compare.
FirstItems = tuple[tuple[int, ...], list[Summary]]


def summarize(item: Any) -> Summary:
    """Describe an item by what can be compared of it between processes.

    Args:
        item: anything. Numbers, texts, tensors and arrays are looked at, in sequences, mappings and
            attributes too; files, functions and other values without a comparison are left out.

    Returns:
        By path inside the item: a list of floats; or a text that must be equal.

    Ranks: local.

    Example:
        >>> summarize({"x": [1, 2.5], "id": "a"})
        {'id': 'a', 'x.0': '1', 'x.1': [2.5]}
    """
    return dict(itertools.islice(_leaves(item, "", 0), _MOST_LEAVES))


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (str, PurePath, Integral)):
        yield path, str(value).rpartition("/")[2]  # folders may differ
    elif isinstance(value, (torch.Tensor, bytes, float)) or hasattr(value, "__array_interface__"):
        # numpy's, PIL's
        yield from _of_array(value, path)
    elif depth < _MOST_DEPTH:
        if isinstance(value, (list, tuple)):
            named: Any = dict(enumerate(value[:_MOST_ENTRIES]))
        else:
            named = (
                value
                if isinstance(value, Mapping)
                else {}
                if callable(value)
                else getattr(value, "__dict__", {})
            )
        plain = [name for name in named if isinstance(name, (str, int))]
        inner = {str(name): named[name] for name in plain}
        for name in sorted(inner):
            yield from _leaves(inner[name], f"{path}.{name}" if path else name, depth + 1)


def _of_array(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield f"{path} shape".strip(), str((value.dtype, *value.shape))
        value = value.detach().double() if value.is_floating_point() else value
    try:
        flat = np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value).reshape(-1)
    except (RuntimeError, TypeError, NotImplementedError):
        # sparse, quantised, on no device: the shape must do
        return
    if flat.dtype.kind == "f":
        number = min(flat.size, _MOST_VALUES)
        places = np.linspace(0, flat.size - 1, number).astype(int)
        yield path, flat[places].tolist()
    elif flat.dtype.kind in "iubUS":
        yield path, "digest " + hashlib.blake2b(flat.tobytes(), digest_size=8).hexdigest()


# ------------------------------------------------------------------------------------ what they say


def compare_summaries(
    ranks: Sequence[Sequence[Summary]],
    noise: AbstractSet[str] | None = None,
) -> tuple[str, bool]:
    """Say whether the ranks read the same.

    Args:
        ranks: the first items of each rank.
        noise: places that differ each time they are read; None: the items were read once, and
            floats may be noise.

    Returns:
        What differs, empty if nothing does; and whether that is more than noise.

    Ranks: local; alike on every rank.

    Example:
        >>> compare_summaries([[summarize(1)], [summarize(2)]])
        ('an item: 1 on rank 0, 2 on rank 1', True)
    """
    if len({len(items) for items in ranks}) > 1:
        return (
            f"of {MOST_ITEMS} first items the ranks have "
            f"{', '.join(str(len(items)) for items in ranks)}"
        ), True
    found: dict[str, str] = {}
    exact: list[str] = []
    for rank, items in enumerate(ranks):
        for mine, other in zip(ranks[0], items, strict=True):
            for path in {**mine, **other}:
                value = mine.get(path)
                other_value = other.get(path)
                if not _alike(value, other_value):
                    shown = (
                        f"{str(value)[:_LONGEST_SHOWN]} on rank 0, "
                        f"{str(other_value)[:_LONGEST_SHOWN]} on rank {rank}"
                    )
                    found.setdefault(path, f"{path or 'an item'}: {shown}")
                    are_floats = isinstance(value, list) and isinstance(other_value, list)
                    may_be_noise = are_floats if noise is None else path in noise
                    if not may_be_noise:
                        exact.append(path)
    if not found:
        return "", False
    same = {path for item in ranks[0] for path in item} - {*found}
    # Items that differ from each other, and are the same on all ranks: the data is the same.
    same_tells_items_apart = any(
        len({repr(item.get(path)) for item in ranks[0]}) > 1 for path in same
    )
    all_is_known_noise = noise is not None and found.keys() <= noise
    is_more_than_noise = bool(exact) or not (same_tells_items_apart or all_is_known_noise)
    first_path = exact[0] if exact else next(iter(found))
    return found[first_path], is_more_than_noise


def _alike(value: Any, other: Any) -> bool:
    if not isinstance(value, list) or not isinstance(other, list) or len(value) != len(other):
        return bool(value == other)
    values = np.array([value, other])
    sizes = np.abs(values[np.isfinite(values)])
    close = _CLOSE * sizes.sum() / max(sizes.size, 1)
    return bool(
        np.allclose(
            values[0],
            values[1],
            rtol=0.0,
            atol=close,
            equal_nan=True,
        )
    )


def require_alike(
    first: FirstItems | None,
    read: Callable[[], list[Summary] | None],
    words: str,
    site: str,
) -> None:
    """Compare the first items of all ranks; if they are not the same, stop on every rank.

    Args:
        first: this rank's first items; None if unknown.
        read: returns the items that decide, read twice, one reading after the other; None if they
            cannot be read. Called only if the first differ.
        words: what differs, and what to do, for the message.
        site: names the comparison.

    Raises:
        RankMismatchError: the ranks read different data; raised on every rank. If it may be noise,
            only a warning.

    Ranks: collective (over the store).
    """
    digest = (
        None if first is None else hashlib.blake2b(repr(first).encode(), digest_size=16).hexdigest()
    )
    digests = exchange(digest, site)
    if None in digests or len(set(digests)) == 1 or first is None:
        return
    both = read()  # the same samples twice; None where they cannot be read again
    known = both or []
    half = len(known) // 2
    own = known[:half]
    pairs = zip(own, known[half:], strict=True)
    noise = {
        path
        for first, second in pairs
        for path in {**first, **second}
        if not _alike(first.get(path), second.get(path))
    }
    own_detail = (*first, None if both is None else own, noise)
    of_all = exchange(own_detail, f"{site}, in detail")
    places, firsts, more, noises = zip(*of_all, strict=True)
    if len(set(places)) > 1:
        return
    compared = (firsts,) if None in more else (more, set().union(*noises))
    difference, is_certain = compare_summaries(*compared)
    if difference and is_certain:
        raise RankMismatchError(f"{words} ({difference}).")
    if difference:
        logger.warning_once("This may be wrong. %s (%s).", words, difference)
