"""Which samples a dataset selects, in a digest: the ranks compare it, and no sample is loaded for
that.

A split that nobody has seeded is another one on each rank. Its first sample may be the same on all
ranks, as with ``KFold(shuffle=True)``, whose indices are sorted. So the whole selection is
compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sized
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ddpkit.comm import SELECTED

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_DIGESTED = 5_000_000  # of a longer selection so many are looked at, spread over it
_MOST_DEPTH = 6
_HOLDERS = ("dataset", "data_source")  # names under which a dataset holds another one of any class
#: Names under which datasets and samplers keep what they select: torch's, SpeechBrain's, and usual
#: ones of recipes.
NAMES = (
    "indices",
    "data_ids",
    "indexes",
    "index",
    "idx",
    "idxs",
    "ids",
    "order",
    "perm",
    "permutation",
)


def selection_facts(name: str, source: Any) -> dict[str, str]:
    """Describe what a dataset or a sampler selects, and what is selected in the datasets inside of
    it.

    Args:
        name: such as ``"train"``.
        source: a dataset or a sampler.

    Returns:
        One entry per selection, in words: how many are selected, and a digest of them all.

    Example:
        >>> from torch.utils.data import Subset
        >>> selection_facts("train", Subset(range(9), [0, 3, 8]))
        {'samples that train selects (Subset.indices)': '3 of digest 3a34fac0d45d'}
    """
    facts: dict[str, str] = {}
    for path, part in _parts(source, type(source).__name__, set()):
        for attribute in NAMES:
            selected: Any = getattr(part, "__dict__", {}).get(attribute)
            digest = _digest(selected) if _has_length(selected, part) else None
            if digest is not None:
                facts[f"{SELECTED}{name} selects ({path}.{attribute})"] = (
                    f"{len(selected)} of digest {digest}"
                )
    return facts


def _parts(
    source: Any,
    path: str,
    seen: set[int],
) -> Iterator[tuple[str, Any]]:
    """Yield a dataset or sampler, and the datasets that it holds, each once."""
    seen.add(id(source))
    yield path, source
    if path.count(".") >= _MOST_DEPTH:
        return
    for attribute, value in getattr(source, "__dict__", {}).items():
        inner = value if isinstance(value, (list, tuple)) else [value]
        for number, item in enumerate(inner):
            if not _is_dataset(item, attribute):
                break
            inner_path = attribute if inner is not value else f"{attribute}[{number}]"
            if id(item) not in seen:
                yield from _parts(item, f"{path}.{inner_path}", seen)


def _is_dataset(value: Any, attribute: str) -> bool:
    return isinstance(value, Dataset) or (attribute in _HOLDERS and hasattr(value, "__getitem__"))


def _has_length(selected: Any, part: Any) -> bool:
    """Return whether there is one entry for each sample: else it is something else of that name."""
    if not isinstance(selected, (list, tuple, range, np.ndarray, torch.Tensor)) or not isinstance(
        part,
        Sized,
    ):
        return False
    try:
        return len(selected) == len(part) > 0
    except (
        TypeError,
        NotImplementedError,
    ):  # of shape (), or a dataset that only seems to have a length
        return False


def _digest(selected: Any) -> str | None:
    """Return a digest of whole numbers or of names; None for anything else."""
    step = -(-len(selected) // MOST_DIGESTED)
    if isinstance(selected, range):
        return _of_bytes(repr(selected).encode())
    looked_at = selected[::step]
    if isinstance(looked_at, torch.Tensor):
        looked_at = looked_at.detach().cpu().numpy()
    if isinstance(looked_at, (list, tuple)) and all(isinstance(name, str) for name in looked_at):
        names = [path.rpartition("/")[2] for path in looked_at]  # folders may differ
        return _of_bytes("\n".join(names).encode())
    try:
        numbers = np.asarray(looked_at)
    except ValueError:  # lists of different lengths
        return None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        return None
    return _of_bytes(numbers.astype(np.int64).tobytes())


def _of_bytes(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()
