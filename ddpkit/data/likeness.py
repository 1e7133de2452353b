"""Do all ranks read the same data? The first items tell, as far as they can.

What is dealt out to the ranks must be the same on all of them: else samples are lost, and others come twice, in
silence. So the ranks compare sketches of the first items. A difference alone proves nothing: noise from an unseeded
generator differs between ranks, and is harmless. So where sketches differ, every rank reads its own data again. What
is the same each time, and differs between ranks, is a rank's own; what differs each time is random.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from enum import Enum
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
_LONGEST_TEXT = 60
_CLOSE = 1e-3  # of the mean size of an array: other processors round in other ways
_NUMBER, _FLOAT, _SHAPE, _TEXT = "number", "float", "shape", "text"

Sketch = dict[str, tuple[str, Any]]
Sketches = list[Sketch]


class Likeness(Enum):
    """What the first items of all ranks say.

    Ranks: local.

    Example:
        >>> Likeness.SAME.name
        'SAME'
    """

    SAME = "all ranks read the same, but for noise"
    OPEN = "some of it differs, which may or may not matter"
    DIFFERENT = "the ranks read different data"


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
    """Return a text itself if it is short, else a digest."""
    if not isinstance(value, bytes):
        text = str(value)
        if len(text) <= _LONGEST_TEXT:
            return text
        value = text.encode(errors="surrogatepass")
    return "digest " + hashlib.blake2b(value, digest_size=8).hexdigest()


# ------------------------------------------------------------------------------------------- what they say


def judge(firsts: Sequence[Sketches], again: Sequence[Sequence[Sketches] | None]) -> tuple[Likeness, str]:
    """Say whether the ranks read the same.

    Args:
        firsts: the first items of each rank.
        again: the first items of each rank on each further reading; None if a rank cannot read again.

    Returns:
        The answer; and the place in the items that differs, empty if they are equal.

    Ranks: local; alike on every rank.

    Example:
        >>> judge([[sketch(1), sketch(3)], [sketch(2), sketch(4)]], [None, None])[0]
        <Likeness.DIFFERENT: 'the ranks read different data'>
    """
    tables = [_Table(one) for one in firsts]
    places = list(dict.fromkeys(place for table in tables for place in table.places))
    differing = [place for place in places if not all(table.is_like(tables[0], place) for table in tables)]
    if len({table.size for table in tables}) > 1:
        return Likeness.DIFFERENT, ""
    if not differing:
        return Likeness.SAME, ""
    known = all(one for one in again)

    def is_steady(place: str) -> bool:
        pairs = zip(tables, again, strict=True)
        return known and all(_Table(each).is_like(table, place) for table, one in pairs for each in one or ())

    # Something else that tells the items apart and is the same on all ranks: they are the same items.
    others = [place for place in places if place not in differing and (is_steady(place) or not known)]
    found = max((tables[0].kinds_of(place) for place in others), default=1)
    has_witness, has_names = found > 1, found > tables[0].size // 2
    steady = [place for place in differing if is_steady(place)]
    numbers = [place for place in steady if tables[0].kind(place) != _TEXT]
    discrete = [place for place in differing if tables[0].kind(place) in {_NUMBER, _TEXT}]
    if numbers or (steady and not has_names):
        return Likeness.DIFFERENT, (numbers or steady)[0]
    if has_witness:
        return (Likeness.OPEN if steady or not known else Likeness.SAME), (steady or differing)[0]
    return (Likeness.DIFFERENT, discrete[0]) if discrete else (Likeness.OPEN, differing[0])


class _Table:
    """A reading by place: what stands there in each item."""

    def __init__(self, reading: Sketches) -> None:
        self.reading, self.size = reading, len(reading)
        self.places = list(dict.fromkeys(place for one in reading for place in one))

    def column(self, place: str) -> list[tuple[str, Any] | None]:
        return [one.get(place) for one in self.reading]

    def kind(self, place: str) -> str:
        return next((leaf[0] for leaf in self.column(place) if leaf is not None), _SHAPE)

    def is_like(self, other: _Table, place: str) -> bool:
        pairs = zip(self.column(place), other.column(place), strict=False)
        return self.size == other.size and all(_alike(one, another) for one, another in pairs)

    def kinds_of(self, place: str) -> int:
        """Return how many different values there are."""
        return len({repr(leaf) for leaf in self.column(place)})


def _alike(one: tuple[str, Any] | None, other: tuple[str, Any] | None) -> bool:
    if one is None or other is None or one[0] != _FLOAT or other[0] != _FLOAT:
        return one == other
    values, others = np.array(one[1]), np.array(other[1])
    if values.shape != others.shape:
        return False
    sizes = np.abs(np.concatenate([values, others]))
    scale = float(sizes[np.isfinite(sizes)].mean()) if np.isfinite(sizes).any() else 0.0
    return bool(np.allclose(values, others, rtol=0.0, atol=_CLOSE * scale, equal_nan=True))


def require_alike(
    first: FirstItems | None,
    read_again: Callable[[], Sequence[Sketches] | None],
    words: str,
    site: str,
    *,
    reads_more: bool = False,
) -> None:
    """Compare the first items of all ranks; if they are not the same, stop on every rank.

    Args:
        first: this rank's first items; None if unknown.
        read_again: reads them again, a few times; returns None if that is impossible. Called only if they differ.
        words: what differs, and what to do, for the message.
        site: names the comparison.
        reads_more: ``read_again`` reads more items, so that its first reading replaces ``first``.

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
    everybody = exchange(first, f"{site}, in detail")
    if len({one.place for one in everybody}) > 1:
        return
    readings = [one.sketches for one in everybody]
    if judge(readings, [None] * len(readings))[0] is Likeness.SAME:  # but for rounding
        return
    again = exchange(read_again(), f"{site}, once more")
    known = [one for one in again if one]
    if reads_more and len(known) == len(again):
        readings, again = [one[0] for one in known], [one[1:] for one in known]
    answer, place = judge(readings, again)
    if answer is Likeness.SAME:
        return
    message = f"{words} ({_difference(readings, place)})"
    if answer is Likeness.DIFFERENT:
        raise RankMismatchError(f"{message}.")
    logger.warning_once("This may be wrong. %s.", message)


