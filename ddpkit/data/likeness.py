"""Do all ranks read the same data? The first items tell, as far as they can.

What is dealt out to the ranks must be the same on all of them: else samples are lost, and others come twice, in
silence. So the ranks compare sketches of the first items. A difference alone proves nothing: noise from an unseeded
generator differs between ranks, and is harmless. So where sketches differ, every rank reads its data twice, leaves out
what is another one each time, and the rest is compared.
"""

from __future__ import annotations

import dataclasses
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
    from collections.abc import Callable, Iterator, Sequence

logger = get_logger(__name__)

MOST_ITEMS = 8  # that are looked at
_MOST_LEAVES, _MOST_ENTRIES, _MOST_DEPTH = 64, 8, 6  # of an item
_MOST_VALUES = 16  # of an array of floats
_LONGEST_TEXT, _LONGEST_SHOWN = 60, 20
_CLOSE = 1e-3  # of the mean size of an array: other processors round in other ways

Sketch = dict[str, Any]
Sketches = list[Sketch]


@dataclasses.dataclass(frozen=True)
class FirstItems:
    """The first items that a rank has read of what is dealt out.

    Attributes:
        place: which items they are; ranks that are at different places are not compared.
        sketches: of each.

    Ranks: local.

    Example:
        >>> FirstItems((1, 0), [sketch("a")]).place
        (1, 0)
    """

    place: tuple[int, ...]
    sketches: Sketches


def sketch(item: Any) -> Sketch:
    """Describe an item by what can be compared of it between processes.

    Args:
        item: anything. Numbers, texts, tensors and arrays are looked at, in sequences, mappings and attributes too;
            what cannot be compared, such as a file or a function, is left out.

    Returns:
        By place: a list of floats; or what must be equal: a text, a whole number as a text, or a shape as a tuple.

    Ranks: local.

    Example:
        >>> sketch({"x": [1, 2.5], "id": "a"})
        {'id': 'a', 'x length': (2,), 'x.0': '1', 'x.1': [2.5]}
    """
    return dict(itertools.islice(_leaves(item, "", 0), _MOST_LEAVES))


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (str, PurePath, Integral)):
        text = str(value).rpartition("/")[2]  # folders may differ
        yield path, text if len(text) <= _LONGEST_TEXT else _digest(text.encode(errors="surrogatepass"))
    elif isinstance(value, (torch.Tensor, bytes, float)) or hasattr(value, "__array_interface__"):  # numpy's, PIL's
        yield from _of_array(value, path)
    elif depth < _MOST_DEPTH:
        if isinstance(value, (list, tuple)):
            yield f"{path} length".strip(), (len(value),)
            named: Any = dict(enumerate(value[:_MOST_ENTRIES]))
        else:
            named = value if isinstance(value, Mapping) else {} if callable(value) else getattr(value, "__dict__", {})
        inner = {str(name): one for name, one in named.items() if isinstance(name, (str, int))}
        for name in sorted(inner):
            yield from _leaves(inner[name], f"{path}.{name}" if path else name, depth + 1)


def _of_array(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "shape"):
        yield f"{path} shape".strip(), (str(value.dtype).rpartition(".")[2], *value.shape)
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value.double() if value.is_floating_point() else value).numpy()
        flat = np.asarray(value).reshape(-1)
    except (RuntimeError, TypeError, NotImplementedError):  # sparse, quantised, on no device: the shape must do
        return
    if flat.dtype.kind == "f":
        chosen = flat[np.linspace(0, flat.size - 1, min(flat.size, _MOST_VALUES)).astype(int)]
        yield path, chosen.tolist()
    elif flat.dtype.kind in "iubUS":
        is_number = flat.size == 1 and flat.dtype.kind in "iub"
        yield path, str(flat[0]) if is_number else _digest(flat.tobytes())


def _digest(value: bytes) -> str:
    return "digest " + hashlib.blake2b(value, digest_size=8).hexdigest()


# ------------------------------------------------------------------------------------------- what they say


