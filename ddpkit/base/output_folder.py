"""Files and folders that a run writes to: whether that is possible, and the words where it is
not.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL = {errno.ENOSPC, errno.EDQUOT}
IN_THE_WAY = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
QUOTES = "'\""
OUTPUT_EXAMPLE = "such as --output_folder=/path/to/results"


def cannot_write(what: str, error: OSError) -> ConfigError:
    """Return what to raise where an output cannot be written.

    Args:
        what: the option and its value, such as ``"save_file='results/log.txt'"``.
        error: of the file system.

    Example:
        >>> print(
        ...     cannot_write(
        ...         "output_folder='/proc/x'", OSError(errno.EROFS, "Read-only file system")
        ...     )
        ... )
        output_folder='/proc/x' cannot be written: Read-only file system. Give another folder, such
        as ...
    """
    reason = error.strerror or str(error)
    place = Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else None
    example = _example(what)
    remedy = f"Give another folder, {example}."
    if error.errno in FULL:
        remedy = f"Free some space, or give a folder on another disk, {example}."
    elif error.errno in IN_THE_WAY and place is not None:
        file = _file_in_the_way(place)
        if file is not None:
            reason = f"{reason}, as {str(file)!r} is a file"
            remedy = f"Remove this file, or give another folder, {example}."
    elif place is not None and str(place) not in what:
        reason = f"{reason}: {str(place)!r}"
    return ConfigError(f"{what} cannot be written: {reason}. {remedy}")


def _example(what: str) -> str:
    """Return how another folder is given: by the option itself, if it is one of a command line."""
    option, sign, value = what.partition("=")
    if not option.startswith("--") or not sign:
        return OUTPUT_EXAMPLE
    return f"such as {option}=/path/to/{Path(value.strip(QUOTES)).name}"


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Return a context in which an error of the file system says what cannot be written, and what
    to do.

    Args:
        what: the option and its value.

    Raises:
        ConfigError: an ``OSError`` was raised inside.
    """
    try:
        yield
    except OSError as error:
        raise cannot_write(what, error) from error


def require_writable(what: str, path: str | os.PathLike[str]) -> None:
    """Refuse a file or folder that could not be written later. Nothing is written now.

    Args:
        what: the option and its value.
        path: the file or folder, which need not exist, nor its parents.

    Raises:
        ConfigError: it is read-only, another user's, on a full disk, or a file is in the place of a
            folder.
    """
    with writing(what):
        _require_writable(Path.cwd() / path)


def require_writable_file(what: str, path: str | os.PathLike[str]) -> None:
    """Refuse a file that could not be written later, also where a folder has its name.

    Args:
        what: the option and its value.
        path: the file, which need not exist, nor its parents.

    Raises:
        ConfigError: as :func:`require_writable`, or a folder is there.

    Example:
        >>> require_writable_file("--output='.'", ".")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: --output='.' cannot be written: it is a folder. Give the name of
        a file in it.
    """
    if Path(path).is_dir():
        raise ConfigError(
            f"{what} cannot be written: it is a folder. Give the name of a file in it."
        )
    require_writable(what, path)


def _require_writable(path: Path) -> None:
    """Raise the error that writing would end in, with the nearest folder or file that is there."""
    found = next(folder for folder in (path, *path.parents) if folder.exists())
    disk = os.statvfs(found)
    number = 0
    if found != path and not found.is_dir():
        number = errno.ENOTDIR
    elif disk.f_flag & os.ST_RDONLY:
        number = errno.EROFS
    elif not os.access(
        found,
        os.W_OK,
        effective_ids=os.access in os.supports_effective_ids,
    ):
        number = errno.EACCES
    elif disk.f_blocks and not disk.f_bavail:
        number = errno.ENOSPC
    if number:
        raise OSError(number, os.strerror(number), str(found))


def _file_in_the_way(path: Path) -> Path | None:
    """Return the file that stands where a folder is needed: the path itself, or one of its
    parents.
    """
    for folder in (path, *path.parents):
        if folder.exists():
            return None if folder.is_dir() else folder
    return None
