"""Loading a checkpoint: every rank reads its files, or one rank reads them and sends what it reads to the others.

In the second case all ranks run the very same ``torch.load``, without running code from the file, but on a
:class:`RelayedFile`: what rank 0 reads of the file reaches the others piece by piece, a tensor straight into its own
memory. So no rank holds more than the state of one file and a small piece.
"""

from __future__ import annotations

import contextlib
import functools
import io
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from ddpkit.checkpoint_hooks import LoadHook, load_state, safe_load, torch_recovery
from ddpkit.checkpoint_records import Checkpoint
from ddpkit.distributed import (
    control_group,
    ddp_prevent_block,
    exchange,
    get_world_size,
    if_main_process,
    run_on_main,
)
from ddpkit.errors import CheckpointError
from ddpkit.logger import get_logger
from ddpkit.process_group import group_state

__all__ = ["LoadMode", "RelayedFile", "load_recoverables"]

logger = get_logger(__name__)

LoadMode = Literal["all", "broadcast"]

WAIT_SECONDS = 30.0
BLOCK_BYTES = 64 << 10  # what small reads are served from
PIECE_BYTES = 64 << 20

_DATA, _END, _FAILED = 0, 1, 2

T = TypeVar("T")


def load_recoverables(
    hooks: Mapping[str, LoadHook], objects: Mapping[str, Any], checkpoint: Checkpoint, mode: LoadMode = "all"
) -> None:
    """Load objects from a checkpoint.

    Args:
        hooks: what loads each, by name.
        objects: by name.
        checkpoint: has a file for each of them.
        mode: ``"all"``: every rank reads. ``"broadcast"``: rank 0 reads what :func:`torch_recovery` loads and sends
            it; other loaders read by themselves.

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
        if together and hook is torch_recovery:
            hook = _recover_relayed  # noqa: PLW2901 -- the same, from another file object
        load = functools.partial(hook, obj, path, end_of_epoch)
        (_load_on_all if together else _load_one)(name, path, load)


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


def _recover_relayed(obj: Any, path: Path, _end_of_epoch: bool) -> None:
    with contextlib.closing(RelayedFile(path)) as file:
        try:
            state = safe_load(path, handle=cast("BinaryIO", file))
        except CheckpointError as error:
            if file.failure is None:
                raise
            raise CheckpointError(f"cannot load {path}: {file.failure}.") from error  # torch may have hidden it
    load_state(obj, state, path)


# ---------------------------------------------------------------------------------------- who takes part


def _all_are_here() -> bool:
    """Find out whether every rank is about to load. The main process may be alone; then nobody waits for ever."""
    if ddp_prevent_block() or get_world_size() == 1:
        return False
    key = f"ddpkit/load/{run_on_main(lambda: uuid.uuid4().hex)}"
    store = group_state().store
    if not if_main_process():
        store.add(key, 1)
    return bool(run_on_main(_await_others, [store, key]))


def _await_others(store: dist.Store, key: str) -> bool:
    end = time.monotonic() + WAIT_SECONDS
    while store.add(key, 0) < get_world_size() - 1:
        if time.monotonic() > end:
            logger.warning(
                "Not every rank has come to load the checkpoint within %g s: each reads its files by itself. To have "
                "one rank read for all, make the call on every rank.",
                WAIT_SECONDS,
            )
            return False
        time.sleep(0.001)
    store.delete_key(key)
    return True


def _require_alike(hooks: Mapping[str, LoadHook]) -> None:
    """Refuse to relay files where the ranks would load different ones."""
    own = [(name, hook is torch_recovery) for name, hook in hooks.items()]
    for rank, other in enumerate(exchange(own)):
        if other != own:
            raise CheckpointError(
                f"the ranks would load different recoverables: {own} here, {other} on rank {rank} (name, and whether "
                "torch_recovery loads it). Add the same ones in the same order on every rank, or load with 'all'."
            )


# ---------------------------------------------------------------------------------------- the file


class RelayedFile(io.RawIOBase):
    """A file for reading on every rank, which rank 0 alone opens: what it reads there is sent to the others.

    All ranks must read the same parts in the same order. One that reads less still receives the rest, in
    :meth:`close`; one that reads other parts, or more, gets an ``OSError``. So no rank is left waiting.

    Args:
        path: the file.

    Attributes:
        failure: what the first reading that failed raised.

    Raises:
        OSError: rank 0 cannot open it.

    Ranks: collective, :meth:`close` included.

    Example:
        >>> RelayedFile.__name__
        'RelayedFile'
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._group = control_group()
        self._is_source = if_main_process()
        self._ended = False
        self._position = self._block_start = 0
        self._block = b""
        self._file: BinaryIO | None = None
        self.failure: Exception | None = None
        failure: OSError | None = None
        size = 0
        if self._is_source:
            try:
                self._file = path.open("rb")
                size = self._file.seek(0, io.SEEK_END)
            except OSError as error:
                failure = error
        _, self._size, kind = self._tell_or_hear(0, size, _DATA if failure is None else _FAILED)
        if kind != _DATA:
            self._ended = True
            raise failure or OSError(f"{path} could not be opened on rank 0")

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that the position can be changed."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Change the position."""
        self._position = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, less only at the end of the file."""
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self._size - self._position))
        done = 0
        try:
            while done < length:
                done += self._some(view[done:length])
        except Exception as error:
            self.failure = self.failure or error
            raise
        return length

    def close(self) -> None:
        """Tell the others that this was all; on the others, receive what was not asked for."""
        if not self.closed and not self._ended:
            self._ended = True
            if self._is_source:
                self._tell_or_hear(0, 0, _END)
            else:
                self._drain()
        if self._file is not None:
            self._file.close()
        super().close()

    def _some(self, view: memoryview) -> int:
        """Read the next bytes: from the block at hand, or a large piece straight into its place."""
        offset = self._position - self._block_start
        if not 0 <= offset < len(self._block):
            if len(view) >= BLOCK_BYTES:
                length = min(len(view), PIECE_BYTES)
                self._transfer(self._position, view[:length])
                self._position += length
                return length
            block = bytearray(min(BLOCK_BYTES, self._size - self._position))
            self._transfer(self._position, memoryview(block))
            self._block, self._block_start, offset = bytes(block), self._position, 0
        length = min(len(view), len(self._block) - offset)
        view[:length] = self._block[offset : offset + length]
        self._position += length
        return length

    def _transfer(self, start: int, view: memoryview) -> None:
        """Read a part on rank 0 and send it; on the others, receive it."""
        failure: OSError | None = None
        if self._file is not None:
            try:
                self._file.seek(start)
                if cast("io.BufferedReader", self._file).readinto(view) != len(view):
                    failure = OSError("the file is shorter than it was when it was opened")
            except OSError as error:
                failure = error
        told = self._tell_or_hear(start, len(view), _DATA if failure is None else _FAILED)
        if told[2] != _DATA:
            self._ended = True
            raise failure or OSError("rank 0 stopped reading the file before this rank did")
        if told != (start, len(view), _DATA):
            self._receive(torch.empty(told[1], dtype=torch.uint8))
            raise OSError(f"rank 0 read {told[1]} bytes at {told[0]}, this rank wanted {len(view)} bytes at {start}")
        self._receive(torch.frombuffer(view, dtype=torch.uint8))

    def _drain(self) -> None:
        while True:
            _, length, kind = self._tell_or_hear(0, 0, _END)
            if kind != _DATA:
                return
            self._receive(torch.empty(length, dtype=torch.uint8))

    def _tell_or_hear(self, start: int, length: int, kind: int) -> tuple[int, int, int]:
        header = torch.tensor([start, length, kind])
        self._receive(header)
        start, length, kind = header.tolist()
        return start, length, kind

    def _receive(self, tensor: torch.Tensor) -> None:
        """Fill a tensor with that of rank 0."""
        try:
            dist.broadcast(tensor, src=0, group=self._group)
        except RuntimeError as error:  # a rank is gone
            self._ended = True
            raise OSError(f"the file could not be sent or received: {error}") from error
