"""Loading a checkpoint: every rank reads its files, or one rank reads them and sends what it reads to the others.

In the second case all ranks run the very same ``torch.load``, without running code from the file, but on a
:class:`RelayedFile`: what rank 0 reads of the file reaches the others block by block. While a rank takes one block
apart, the next one is on its way. So no rank holds more than the state of one file and three blocks, each a 32nd of
the file and at most 8 MiB.
"""

from __future__ import annotations

import contextlib
import functools
import io
import time
import uuid
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar, cast

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
LEAST_BLOCK_BYTES = 64 << 10
MOST_BLOCK_BYTES = 8 << 20
BLOCKS_PER_FILE = 32
NUM_BLOCKS = 3  # the one that is read from, the one that comes next, and one that may still be on its way

# What a message is: a part that was asked for, one that will probably be, one to be dropped, the end, a failure.
_ASKED, _AHEAD, _DROP, _END, _FAILED = range(5)

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


class _Message(NamedTuple):
    """What rank 0 sends, with its data if it has any."""

    start: int
    length: int
    kind: int
    promised: int  # bytes of the message that is sure to follow, with what comes next in the file; or 0
    data: torch.Tensor

    def has(self, position: int) -> bool:
        """Say whether a byte of the file can be read from it."""
        return self.kind in {_ASKED, _AHEAD} and self.start <= position < self.start + self.length


def _message(header: torch.Tensor, data: torch.Tensor) -> _Message:
    start, length, kind, promised = header.tolist()
    return _Message(start, length, kind, promised, data)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(cast("Any", tensor.numpy()))


