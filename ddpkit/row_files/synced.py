"""Files that are complete as soon as they have their final name."""

from __future__ import annotations

import contextlib
import os
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def synced_file(path: Path) -> Iterator[IO[bytes]]:
    """Return a context with a new file, whose bytes are on the disk at its end."""
    file = path.open("wb")
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
    except BaseException:
        # Closing writes what is left: on a full disk that would hide the error, which says more.
        with contextlib.suppress(OSError):
            file.close()
        raise
    file.close()


def rename_synced(source: Path, target: Path) -> None:
    """Give a complete file its final name, in place of an earlier file of that name."""
    source.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