def judge(ranks: Sequence[Sequence[Sketches]]) -> tuple[str, bool]:
    """Say whether the ranks read the same.

    Args:
        ranks: the first items of each rank, read twice; or once on all ranks, if one of them cannot read twice.

    Returns:
        What differs, empty if nothing does but noise; and whether that is certain.

    Ranks: local; alike on every rank.

    Example:
        >>> judge([[[sketch(1)]], [[sketch(2)]]])
        ('the items, one after the other: 1 | on rank 0; 2 | on rank 1', True)
    """
    firsts = [readings[0] for readings in ranks]
    if len({len(items) for items in firsts}) > 1:
        sizes = ", ".join(f"{len(items)} on rank {rank}" for rank, items in enumerate(firsts[:MOST_ITEMS]))
        return f"of {MOST_ITEMS} first items there are {sizes}", True
    differing = _differing(firsts)
    moving = {place for readings in ranks for place in _differing(readings)}
    steady = [place for place in differing if place not in moving and len(ranks[0]) > 1]
    if steady:
        return _difference(firsts, steady[0]), True
    # Something that tells the items apart and is the same on all ranks: they are the same items.
    alike = {place for item in firsts[0] for place in item} - moving - {*differing}
    if not differing or any(len({repr(item.get(place)) for item in firsts[0]}) > 1 for place in alike):
        return "", True
    exact = [place for place in differing if any(isinstance(item.get(place), str) for item in firsts[0])]
    return _difference(firsts, (exact or differing)[0]), bool(exact)


def _differing(readings: Sequence[Sketches]) -> list[str]:
    """Return the places in the items at which readings differ from the first one."""
    places = dict.fromkeys(place for reading in readings for item in reading for place in item)
    pairs = [pair for reading in readings[1:] for pair in zip(readings[0], reading, strict=False)]
    return [place for place in places if not all(_alike(one.get(place), two.get(place)) for one, two in pairs)]


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, list) or not isinstance(other, list) or len(one) != len(other):
        return bool(one == other)
    values = np.array([one, other])
    sizes = np.abs(values[np.isfinite(values)])
    close = _CLOSE * sizes.sum() / max(sizes.size, 1)
    return bool(np.allclose(values[0], values[1], rtol=0.0, atol=close, equal_nan=True))


def require_alike(
    first: FirstItems | None, read_twice: Callable[[], Sequence[Sketches] | None], words: str, site: str
) -> None:
    """Compare the first items of all ranks; if they are not the same, stop on every rank.

    Args:
        first: this rank's first items; None if unknown.
        read_twice: reads them twice, perhaps more of them; returns None if that is impossible. Called only if they
            differ.
        words: what differs, and what to do, for the message.
        site: names the comparison.

    Raises:
        RankMismatchError: the ranks read different data; raised on every rank. If uncertain, only a warning.

    Ranks: collective (over the store).

    Example:
        >>> require_alike(FirstItems((1, 0), [sketch(3)]), lambda: None, "the data", "example")
    """
    digest = None if first is None else hashlib.blake2b(repr(first).encode(), digest_size=16).hexdigest()
    digests = exchange(digest, site)
    if None in digests or len(set(digests)) == 1 or first is None:
        return
    places, firsts, again = zip(
        *exchange((first.place, first.sketches, read_twice()), f"{site}, in detail"), strict=True
    )
    if len(set(places)) > 1:
        return
    difference, is_certain = judge(again if all(again) else [[sketches] for sketches in firsts])
    if difference and is_certain:
        raise RankMismatchError(f"{words} ({difference}).")
    if difference:
        logger.warning_once("This may be wrong. %s (%s).", words, difference)


def _difference(readings: Sequence[Sketches], place: str) -> str:
    """Show what two ranks have at a place."""
    other = next(rank for rank, items in enumerate(readings) if place in _differing([readings[0], items]))
    shown = []
    for rank in (0, other):
        values = [str(item.get(place, "nothing"))[:_LONGEST_SHOWN] for item in readings[rank][:4]]
        shown.append(f"{' | '.join(values)} | on rank {rank}")
    return f"{place or 'the items'}, one after the other: {'; '.join(shown)}"
