"""SHA-256 of a file while it is being written, so that nobody has to read it again for its checksum.

What passes the handle of a large file is hashed by a second thread and, where the system can, written by a third one
past the page cache: hashing, writing and waiting for the disk overlap, because ``hashlib`` and files release Python's
lock while they work. The processor then copies a file once into a few buffers that are used in turn, instead of into
fresh pages of the cache, which costs several times as much; and the cache keeps what training reads.

Where that is not possible, all goes through the handle. Small pieces are copied into a few buffers for the second
thread then. Large ones in memory that is known to last are handed over as they are, so that the writer waits for
nobody: where there is more work than cores, two threads that wait for each other at every piece take several times as
long. A small file is hashed on the spot and starts no thread.

Source: https://docs.python.org/3/library/hashlib.html#hashlib.hash.update says that the lock is released;
https://man7.org/linux/man-pages/man2/open.2.html says what ``O_DIRECT`` asks of addresses, lengths and offsets, and of
processes that fork.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import mmap
import os
import threading
from collections.abc import Callable, Container
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import numpy as np

__all__ = ["HashedHandle", "file_sha256"]

INLINE_BYTES = 1 << 20
BUFFER_BYTES = 4 << 20
NUM_BUFFERS = 3
LARGE_BYTES = 64 << 10

DIRECT_BUFFER_BYTES = 2 << 20  # a huge page
NUM_DIRECT_BUFFERS = 8
DIRECT_UNIT = max(4096, mmap.PAGESIZE)  # that addresses, lengths and offsets are multiples of
NOT_DIRECT = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}

WriteAt = Callable[[int, memoryview, int], int]


class HashedHandle(io.BufferedIOBase):
    """A binary file for writing that hashes what passes.

    Args:
        handle: where everything goes.
        lasting: addresses of memory that stays as it is until :meth:`finish` returns.
        path: the file's, if it may be written past the page cache; a handle that is not Python's own is not gone round.
        write_at: writes to a descriptor, from some memory, at an offset, as ``os.pwrite`` does.

    Ranks: local.

    State: threads and buffers, from the second MiB on until :meth:`flush` or :meth:`finish`.

    Example:
        >>> handle = HashedHandle(io.BytesIO())
        >>> handle.write(b"abc")
        3
        >>> handle.finish()[:8]
        'ba7816bf'
    """

    def __init__(
        self,
        handle: BinaryIO,
        lasting: Container[int] = frozenset(),
        path: Path | None = None,
        write_at: WriteAt | None = None,
    ) -> None:
        super().__init__()
        self._handle = handle
        self._lasting = lasting
        self._path = path if type(handle) is io.BufferedWriter else None
        self._write_at = write_at or os.pwrite
        self._direct: _DirectTail | None = None
        self._digest = hashlib.sha256()
        self._count = 0
        self._only_appended = True
        self._thread: threading.Thread | None = None
        self._free: SimpleQueue[bytearray] = SimpleQueue()
        self._full: SimpleQueue[tuple[memoryview, bytearray | None] | None] = SimpleQueue()
        self._buffer = bytearray()
        self._filled = 0

    def writable(self) -> bool:
        """Say that it can be written."""
        return True

    def write(self, data: Any) -> int:
        """Write bytes and hash them."""
        view = memoryview(data).cast("B")
        if self._path is not None and self._count + len(view) > INLINE_BYTES:
            self._direct = _DirectTail.begin(self._handle, self._path, self._digest, self._write_at)
            self._path = None  # one try
        if self._direct is not None:
            self._direct.write(view)
            return len(view)
        written = self._handle.write(view)
        if written != len(view):
            self._only_appended = False
        self._hash(view)
        return written

    def flush(self) -> None:
        """Hand what is buffered to the operating system; what follows goes through the page cache."""
        self._leave()
        self._handle.flush()

    def tell(self) -> int:
        """Return the position."""
        return self._handle.tell() if self._direct is None else self._direct.position

    def seekable(self) -> bool:
        """Say whether the position can be changed; the checksum is lost then."""
        return self._handle.seekable()

    def seek(self, offset: int, whence: int = 0) -> int:
        """Change the position, and give up the checksum unless it stays what it was."""
        self._leave()
        before = self._handle.tell()
        after = self._handle.seek(offset, whence)
        self._only_appended &= before == after
        return after

    def truncate(self, size: int | None = None) -> int:
        """Cut the file, and give up the checksum."""
        self._leave()
        self._only_appended = False
        return self._handle.truncate(size)

    def fileno(self) -> int:
        """Return the descriptor, through which the file can be written past this handle: no checksum then."""
        self._leave()
        self._only_appended = False
        return self._handle.fileno()

    def finish(self) -> str | None:
        """End the threads and return the checksum, or None if it is not that of the file, which may be closed by now.

        Call it whatever has happened, before memory that was to last changes. Where the file was not :meth:`flush`-ed
        before, it is not complete, and there is no checksum.
        """
        if self._direct is not None:
            self._direct.end()
            self._direct, self._only_appended = None, False
        if self._thread is not None:
            self._full.put((memoryview(self._buffer)[: self._filled], None))
            self._full.put(None)
            self._thread.join()
            self._thread = None
        return self._digest.hexdigest() if self._only_appended else None

    def _leave(self) -> None:
        """Go on through the handle, with all that came before in the file."""
        self._path, direct = None, self._direct
        if direct is not None:
            direct.complete()
            self._direct = None

    def _hash(self, view: memoryview) -> None:
        self._count += len(view)
        if self._thread is None and (self._count <= INLINE_BYTES or not self._start()):
            self._digest.update(view)
        elif len(view) >= LARGE_BYTES and _address(view) in self._lasting:
            self._hand_over()
            self._full.put((view, None))
        else:
            self._copy(view)

    def _hand_over(self) -> None:
        """Give the thread what has been copied, to keep the order."""
        if self._filled:
            self._full.put((memoryview(self._buffer)[: self._filled], self._buffer))
            self._buffer, self._filled = self._free.get(), 0

    def _copy(self, view: memoryview) -> None:
        while len(view):
            if self._filled == len(self._buffer):
                self._hand_over()
            length = min(len(view), len(self._buffer) - self._filled)
            memoryview(self._buffer)[self._filled : self._filled + length] = view[:length]
            self._filled += length
            view = view[length:]

    def _start(self) -> bool:
        """Start the thread if the system grants one; without it all is hashed on the spot."""
        thread = threading.Thread(target=self._hash_buffers, name="ddpkit checksum", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        for _ in range(NUM_BUFFERS - 1):
            self._free.put(bytearray(BUFFER_BYTES))
        self._buffer = bytearray(BUFFER_BYTES)
        return True

    def _hash_buffers(self) -> None:
        while (piece := self._full.get()) is not None:
            view, own = piece
            self._digest.update(view)
            if own is not None:
                self._free.put(own)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file that is there already.

    Args:
        path: the file.

    Returns:
        The checksum in hexadecimal digits.

    Raises:
        OSError: it cannot be read.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a"
        >>> _ = path.write_bytes(b"abc")
        >>> file_sha256(path)[:8]
        'ba7816bf'
    """
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


