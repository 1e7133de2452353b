"""Loads a file of ``torch.save`` without running code from it.

Source: https://pytorch.org/docs/stable/notes/serialization.html#weights-only says what
``torch.load(weights_only=True)`` accepts; that the variable ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD``
changes only calls that leave ``weights_only`` out was read in torch 2.13's ``serialization.py`` and
is tested.
"""

from __future__ import annotations

import contextlib
import mmap
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from ddpkit.checkpointing.record_sizes import check_record_sizes, torch_compares_itself
from ddpkit.checkpointing.shard_files import is_sharded_file, open_state, read_whole
from ddpkit.checkpointing.sparse_indices import refused_tensor_text, sparse_tensors_checked
from ddpkit.checkpointing.storage import BLOCK_BYTES
from ddpkit.errors import CheckpointError

_DAMAGED = frozenset({"UnpicklingError", "EOFError", "KeyError", "BadZipFile"})


def safe_load(
    path: Path,
    map_location: Any = "cpu",
    *,
    mmap: bool = False,
) -> Any:
    """Load a file of ``torch.save`` without running any code from it, whatever the environment
    says.

    Args:
        path: the file.
        map_location: where tensors go, as in ``torch.load``. On the meta device they have no
            content. torch 2.14 cannot load sparse tensors there: the tensors of their file are
            pages of it, on the CPU.
        mmap: the tensors may be pages of the file, which costs no memory and a third of the time:
            for a caller that copies them at once. A file that is not as ``torch.save`` writes it is
            read all the same.

    Returns:
        What the file holds: tensors, numbers, strings, plain containers, and the types that were
        allowed with ``torch.serialization.add_safe_globals``. Where it stands for a state in
        shards, which it names, that state, with whole tensors.

    Raises:
        CheckpointError: the file cannot be read, or holds something else, or a sparse tensor with
            indices outside of its shape; or a shard is missing or damaged. It is not retried with
            unsafe pickling.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.ckpt"
        >>> torch.save({"step": 3}, path)
        >>> safe_load(path)
        {'step': 3}
    """
    value = load_file(path, map_location, mmap=mmap)
    if not is_sharded_file(value):
        return value
    return read_whole(path, value, map_location)


def load_lazily(
    path: Path,
    *,
    mmap: bool = False,
    verifies: bool = True,
) -> Any:
    """Load as :func:`safe_load` does, but leave tensors in their shards: they are
    :class:`~ddpkit.base.states.StoredTensor`.

    Args:
        path: the file.
        mmap: as for :func:`safe_load`.
        verifies: whether what is read of shards is compared with its digest.

    Ranks: local.
    """
    return open_state(path, load_file(path, mmap=mmap), verifies=verifies)


def is_in_shards(path: Path) -> bool:
    """Say whether a file of ``torch.save`` stands for a state in shards; it must be readable.

    Ranks: local.
    """
    return is_sharded_file(load_file(path, "meta"))


def load_file(path: Path, map_location: Any = "cpu", *, mmap: bool = False) -> Any:
    """Load the content of one file as :func:`safe_load` does, whatever it stands for.

    Ranks: local.
    """
    try:
        if not torch_compares_itself():
            check_record_sizes(path)
        try:
            return _load_from(path, map_location, mmap=mmap)
        except RuntimeError:  # torch 2.14 wants to check sparse tensors that have no indices
            if not _is_meta(map_location):
                raise
            return _load_from(path, "cpu", mmap=True)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        if text := refused_tensor_text(error):
            reason = f"{text}: {reason.rstrip('.')}"
        if type(error).__name__ in _DAMAGED:  # torch's words are about torch.load
            reason = "it is damaged, or was not written by torch.save"
            with contextlib.suppress(Exception):  # of a damaged file
                if names := torch.serialization.get_unsafe_globals_in_checkpoint(path):
                    reason = (
                        f"it names {', '.join(sorted(names))}, and loading those would run code. "
                        "If you trust the file, allow them with "
                        "torch.serialization.add_safe_globals"
                    )
        raise CheckpointError(f"cannot load {path}: {reason}.") from error


def _load_from(path: Path, map_location: Any, *, mmap: bool) -> Any:
    mapped = mmap and _can_be_mapped(path)
    with sparse_tensors_checked(enable=not _is_meta(map_location)), warnings.catch_warnings():
        # torch 2.14 says at each load that it checks them, as it should.
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)


def _is_meta(map_location: Any) -> bool:
    return str(map_location) == "meta"


def _can_be_mapped(path: Path) -> bool:
    """Say whether a file is as ``torch.save`` writes it, and its file system can map it.

    It is read into the page cache, where a disk that fails raises; a page of a mapping would end
    the process.
    """
    if torch.serialization.get_default_mmap_options() != mmap.MAP_PRIVATE:
        return False  # torch would write into the file, to swap the bytes of another machine's
    block = bytearray(BLOCK_BYTES)
    with Path(path).open("rb", buffering=0) as file:
        while file.readinto(block):
            pass
        with (
            contextlib.suppress(OSError, UnicodeError, zipfile.BadZipFile),
            zipfile.ZipFile(path) as archive,
        ):
            str(path).encode()  # torch maps no file of another name
            mmap.mmap(
                file.fileno(),
                1,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ,
            ).close()
            return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    return False