def warn_if_alike(first: Sketch | None, words: str, site: str) -> None:
    """Warn if all ranks have read the same, where each was to read something of its own.

    Args:
        first: what this rank has read; None if nothing.
        words: the problem and its remedy.
        site: names the comparison.

    Ranks: collective (over the store).

    Example:
        >>> warn_if_alike(sketch(3), "all of it comes twice", "example")
    """
    found = exchange(hashlib.blake2b(repr(first).encode(), digest_size=16).hexdigest() if first else None, site)
    if len(found) > 1 and None not in found and len(set(found)) == 1:
        logger.warning_once("%s", words)


def _difference(readings: Sequence[Sketches], place: str) -> str:
    """Show what two ranks have at a place."""
    tables = [_Table(one) for one in readings]
    if len({table.size for table in tables}) > 1:
        sizes = ", ".join(f"{table.size} on rank {rank}" for rank, table in enumerate(tables[:MOST_ITEMS]))
        return f"of {MOST_ITEMS} first items there are {sizes}"
    other = next(rank for rank, table in enumerate(tables) if not table.is_like(tables[0], place))
    shown = "; ".join(f"{_in_words(tables[rank].column(place))} on rank {rank}" for rank in (0, other))
    return f"{repr(place) if place else 'the items'} of them, one after the other: {shown}"


def _in_words(column: list[tuple[str, Any] | None]) -> str:
    values = ["nothing" if leaf is None else leaf[1] for leaf in column[:4]]
    shown = [
        ", ".join(f"{number:.4g}" for number in value[:2]) if isinstance(value, list) else str(value)
        for value in values
    ]
    return " | ".join(shown) + (" | ..." if len(column) > len(shown) else "")
