"""Which folder of this machine mirrors a URL, and when it is deleted.

The ranks of a machine share it and come to the same path without asking each other: it follows from
the URL and from what the launcher tells all ranks of a launch. Each of them keeps a shared lock on
a file beside it, which the kernel frees at its end: the last one to end removes the folder, and a
later run of the same user removes what killed runs have left.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from ddpkit.errors import ConfigError
from ddpkit.launch import find_launch
from ddpkit.logger import get_logger

logger = get_logger(__name__)

LOCK_SUFFIX = ".lock"
NOT_COPIED = ".not-copied"  # in a mirror whose last files could not be copied up
DIGITS = 12
_OF_A_LAUNCH = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def kept_folder(
    url: str,
    parent: str,
) -> Path:
    """Return the folder of a machine that mirrors a URL from run to run.

    Args:
        url: of the output folder.
        parent: the option ``ckpt_local``.

    Example:
        >>> kept_folder("s3://bucket/runs/seven", "/scratch").name.startswith("seven-")
        True
    """
    name = f"{_last_name(url)}-{_digest(url)}{_node()}"
    return Path(parent).expanduser().absolute() / name


def own_folder(url: str) -> Path:
    """Return the folder of a machine that mirrors a URL for this launch alone.

    Raises:
        ConfigError: the folder for temporary files is another user's trap.
    """
    return _own_place() / f"{_last_name(url)}-{_digest(url)}-{launch_name()}{_node()}"


def mirror_place(url: str, keep_in: str | None = None) -> Path:
    """Return the folder of this machine in which a run mirrors a URL; or, where that is of the
    launch alone, the folder that it is in. Nothing is made.

    Args:
        url: of the output folder.
        keep_in: the option ``ckpt_local``; None: not given.

    Ranks: local.

    Example:
        >>> mirror_place("s3://bucket/seven").name.startswith("ddpkit-mirrors-")
        True
    """
    return _place() if keep_in is None else kept_folder(url.rstrip("/"), keep_in)


def launch_name() -> str:
    """Return a name that all processes of a launch know, and no other launch has."""
    info = find_launch()
    if not info.is_distributed:
        return f"process{os.getpid()}"
    told = [info.address, str(info.port), info.run_id]
    told += [os.environ.get(name, "") for name in _OF_A_LAUNCH]
    return _digest("\n".join(told))


def _place() -> Path:
    return Path(tempfile.gettempdir(), f"ddpkit-mirrors-{os.getuid()}")


def _own_place() -> Path:
    """Return a folder for temporary files that is this user's alone."""
    path = _place()
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(
            f"{str(path)!r} is not this user's folder. Remove it, or set TMPDIR to another folder "
            "for temporary files."
        )
    return path


def _last_name(url: str) -> str:
    name = url.rstrip("/").rpartition("/")[2]
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    return plain.lstrip(".") or "run"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _node() -> str:
    """Return what parts the folders of several nodes, which may share a disk."""
    node = find_launch().node_rank
    return f"-node{node}" if node else ""


class Occupancy:
    """Says that a process uses a folder, until it ends.

    Args:
        folder: the folder.

    Ranks: local.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder.with_name(f".{folder.name}{LOCK_SUFFIX}")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._handle: int | None = os.open(self._path, flags, 0o600)
        with contextlib.suppress(OSError):  # where nothing can be locked, nothing is removed either
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def end(
        self,
        *,
        removes: bool,
    ) -> None:
        """Leave the folder; remove it, if no other process uses it.

        Args:
            removes: whether it may be removed.
        """
        handle = self._handle
        self._handle = None
        if handle is None:
            return
        try:
            if removes and _is_alone(handle):
                _remove(self._folder, self._path)
        finally:
            os.close(handle)


def remove_left_behind() -> None:
    """Remove the mirrors that killed runs of this user have left on this machine."""
    with contextlib.suppress(OSError, ConfigError):
        for path in _own_place().glob(f".*{LOCK_SUFFIX}"):
            folder = path.with_name(path.name[1:].removesuffix(LOCK_SUFFIX))
            if (folder / NOT_COPIED).exists():
                continue
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _is_alone(handle):
                    _remove(folder, path)
                    logger.debug("Removed what a run that was killed had left: %s", folder)
            finally:
                os.close(handle)


def _is_alone(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(
    folder: Path,
    lock: Path,
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.unlink(missing_ok=True)
