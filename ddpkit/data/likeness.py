"""Do all ranks read the same data? The first items tell, as far as they can.

What is dealt out to the ranks must be the same on all of them: else samples are lost, and others come twice, in
silence. So the ranks compare sketches of the first items. A difference alone proves nothing: noise from an unseeded
generator differs between ranks, and is harmless. So where sketches differ, every rank reads its data twice, leaves out
what is another one each time, and the rest is compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from numbers import Integral, Real
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
_NUMBER, _FLOAT, _SHAPE, _TEXT = "number", "float", "shape", "text"
_NONE = ("", "nothing")

Sketch = dict[str, tuple[str, Any]]
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
        By place: a kind and a value.

    Ranks: local.

    Example:
        >>> sketch({"x": [1, 2.5], "id": "a"})
        {'id': ('text', 'a'), 'x length': ('shape', 2), 'x.0': ('number', 1), 'x.1': ('float', [2.5])}
    """
    leaves: Sketch = {}
    for path, leaf in _leaves(item, "", 0):
        leaves[path] = leaf
        if len(leaves) >= _MOST_LEAVES:
            break
    return leaves


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, tuple[str, Any]]]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield from _of_array(value, path)
    elif isinstance(value, (Integral, np.bool_)):
        yield path, (_NUMBER, int(value))
    elif isinstance(value, Real):
        yield path, (_FLOAT, [float(value)])
    elif isinstance(value, (str, bytes, PurePath)):
        yield path, (_TEXT, _short(value))
    elif depth < _MOST_DEPTH:
        if isinstance(value, (list, tuple)):
            yield f"{path} length".strip(), (_SHAPE, len(value))
        for name, inner in _parts(value):
            yield from _leaves(inner, f"{path}.{name}" if path else name, depth + 1)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return what an object is made of, by name."""
    if isinstance(value, Mapping):
        named = {str(key): one for key, one in value.items() if isinstance(key, (str, int))}
    elif isinstance(value, (list, tuple)):
        return [(str(place), one) for place, one in enumerate(value[:_MOST_ENTRIES])]
    elif hasattr(value, "tobytes") and hasattr(value, "mode"):  # a picture of PIL
        return [("pixels", value.tobytes())]
    else:
        named = {} if callable(value) else getattr(value, "__dict__", {})
    return [(name, named[name]) for name in sorted(named)]


def _of_array(value: Any, path: str) -> Iterator[tuple[str, tuple[str, Any]]]:
    yield f"{path} shape".strip(), (_SHAPE, (str(value.dtype).rpartition(".")[2], *value.shape))
    try:
        array = value.detach().cpu() if isinstance(value, torch.Tensor) else value
        if isinstance(array, torch.Tensor):
            array = (array.double() if array.is_floating_point() else array).numpy()
        if array.dtype.kind == "f":
            flat = array.reshape(-1)
            chosen = flat[np.linspace(0, flat.size - 1, min(flat.size, _MOST_VALUES)).astype(int)]
            yield path, (_FLOAT, [float(one) for one in chosen])
        elif array.dtype.kind in "iub":
            yield path, (_NUMBER, _short(array.tobytes()) if array.size > 1 else array.reshape(-1).tolist())
        elif array.dtype.kind in "US":
            yield path, (_TEXT, _short(array.tobytes()))
    except (RuntimeError, TypeError, NotImplementedError):  # sparse, quantised, on no device: the shape must do
        return


def _short(value: Any) -> str:
    """Return a text itself if it is short, else a digest; of a path its last part, as folders may differ."""
    if not isinstance(value, bytes):
        text = str(value).rpartition("/")[2]
        if len(text) <= _LONGEST_TEXT:
            return text
        value = text.encode(errors="surrogatepass")
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
    steady = [place for place in differing if place not in moving] if len(ranks[0]) > 1 else []
    if steady:
        return _difference(firsts, steady[0]), True
    # Something that tells the items apart and is the same on all ranks: they are the same items.
    alike = {place for item in firsts[0] for place in item} - moving - {*differing}
    if not differing or any(len({repr(item.get(place)) for item in firsts[0]}) > 1 for place in alike):
        return "", True
    exact = [place for place in differing if any(item.get(place, _NONE)[0] in {_NUMBER, _TEXT} for item in firsts[0])]
    return _difference(firsts, (exact or differing)[0]), bool(exact)


def _differing(readings: Sequence[Sketches]) -> list[str]:
    """Return the places in the items at which readings differ from the first one."""
    places = dict.fromkeys(place for reading in readings for item in reading for place in item)
    pairs = [pair for reading in readings[1:] for pair in zip(readings[0], reading, strict=False)]
    return [
        place for place in places if not all(_alike(one.get(place, _NONE), two.get(place, _NONE)) for one, two in pairs)
    ]


def _alike(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    if one[0] != _FLOAT or other[0] != _FLOAT:
        return one == other
    values, others = np.array(one[1]), np.array(other[1])
    if values.shape != others.shape:
        return False
    sizes = np.abs(np.concatenate([values, others]))
    scale = float(sizes[np.isfinite(sizes)].mean()) if np.isfinite(sizes).any() else 0.0
    return bool(np.allclose(values, others, rtol=0.0, atol=_CLOSE * scale, equal_nan=True))


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
        values = [str(item.get(place, _NONE)[1])[:_LONGEST_SHOWN] for item in readings[rank][:4]]
        shown.append(f"{' | '.join(values)} | on rank {rank}")
    return f"{place or 'the items'}, one after the other: {'; '.join(shown)}"
