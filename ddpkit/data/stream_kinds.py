"""Streams that divide themselves over processes, by what made them."""

from __future__ import annotations

from typing import Any

from ddpkit.compat import is_split_by_node


def is_sharded(data: Any) -> bool:
    """Say whether a stream or a loader divides itself over ranks and workers.

    Args:
        data: a dataset or a loader.

    Returns:
        True if it says ``is_sharded = True``, is a pipeline of ``webdataset``, or was split with
        ``datasets.distributed.split_dataset_by_node``.

    Example:
        >>> is_sharded([1, 2])
        False
    """
    if getattr(data, "is_sharded", False) is True or is_webdataset(data):
        return True
    return _comes_from(data, "datasets") and is_split_by_node(data)


def is_webdataset(data: Any) -> bool:
    """Say whether a stream is a pipeline of ``webdataset``."""
    return _comes_from(data, "webdataset")


def _comes_from(data: Any, package: str) -> bool:
    return any(base.__module__.partition(".")[0] == package for base in type(data).__mro__)
