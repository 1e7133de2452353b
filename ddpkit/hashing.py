"""SHA-256 of a file while it is being written, so that nobody has to read it again for its checksum.

What passes the handle is hashed by a second thread: hashing, writing and waiting for the disk overlap, because
``hashlib`` and files release Python's lock while they work. Small pieces are copied into a few buffers that are used in
turn. Large ones in memory that is known to last are handed over as they are, so that the writer waits for nobody: where
there is more work than cores, two threads that wait for each other at every piece take several times as long. A small
file is hashed on the spot and starts no thread.

Source: https://docs.python.org/3/library/hashlib.html#hashlib.hash.update says that the lock is released.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Container
from queue import SimpleQueue
from typing import Any, BinaryIO

import numpy as np

__all__ = ["HashedHandle"]

INLINE_BYTES = 1 << 20
BUFFER_BYTES = 4 << 20
NUM_BUFFERS = 3
LARGE_BYTES = 64 << 10


class HashedHandle(io.BufferedIOBase):
    """A binary file for writing that hashes what passes.

    Args:
        handle: where everything goes.
        lasting: addresses of memory that stays as it is until :meth:`finish` returns.

    Ranks: local.

    State: a thread, from the second MiB on until :meth:`finish`.

    Example:
        >>> handle = HashedHandle(io.BytesIO())
        >>> handle.write(b"abc")
        3
        >>> handle.finish()[:8]
        'ba7816bf'
    """

    def __init__(self, handle: BinaryIO, lasting: Container[int] = frozenset()) -> None:
        super().__init__()
        self._handle = handle
        self._lasting = lasting
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
        written = self._handle.write(view)
        if written != len(view):
            self._only_appended = False
        self._hash(view)
        return written

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        self._handle.flush()

    def tell(self) -> int:
        """Return the position."""
        return self._handle.tell()

    def seekable(self) -> bool:
        """Say whether the position can be changed; the checksum is lost then."""
        return self._handle.seekable()

    def seek(self, offset: int, whence: int = 0) -> int:
        """Change the position, and give up the checksum unless it stays what it was."""
        before = self._handle.tell()
        after = self._handle.seek(offset, whence)
        self._only_appended &= before == after
        return after

    def truncate(self, size: int | None = None) -> int:
        """Cut the file, and give up the checksum."""
        self._only_appended = False
        return self._handle.truncate(size)

    def fileno(self) -> int:
        """Return the descriptor, through which the file can be written past this handle: no checksum then."""
        self._only_appended = False
        return self._handle.fileno()

    def finish(self) -> str | None:
        """End the thread and return the checksum, or None if it is not that of the file, which may be closed by now.

        Call it whatever has happened, before memory that was to last changes.
        """
        if self._thread is not None:
            self._full.put((memoryview(self._buffer)[: self._filled], None))
            self._full.put(None)
            self._thread.join()
            self._thread = None
        return self._digest.hexdigest() if self._only_appended else None

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


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
