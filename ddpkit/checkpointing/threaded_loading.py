"""Copies large tensors of a file with several threads."""

from __future__ import annotations

import contextlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ddpkit.checkpointing.file_loading import load_file
from ddpkit.checkpointing.storage import FILE_THREADS
from ddpkit.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

LEAST_MEAN_BYTES = 1 << 20  # of a storage, for threads to copy it sooner than torch reads it
_VALUES = (
    str,
    bool,
    int,
    float,
    complex,
    type(None),
    torch.dtype,
)


def load_to_keep(path: Path) -> Any:
    """Load as :func:`~ddpkit.checkpointing.file_loading.load_file` does; plain tensors, if they are
    large, by mapping the file and copying in threads.

    Ranks: local.
    """
    sizes: list[int] = []
    # of a damaged file load_file tells
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:
        sizes = sorted(
            entry.compress_size
            for entry in archive.infolist()
            if "/data/" in entry.filename and entry.file_size
        )
    state = None
    if sum(sizes) > len(sizes) * LEAST_MEAN_BYTES:
        # no thread, no memory, or a damaged file
        with contextlib.suppress(CheckpointError, RuntimeError):
            state = _load_in_threads(path, sizes)
    return load_file(path) if state is None else state


def _load_in_threads(path: Path, sizes: list[int]) -> Any:
    """Return the state with memory of its own, shared as before; None unless its storages are
    plain, of these sizes.
    """
    state = load_file(path, mmap=True)
    tensors = _plain_tensors(state) or []
    storages = [tensor.untyped_storage() for tensor in tensors]
    places = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
    different = dict(zip(places, storages, strict=True))
    # a mapping does not look whether they fit the file
    if sorted(size for _, size in different if size) != sizes:
        return None
    with ThreadPoolExecutor(FILE_THREADS) as pool:
        own = dict(
            zip(
                different,
                pool.map(_copy, different.values()),
                strict=True,
            )
        )
    for tensor, place in zip(tensors, places, strict=True):
        tensor.set_(
            own[place],
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
    return state


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    old = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    own = torch.empty(
        old.shape,
        dtype=torch.uint8,
        device="cpu",
    )
    np.copyto(own.numpy(), old.numpy())  # lets other threads run, and starts none
    return own.untyped_storage()


def _plain_tensors(state: object) -> list[torch.Tensor] | None:
    """Return the tensors of a state, or None if something in it may share the memory of a tensor
    unseen.
    """
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    todo: list[Any] = [state]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is dict:
            todo += [*value.keys(), *value.values()]
        elif type(value) in (list, tuple):
            todo += value
        elif type(value) is torch.Tensor and _is_plain(value):
            found.append(value)
        elif type(value) not in _VALUES:
            return None
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    special = tensor.is_nested or tensor.is_quantized or tensor.requires_grad or vars(tensor)
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not special