def _block_bytes(file: BinaryIO, size: int) -> int:
    """Return how much of a file is sent at once: all blocks together take no more memory than its largest tensor."""
    wanted = size // BLOCKS_PER_FILE
    try:
        with zipfile.ZipFile(file) as archive:
            largest = max((record.file_size for record in archive.infolist()), default=0)
        wanted = largest // NUM_BLOCKS
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError):
        pass  # no file of torch.save: whoever reads it will say so, if it has to be one
    return max(LEAST_BLOCK_BYTES, min(wanted, MOST_BLOCK_BYTES))


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
        self._position = self._end = 0
        self._block: _Message | None = None
        self._file: BinaryIO | None = None
        self.failure: Exception | None = None
        failure: OSError | None = None
        size = block_bytes = 0
        if self._is_source:
            try:
                self._file = path.open("rb", buffering=0)
                size = self._file.seek(0, io.SEEK_END)
                block_bytes = _block_bytes(self._file, size)
            except OSError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 -- whatever is in a file: the others wait to be told
                failure = OSError(f"{path} cannot be looked into: {type(error).__name__}: {error}")
        start = torch.tensor([size, failure is None, block_bytes])
        self._wait(self._begin(start))
        self._size, self._block_bytes, could_open = int(start[0]), int(start[2]), bool(start[1])
        if not could_open:
            self._ended = True
            raise failure or OSError(f"{path} could not be opened on rank 0")
        self._turn = 0
        self._buffers: list[torch.Tensor] = []
        self._works: list[list[Any]] = [[] for _ in range(NUM_BLOCKS)]  # that still need a buffer
        self._next: _Message | None = None  # on rank 0, what was sent ahead
        self._owed = 0  # on rank 0, bytes of the message that was promised
        self._coming: tuple[torch.Tensor, torch.Tensor, int] | None = None  # on the others, the one that was promised

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
                self._keep_promise()
                self._send(_END, 0, 0)
                for works in self._works:
                    self._wait(works)
            else:
                while self._hear().kind not in {_END, _FAILED}:
                    pass
        if self._file is not None:
            self._file.close()
        super().close()

    def _some(self, view: memoryview) -> int:
        """Read the next bytes from the block that has them."""
        block = self._block
        if block is None or not block.has(self._position):
            self._block = None  # its buffer is used again
            block = self._block = self._block_from_file() if self._is_source else self._block_from_source()
        offset = self._position - block.start
        length = min(len(view), block.length - offset)
        view[:length] = _bytes_of(block.data)[offset : offset + length]
        self._position += length
        return length

    # ------------------------------------------------------------------------------------ on rank 0

    def _block_from_file(self) -> _Message:
        block = self._next
        if block is None or not block.has(self._position):
            self._keep_promise()
            block = self._send(_ASKED, self._position, min(self._block_bytes, self._size - self._position))
        self._next = None
        if self._owed:
            self._next = self._send(_AHEAD, block.start + block.length, self._owed)
        return block

    def _keep_promise(self) -> None:
        """Send what was promised, and is not needed after all."""
        if self._owed:
            self._send(_DROP, 0, self._owed)
        self._next = None

    def _send(self, kind: int, start: int, length: int) -> _Message:
        """Begin to send a part of the file. Where it cannot be read, that is told, and raised if it was asked for."""
        buffer, works = self._buffer()
        failure = self._read(start, buffer[:length]) if kind in {_ASKED, _AHEAD} else None
        if failure is not None:
            kind = _FAILED if kind == _ASKED else _DROP
        self._owed = 0
        if kind == _AHEAD or (kind == _ASKED and start == self._end):
            self._owed = min(self._block_bytes, self._size - start - length)
        self._end = start + length
        works += self._begin(torch.tensor([start, length, kind, self._owed]))
        if kind in {_ASKED, _AHEAD, _DROP} and length:
            works += self._begin(buffer[:length])
        if kind == _FAILED:
            self._ended = True
            self._wait(works)
            raise cast("OSError", failure)
        return _Message(start, length, kind, self._owed, buffer)

    def _read(self, start: int, buffer: torch.Tensor) -> OSError | None:
        file, view = cast("io.FileIO", self._file), _bytes_of(buffer)
        try:
            file.seek(start)
            while view:
                length = file.readinto(view)
                if not length:
                    return OSError("the file is shorter than it was when it was opened")
                view = view[length:]
        except OSError as error:
            return error
        return None

    # ------------------------------------------------------------------------------------ on the others

    def _block_from_source(self) -> _Message:
        while True:
            message = self._hear()
            if message.has(self._position):
                return message
            if message.kind in {_END, _FAILED}:
                self._ended = True
                raise OSError("rank 0 stopped reading the file before this rank did")
            if message.kind == _ASKED:
                raise OSError(
                    f"rank 0 read {message.length} bytes at {message.start}, this rank wanted those at {self._position}"
                )

    def _hear(self) -> _Message:
        """Receive a message, and begin to receive the one that it promises."""
        if self._coming is not None:
            header, buffer, turn = self._coming
            self._wait(self._works[turn])
            self._coming = None
            message = _message(header, buffer)
        else:
            header, (buffer, _) = torch.empty(4, dtype=torch.int64), self._buffer()
            self._wait(self._begin(header))
            message = _message(header, buffer)
            if message.kind in {_ASKED, _AHEAD, _DROP} and message.length:
                self._wait(self._begin(buffer[: message.length]))
        if message.promised:
            header, (buffer, works), turn = torch.empty(4, dtype=torch.int64), self._buffer(), self._turn
            works += self._begin(header)
            works += self._begin(buffer[: message.promised])
            self._coming = header, buffer, turn
        return message

    # ------------------------------------------------------------------------------------ on all

    def _buffer(self) -> tuple[torch.Tensor, list[Any]]:
        """Return the buffer whose turn it is, and where to note what still needs it: nothing by now."""
        self._turn = (self._turn + 1) % NUM_BLOCKS
        while len(self._buffers) <= self._turn:
            self._buffers.append(torch.empty(min(self._block_bytes, max(self._size, 1)), dtype=torch.uint8))
        self._wait(self._works[self._turn])
        return self._buffers[self._turn], self._works[self._turn]

    def _begin(self, tensor: torch.Tensor) -> list[Any]:
        """Begin to fill a tensor with that of rank 0; it must live until it is waited for."""
        try:
            return [(dist.broadcast(tensor, src=0, group=self._group, async_op=True), tensor)]
        except RuntimeError as error:
            self._ended = True
            raise OSError(f"the file could not be sent or received: {error}") from error

    def _wait(self, works: list[Any]) -> None:
        try:
            while works:
                works.pop(0)[0].wait()
        except RuntimeError as error:  # a rank is gone
            self._ended = True
            raise OSError(f"the file could not be sent or received: {error}") from error
