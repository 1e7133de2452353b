"""SHA-256 of a file while it is written, so that nothing has to be read again for its checksum.

A save runs in a background thread, and ``hashlib`` releases the interpreter lock while it works: training goes on.
Source: https://docs.python.org/3/library/hashlib.html#hashlib.hash.update
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["HashedHandle", "file_sha256"]


class HashedHandle(io.BufferedIOBase):
    """A binary file for writing that hashes the bytes on their way.

    Args:
        handle: the file.

    Ranks: local.

    Example:
        >>> handle = HashedHandle(io.BytesIO())
        >>> handle.write(b"abc")
        3
        >>> handle.sha256()[:8]
        'ba7816bf'
    """

    def __init__(self, handle: BinaryIO) -> None:
        super().__init__()
        self._handle = handle
        self._digest = hashlib.sha256()
        self._only_appended = True

    def writable(self) -> bool:
        """Say that it can be written."""
        return True

    def write(self, data: Any) -> int:
        """Write bytes and hash them."""
        view = memoryview(data).cast("B")
        written = self._handle.write(view)
        self._only_appended &= written == len(view)
        self._digest.update(view)
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

    def sha256(self) -> str | None:
        """Return the checksum in hexadecimal digits, or None if it is not that of the file."""
        return self._digest.hexdigest() if self._only_appended else None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits.

    Raises:
        OSError: it cannot be read.

    Ranks: local.
    """
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