# ---------------------------------------------------------------------------------------- past the page cache


class _DirectTail:
    """The rest of a file, hashed by one thread and then written by another one past the page cache.

    What does not fill a unit, at the beginning and at the end, goes through the handle.
    """

    def __init__(self, handle: BinaryIO, descriptor: int, digest: Any, write_at: WriteAt) -> None:
        self.position = handle.tell()
        self._handle = handle
        self._descriptor = descriptor
        self._cached = handle.fileno()
        self._digest = digest
        self._write_at = write_at
        self._missing = -self.position % DIRECT_UNIT  # bytes until direct writing can begin
        self._offset = self.position + self._missing  # of the buffer in the file
        self._is_direct = True
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        self._to_hash: SimpleQueue[tuple[memoryview, int, int] | None] = SimpleQueue()
        self._to_write: SimpleQueue[tuple[memoryview, int, int] | None] = SimpleQueue()
        self._error: BaseException | None = None
        memory = memoryview(_aligned_memory(NUM_DIRECT_BUFFERS * DIRECT_BUFFER_BYTES))
        for start in range(0, len(memory), DIRECT_BUFFER_BYTES):
            self._free.put(memory[start : start + DIRECT_BUFFER_BYTES])
        self._buffer, self._filled = self._free.get(), 0
        self._threads: list[threading.Thread] = []

    @classmethod
    def begin(cls, handle: BinaryIO, path: Path, digest: Any, write_at: WriteAt) -> _DirectTail | None:
        """Go on past the page cache from where a handle is; None where the system cannot."""
        if not (hasattr(os, "O_DIRECT") and hasattr(mmap, "MADV_DONTFORK")):
            return None
        handle.flush()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            tail = cls(handle, descriptor, digest, write_at)
            tail._start()
        except (OSError, RuntimeError):  # no memory, or no thread
            os.close(descriptor)
            return None
        return tail

    def write(self, view: memoryview) -> None:
        """Take bytes, which may change when this returns."""
        self.position += len(view)
        if self._missing:
            head = view[: self._missing]
            self._missing -= len(head)
            self._handle.write(head)
            self._digest.update(head)  # the thread has been given nothing yet
            if not self._missing:
                self._handle.flush()
            view = view[len(head) :]
        while len(view):
            length = min(len(view), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + length] = view[:length]
            self._filled += length
            view = view[length:]
            if self._filled == len(self._buffer):
                self._hand_over(self._filled)
                self._buffer, self._filled = self._free.get(), 0
                self._raise()

    def complete(self) -> None:
        """Wait until all is written; the handle stands behind it then."""
        rest = self._filled % DIRECT_UNIT
        if self._filled > rest:
            self._hand_over(self._filled - rest)
        self.end()
        self._raise()
        last = self._buffer[self._filled - rest : self._filled]
        self._filled = 0
        self._handle.seek(self.position - rest)
        self._handle.write(last)
        self._digest.update(last)

    def end(self) -> None:
        """End the threads; what they were not given is not written."""
        if self._threads:
            self._to_hash.put(None)
            for thread in self._threads:
                thread.join()
            self._threads = []
            os.close(self._descriptor)

    def _start(self) -> None:
        disk = threading.Thread(target=self._write_buffers, name="ddpkit disk", daemon=True)
        checksum = threading.Thread(target=self._hash_buffers, name="ddpkit checksum", daemon=True)
        disk.start()
        try:
            checksum.start()
        except RuntimeError:
            self._to_write.put(None)
            disk.join()
            raise
        self._threads = [checksum, disk]

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _hand_over(self, length: int) -> None:
        """Give the threads what the buffer begins with."""
        self._to_hash.put((self._buffer, length, self._offset))
        self._offset += length

    def _hash_buffers(self) -> None:
        while (piece := self._to_hash.get()) is not None:
            buffer, length, _ = piece
            self._digest.update(buffer[:length])
            self._to_write.put(piece)
        self._to_write.put(None)

    def _write_buffers(self) -> None:
        while (piece := self._to_write.get()) is not None:
            buffer, length, offset = piece
            if self._error is None:
                try:
                    self._write_buffer(buffer[:length], offset)
                except BaseException as error:  # noqa: BLE001 -- raised in the thread that writes the file
                    self._error = error
            self._free.put(buffer)

    def _write_buffer(self, view: memoryview, offset: int) -> None:
        while len(view):
            is_aligned = len(view) % DIRECT_UNIT == 0 == offset % DIRECT_UNIT
            descriptor = self._descriptor if is_aligned and self._is_direct else self._cached
            try:
                written = self._write_at(descriptor, view, offset)
            except OSError as error:
                if error.errno not in NOT_DIRECT or descriptor == self._cached:
                    raise
                self._is_direct = False  # opened so, but not written so
                continue
            view, offset = view[written:], offset + written


def _aligned_memory(size: int) -> mmap.mmap:
    """Return memory that begins with a page. A forked process does not see it, as direct input and output requires."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has none: it takes longer to touch
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
