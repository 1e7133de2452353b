"""Refuses objects that look like a dataset and are none, before the first batch, and says what to
give instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset

from ddpkit.base import kind_of
from ddpkit.errors import DataError

SHOWN_KEYS = 5
READ_ONCE = (
    "which can be read once only: give a list, a dataset, or an IterableDataset whose __iter__ "
    "starts anew in each epoch."
)


def require_dataset(
    data: Any,
    *,
    is_read_again: bool,
    has_own_indices: bool = False,
) -> None:
    """Refuse what cannot be a dataset, a stream or an iterable of batches.

    Args:
        data: as it was given to ``fit``, ``evaluate`` or ``predict``.
        is_read_again: whether it is needed more than once, or by its indices.
        has_own_indices: whether a sampler of the recipe gives the indices, or keys.

    Raises:
        DataError: it is a path, a class, a mapping by names, a list of loaders, a generator, or the
            like.

    Ranks: local; alike on every rank.

    Example:
        >>> require_dataset("train.csv", is_read_again=True)
        Traceback (most recent call last):
        ddpkit.errors.DataError: the data is the str 'train.csv', and no file is read here: ...
    """
    if isinstance(data, (Dataset, DataLoader)) or (isinstance(data, Mapping) and has_own_indices):
        return
    problem = _problem(data, is_read_again=is_read_again)
    if problem is not None:
        raise DataError(f"the data is {problem}")


def _problem(data: Any, *, is_read_again: bool) -> str | None:
    kind = type(data).__name__
    if isinstance(data, (str, bytes, os.PathLike)):
        return (
            f"the {kind} {data!r:.80}, and no file is read here: read it, and give a dataset of "
            "its samples."
        )
    if isinstance(data, type):
        return f"the class {data.__name__}: give an instance of it, {data.__name__}(...)."
    if isinstance(data, Mapping):
        return _mapping_problem(data)
    if isinstance(data, (set, frozenset)):
        return f"{kind_of(data)}, which has no order: give a list."
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        return (
            f"{kind_of(data)}, whose indices are columns: give its rows, as "
            f"{kind}.to_dict('records')."
        )
    if isinstance(data, (list, tuple)):
        return _list_problem(data)
    # A class of one's own may start anew in __iter__; an iterator of Python cannot.
    is_iterator = isinstance(data, Iterator) and type(data).__module__ in {"builtins", "itertools"}
    return f"{kind_of(data)}, {READ_ONCE}" if is_iterator and is_read_again else None


def _mapping_problem(data: Mapping[Any, Any]) -> str | None:
    last = len(data) - 1
    if not data or (0 in data and last in data):  # the indices are its keys
        return None
    kind = kind_of(data)
    keys = [repr(key) for key in data]
    shown = ", ".join(keys[:SHOWN_KEYS]) + (", ..." if len(keys) > SHOWN_KEYS else "")
    first = next(iter(data.values()))
    if isinstance(first, (DataLoader, Dataset)):
        return f"{kind} of {_kinds(first)} with the keys {shown}: {_one_of_several(first)}"
    return (
        f"{kind} with the keys {shown}, and the loop asks for samples 0, 1, 2 and so on: give one "
        "of its values, or a list with a dict for each sample."
    )


def _list_problem(data: list[Any] | tuple[Any, ...]) -> str | None:
    first = data[0] if data else None
    if not isinstance(first, (DataLoader, Dataset)):
        return None
    return f"{kind_of(data)} of {len(data)} {_kinds(first)}: {_one_of_several(first)}"


def _kinds(first: DataLoader[Any] | Dataset[Any]) -> str:
    return "loaders" if isinstance(first, DataLoader) else "datasets"


def _one_of_several(first: DataLoader[Any] | Dataset[Any]) -> str:
    if isinstance(first, DataLoader):
        return (
            "give one loader. To train on several datasets at once, give "
            "ddpkit.dataloader.MixedSets or JointSets of them; to validate or test on several, "
            "give them by name: {'a': ..., 'b': ...}."
        )
    return (
        "give one dataset, such as ddpkit.dataloader.MixedSets({'a': ..., 'b': ...}), whose "
        "samples are of one or the other, or JointSets, whose batches have samples of all. To "
        "validate or test on several, give them by name: {'a': ..., 'b': ...}."
    )
