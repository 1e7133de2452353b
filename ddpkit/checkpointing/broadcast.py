"""Loading on every rank: each reads the files of a checkpoint, or rank 0 sends the others
copies.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from ddpkit.base import LoadHook
from ddpkit.checkpointing.arrival import all_ranks_come
from ddpkit.checkpointing.checkpoint import Checkpoint, ends_epoch
from ddpkit.checkpointing.file_loading import load_file
from ddpkit.checkpointing.main_work import checkpoint_work_on_main
from ddpkit.checkpointing.shard_files import has_shards, shards_of
from ddpkit.checkpointing.unchecked_load import finish
from ddpkit.comm import failures_of
from ddpkit.distributed import control_group, exchange, if_main_process
from ddpkit.errors import CheckpointError

LOAD_WAIT_SECONDS = 30.0  # for the other ranks, to load on all of them
SENT_BYTES = 16 << 20  # at a time

LoadMode = Literal["all", "broadcast"]


def load_recoverables(
    hooks: Mapping[str, LoadHook],
    objects: Mapping[str, Any],
    checkpoint: Checkpoint,
    mode: LoadMode = "all",
) -> None:
    """Load objects from a checkpoint.

    Args:
        hooks: what loads each, by name.
        objects: by name.
        checkpoint: has a file for each of them.
        mode: ``"all"``: every rank reads. ``"broadcast"``: rank 0 reads, and the others load copies
            of its files from a temporary folder, one at a time: for folders that only rank 0 sees.

    Raises:
        CheckpointError: an object cannot be loaded. With ``"broadcast"`` every rank raises it, even
            if a single rank failed.

    Ranks: local, but where base weights that are divided over the ranks are compared; with
        ``"broadcast"`` collective. Ranks that do not come within half a minute are not waited for:
        then every rank reads. In main-only code the main process reads.

    State: the objects.
    """
    together = mode == "broadcast" and all_ranks_come("load", LOAD_WAIT_SECONDS)
    if together:
        _require_alike(list(hooks))
    end_of_epoch = ends_epoch(checkpoint.meta)
    for name, hook in hooks.items():
        path = checkpoint.paramfiles[name]
        if together:
            loaded = _load_on_all(
                name,
                path,
                functools.partial(_load_copy, hook, objects[name], path, end_of_epoch),
            )
        else:
            loaded = _load_one(
                name,
                path,
                functools.partial(hook, objects[name], path, end_of_epoch),
            )
        finish(loaded)


def _load_one(name: str, path: Path, load: Callable[[], object]) -> object:
    try:
        return load()
    except (CheckpointError, MemoryError):
        # without memory for what is sent a rank must end: the others wait for it
        raise
    except Exception as error:
        raise CheckpointError(
            f"cannot load the recoverable {name!r} from {path}: {type(error).__name__}: {error}"
        ) from error


def _load_on_all(name: str, path: Path, load: Callable[[], object]) -> object:
    """Load on every rank; raise on every rank if it failed on one."""
    loaded: list[object] = []
    own, failures = failures_of(lambda: loaded.append(_load_one(name, path, load)), CheckpointError)
    if failures:
        raise CheckpointError(
            f"{name!r} could not be loaded on every rank: {failures}. The other ranks have a copy "
            "of this one file, in TMPDIR: what saves a directory, or reads other files too, needs "
            "ckpt_load=all."
        ) from own
    return loaded[0]


def _load_copy(
    hook: LoadHook,
    obj: Any,
    path: Path,
    end_of_epoch: bool,
) -> object:
    """Load rank 0's file: there the file itself, on other ranks a copy of it, and of its shards."""
    content = _bytes_of_main(path)
    shards = checkpoint_work_on_main(_shards, path) or []
    with _place_of_copy(path) as place:
        # One line for all ranks: the line is part of the calls' keys.
        failures = [_copy_shard(shard, size, place) for shard, size in shards]
        for failure in filter(None, failures):
            raise failure
        if place != path:
            place.write_bytes(content.numpy().data)
        del content
        return hook(obj, place, end_of_epoch)


@contextlib.contextmanager
def _place_of_copy(path: Path) -> Iterator[Path]:
    """Yield where this rank has the file: the main process where it is, others in a temporary
    folder.
    """
    if if_main_process():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ddpkit-") as folder:
        copy = Path(folder, path.parent.name, path.name)
        copy.parent.mkdir()
        yield copy


def _shards(path: Path) -> list[tuple[Path, int]]:
    """Return the shards of a file and their sizes; none, if it is no file of torch that can be
    read: loading it says why.
    """
    if not has_shards(path):
        return []
    try:
        found = shards_of(path, load_file(path, "meta"))
    except CheckpointError:
        return []
    return [(shard, shard.stat().st_size) for shard in found]


def _copy_shard(shard: Path, size: int, place: Path) -> OSError | None:
    """Write rank 0's shard beside the copy of its file, block by block. An error is returned: the
    other ranks go on to exchange blocks.
    """
    copy = place.with_name(shard.name)
    failed = None
    for start in range(0, size, SENT_BYTES):
        block = _bytes_of_main(shard, start, min(SENT_BYTES, size - start))
        if copy == shard or failed is not None:
            continue
        try:
            with copy.open("ab") as file:
                file.write(block.numpy().data)
        except OSError as error:
            failed = error
    return failed


def _bytes_of_main(path: Path, place: int = 0, count: int = -1) -> torch.Tensor:
    """Read a file, or some bytes of it, on rank 0 and give every rank its bytes."""
    read: list[torch.Tensor] = []

    def read_file() -> int:
        read.append(torch.from_numpy(np.fromfile(path, np.uint8, count, offset=place)))
        return read[0].numel()

    size = checkpoint_work_on_main(read_file)
    # MemoryError, and not torch's
    content = read[0] if read else torch.from_numpy(np.empty(size or 0, np.uint8))
    for start in range(0, len(content), SENT_BYTES):
        dist.broadcast(
            content[start : start + SENT_BYTES],
            src=0,
            group=control_group(),
        )
    return content


def _require_alike(own: list[str]) -> None:
    """Refuse to send files where the ranks would load different ones."""
    for rank, other in enumerate(exchange(own)):
        if other != own:
            raise CheckpointError(
                f"the ranks would load different recoverables: {own} here, {other} on rank "
                f"{rank}. Add the same ones in the same order on every rank, or load with 'all'."
            )
