"""Whether a process reads what it writes.

Some starters put a pipe in the place of stderr, and a thread of the same process reads it and logs
each line. A console handler on the logger that gets those lines would then be fed with its own.
"""

from __future__ import annotations

import fcntl
import functools
import os
import stat
from pathlib import Path
from typing import TextIO

_OPEN_FILES = Path("/dev/fd")  # of the process that asks; on Linux and macOS


def is_read_here(stream: TextIO) -> bool:
    """Say whether a stream is a pipe that this process itself can read.

    Args:
        stream: to write to, such as ``sys.stderr``.

    Ranks: local.

    Example:
        >>> reading, writing = os.pipe()
        >>> with open(reading), open(writing, "w") as stream:
        ...     is_read_here(stream)
        True
    """
    try:
        pipe = os.fstat(stream.fileno())
    except (AttributeError, NotImplementedError, OSError, TypeError, ValueError):
        # none, closed, or no file, as in a notebook; programs say so in many ways
        return False
    return stat.S_ISFIFO(pipe.st_mode) and _is_read_by(os.getpid(), pipe.st_dev, pipe.st_ino)


@functools.lru_cache(maxsize=1)  # both ends of a pipe are made at once; a fork closes one later
def _is_read_by(_own_process: int, device: int, inode: int) -> bool:
    return any(_reads(descriptor, device, inode) for descriptor in _open_descriptors())


def _open_descriptors() -> list[int]:
    try:
        return [int(path.name) for path in _OPEN_FILES.iterdir()]
    except OSError:  # no such folder in this container
        return []


def _reads(descriptor: int, device: int, inode: int) -> bool:
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (device, inode):
            return False
        return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    except OSError:  # closed since the folder was listed
        return False
