"""Streams: the shuffles in those of Hugging Face's ``datasets``, and the loader's worker that a
stream sees.

Reason: neither has a public way. ``state_dict`` leaves out the items in a shuffle buffer, so a
resumed stream loses them; a shuffle without a seed differs in every process, so ranks that divide
the stream lose samples; and a stream that was split by node does not tell. A stream that every
worker reads whole must not shard itself by worker as well: where torch keeps its worker elsewhere,
an error says to read in the main process, which is the public way.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from torch.utils.data import _utils, get_worker_info

_MODULE = "datasets.iterable_dataset"
_BUFFER = "BufferShuffledExamplesIterable"


def loses_items(data: Any) -> bool:
    """Return whether a stream, or a loader's stream, has a shuffle buffer; True if that cannot be
    determined.

    Args:
        data: a stream of ``datasets``, or a loader of one; False for any other.

    Source: ``datasets.IterableDataset.state_dict`` of datasets 5.2: "examples from shuffle buffers
    are lost".

    Example:
        >>> loses_items([1, 2])
        False
    """
    for stream in _streams(data):
        stages = _stages(stream)
        if not stages or any(type(stage).__name__ == _BUFFER for stage in stages):
            return True
    return False


def shuffle_digest(data: Any) -> str:
    """Return a digest of the shuffling in a stream, or in a loader's stream; empty without any.

    Args:
        data: as for :func:`loses_items`.

    Returns:
        A digest of all generators inside; empty where there is none.

    Example:
        >>> shuffle_digest([1, 2])
        ''
    """
    inside = [
        getattr(stage, "generator", None) for stream in _streams(data) for stage in _stages(stream)
    ]
    states = [
        generator.bit_generator.state
        for generator in inside
        if isinstance(generator, np.random.Generator)
    ]
    return hashlib.blake2b(repr(states).encode(), digest_size=4).hexdigest() if states else ""


def is_split_by_node(data: Any) -> bool:
    """Return whether a stream of ``datasets`` was split with ``split_dataset_by_node``; False if
    that is not told.

    Args:
        data: of that package.

    Example:
        >>> is_split_by_node([1, 2])
        False
    """
    return getattr(data, "_distributed", None) is not None


def _streams(data: Any) -> list[Any]:
    """Return the streams of ``datasets`` among an object and its dataset."""
    both = (data, getattr(data, "dataset", None))
    return [
        stream
        for stream in both
        if any(kind.__module__ == _MODULE for kind in type(stream).__mro__)
    ]


def _stages(stream: Any) -> list[Any]:
    """Return what a stream is made of, from its end to its sources; empty where that is kept
    elsewhere.
    """
    found = []
    waiting = [getattr(stream, "_ex_iterable", None)]
    while waiting:
        stage = waiting.pop()
        if stage is not None:
            found.append(stage)
            waiting += [
                getattr(stage, "ex_iterable", None),
                *(getattr(stage, "ex_iterables", None) or ()),
            ]
    return found


def show_worker(info: Any) -> None:
    """Have ``get_worker_info()`` return something else.

    Args:
        info: its return value from now on; None as in the main process.

    Raises:
        RuntimeError: this version of torch keeps it elsewhere.
    """
    _utils.worker._worker_info = info  # noqa: SLF001
    if get_worker_info() is not info:
        raise RuntimeError(
            "a stream cannot be dealt out to loader workers with this version of torch: it would "
            "see its worker, and divide itself once more. Set num_workers=0."
        )
