"""Loading a checkpoint: every rank reads its files, or rank 0 reads them and sends the others their bytes."""

from __future__ import annotations

import functools
import io
import mmap
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import torch
import torch.distributed as dist

from ddpkit.base import LoadHook
from ddpkit.checkpointing.hooks import load_state, safe_load, torch_recovery
from ddpkit.checkpointing.index import Checkpoint
from ddpkit.checkpointing.rank_states import all_ranks_come
from ddpkit.distributed import control_group, ddp_prevent_block, exchange, get_world_size, run_on_main
from ddpkit.errors import CheckpointError
from ddpkit.logger import get_logger

logger = get_logger(__name__)

LoadMode = Literal["all", "broadcast"]

WAIT_SECONDS = 30.0
BLOCK_BYTES = 16 << 20


def load_recoverables(
    hooks: Mapping[str, LoadHook], objects: Mapping[str, Any], checkpoint: Checkpoint, mode: LoadMode = "all"
) -> None:
    """Load objects from a checkpoint.

    Args:
        hooks: what loads each, by name.
        objects: by name.
        checkpoint: has a file for each of them.
        mode: ``"all"``: every rank reads. ``"broadcast"``: rank 0 reads what :func:`torch_recovery` loads and sends
            it, for folders that only rank 0 sees; other loaders read by themselves, where a rank has no such file a
            copy of rank 0's. A rank holds the bytes of a file beside its state then.

    Raises:
        CheckpointError: one cannot be loaded. With ``"broadcast"`` it is raised on every rank, whichever failed.

    Ranks: local; with ``"broadcast"`` collective. Ranks that do not come within half a minute are not waited for: then
        every rank reads, and a warning says so. In main-only code the main process reads.

    State: the objects.

    Example:
        >>> load_recoverables({}, {}, Checkpoint(Path("CKPT+a"), {}, {}))
    """
    together = mode == "broadcast" and _all_are_here()
    if together:
        _require_alike(hooks)
    end_of_epoch = bool(checkpoint.meta.get("end-of-epoch", True))
    for name, hook in hooks.items():
        path, obj = checkpoint.paramfiles[name], objects[name]
        if together:
            _load_on_all(name, path, functools.partial(_load_received, hook, obj, path, end_of_epoch))
        else:
            _load_one(name, path, functools.partial(hook, obj, path, end_of_epoch))


def _load_one(name: str, path: Path, load: Callable[[], object]) -> None:
    try:
        load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"cannot load the recoverable {name!r} from {path}: {type(error).__name__}: {error}"
        ) from error


def _load_on_all(name: str, path: Path, load: Callable[[], object]) -> None:
    """Load on every rank; raise on every rank if it failed on one."""
    own: CheckpointError | None = None
    try:
        _load_one(name, path, load)
    except CheckpointError as error:
        own = error
    texts = exchange(own and str(own))
    if own is not None and set(texts) == {str(own)}:
        raise own
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    if failures:
        raise CheckpointError(f"{name!r} could not be loaded on every rank: {'; '.join(failures)}") from own


def _load_received(hook: LoadHook, obj: Any, path: Path, end_of_epoch: bool) -> None:
    """Load from rank 0's bytes, or from the file itself where a loader needs a file and there is one."""
    if hook is torch_recovery:
        load_state(obj, safe_load(path, handle=cast("BinaryIO", _file_of_main(path))), path)
        return
    has_file = path.exists()
    if all(exchange(has_file)):
        hook(obj, path, end_of_epoch)
        return
    content = _file_of_main(path)
    with tempfile.TemporaryDirectory(prefix="ddpkit-") as folder:
        copy = Path(folder) / path.parent.name / path.name
        copy.parent.mkdir()
        copy.write_bytes(content.read())
        hook(obj, path if has_file else copy, end_of_epoch)


def _file_of_main(path: Path) -> mmap.mmap | io.BytesIO:
    """Read a file on rank 0 and give every rank its bytes, as a file in memory."""
    content: mmap.mmap | None = None

    def read() -> int:
        nonlocal content
        size = path.stat().st_size
        with path.open("rb") as file:
            content = mmap.mmap(-1, max(size, 1))
            if file.readinto(content) != size:
                raise OSError(f"not all of its {size} bytes could be read")
        return size

    size = run_on_main(read)
    if not size:
        return io.BytesIO()
    content = content or mmap.mmap(-1, size)
    whole = torch.frombuffer(content, dtype=torch.uint8)
    for start in range(0, size, BLOCK_BYTES):
        dist.broadcast(whole[start : start + BLOCK_BYTES], src=0, group=control_group())
    return content


# ---------------------------------------------------------------------------------------- who takes part


def _all_are_here() -> bool:
    if get_world_size() == 1 or ddp_prevent_block():
        return False
    come = all_ranks_come("load", WAIT_SECONDS)
    if not come:
        logger.warning_once(
            "Not every rank has come to load the checkpoint within %g s: each reads its files by itself. To have one "
            "rank read for all, make the call on every rank.",
            WAIT_SECONDS,
        )
    return come


def _require_alike(hooks: Mapping[str, LoadHook]) -> None:
    """Refuse to send files where the ranks would load different ones."""
    own = [(name, hook is torch_recovery) for name, hook in hooks.items()]
    for rank, other in enumerate(exchange(own)):
        if other != own:
            raise CheckpointError(
                f"the ranks would load different recoverables: {own} here, {other} on rank {rank} (name, and whether "
                "torch_recovery loads it). Add the same ones in the same order on every rank, or load with 'all'."
            )
