"""One run at a time saves into a folder: a file in it, locked with ``flock``, which says which process that is.

The kernel frees the lock when the process ends, however it ends, and not before its last write is done. Forked children
close the file, so that a loader worker that outlives its rank does not keep the folder. Its owner removes the file;
what a killed one leaves behind is in nobody's way.

**Where it does not hold**: on a file system that cannot lock, and on another host where a network file system is
mounted with locks of each host's own (``nolock``, ``local_lock``). There the run that starts last has the folder: the
other one finds another token in the file before its next rename or deletion (:meth:`FolderLock.require`), and stops.

Source: flock(2), https://man7.org/linux/man-pages/man2/flock.2.html: a lock belongs to the open file, is shared with
forked children, and over NFS is one of the server, for which the file must be open for writing. A lock of ``lockf``
would be lost when any handle of the file is closed. NFS looks at a file anew when it is opened (nfs(5)).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from ddpkit.checkpointing import storage
from ddpkit.checkpointing.storage import REPLACED_PREFIX, remove_directory
from ddpkit.errors import CheckpointError, FolderInUseError
from ddpkit.logger import get_logger

logger = get_logger(__name__)

LOCK_NAME = ".lock"
GRACE_SECONDS = 2.0  # for a run that is about to end
NAP_SECONDS = 0.05
CANNOT_LOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
GONE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ESTALE}


class _HeldLock:
    """A locked file of this process."""

    def __init__(self, path: Path) -> None:
        self.path, self.count, self.handle = path, 0, -1
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        who = f"process {os.getpid()} on {socket.gethostname()}, since {since} UTC"
        self.record = f"{who}\n{uuid.uuid4().hex}\n".encode()

    def take(self) -> None:
        end = time.monotonic() + GRACE_SECONDS
        while not self._lock():
            if time.monotonic() > end:
                raise FolderInUseError(
                    f"the folder {self.path.parent} is in use by another run: {_owner(self.path)}. Wait for it, end "
                    "it, or give this run a folder of its own."
                )
            time.sleep(NAP_SECONDS)
        try:
            storage.FILES.write(self.path, lambda file: file.write(self.record))
            storage.FILES.sync_file(self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self.close()
            raise

    def _lock(self) -> bool:
        """Open and lock the file; return False where another process has it."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _flock(handle, self.path.parent)
            if os.path.samestat(os.fstat(handle), self.path.stat()):  # else its owner has just removed it
                self.handle = handle
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            if self.handle < 0:
                os.close(handle)
        return self.handle >= 0

    def require(self) -> None:
        try:
            is_own = self.path.read_bytes() == self.record
        except OSError as error:
            if error.errno not in GONE:
                raise CheckpointError(f"cannot look at the lock {self.path}: {error}.") from error
            is_own = False
        if not is_own:
            by = f"it was taken over by {_owner(self.path)}" if self.path.is_file() else "its lock is gone"
            raise FolderInUseError(
                f"The folder {self.path.parent} is no longer this run's: {by}. Nothing more is saved or deleted there. "
                "End this run, or give it a folder of its own."
            )

    def give_back(self) -> None:
        with contextlib.suppress(OSError, CheckpointError):  # where it is lost, the file is another run's
            self.require()
            storage.FILES.remove_tree(self.path)
        self.close()

    def close(self) -> None:
        os.close(self.handle)
        self.handle = -1


def _flock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in CANNOT_LOCK:
            raise
        logger.warning_once("%s cannot be locked here: nothing stops a second run.", folder)


def _owner(path: Path) -> str:
    words = ""
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        words = file.readline(300).strip()
    return words if words.isprintable() and words else "a process that cannot be told"


# ---------------------------------------------------------------------------------------- what this process holds


_HELD: dict[Path, _HeldLock] = {}
_MUTEX = threading.RLock()


def _path(folder: Path, name: str) -> Path:
    return Path(os.path.realpath(folder)) / name


@functools.cache
def _close_in_children() -> None:
    """Have forked children close what this process holds; none is forked between opening a file and noting it."""
    os.register_at_fork(before=_MUTEX.acquire, after_in_parent=_MUTEX.release, after_in_child=_forget)


def _forget() -> None:
    for hold in _HELD.values():
        hold.close()
    _HELD.clear()
    _MUTEX.release()


class FolderLock:
    """The right to save into a folder, for one process at a time.

    Within a process several locks of one folder share it, and it is given back with the last. A forked child holds
    nothing. ``kill -9`` frees it at once. See the module for where a second run is not stopped.

    Args:
        folder: to be locked; must exist when the lock is taken.
        name: of the lock's file in it.

    Attributes:
        folder: as given, an absolute ``Path``: the working directory may change while it is held.

    Ranks: main only (one process of a run).

    State: a file in the folder as long as it is held.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> lock = FolderLock(folder)
        >>> with lock.hold():
        ...     lock.require()
        ...     [path.name for path in folder.iterdir()]
        ['.lock']
        >>> list(folder.iterdir())
        []
    """

    def __init__(self, folder: str | os.PathLike[str], name: str = LOCK_NAME) -> None:
        self.folder = Path(folder).absolute()
        self._name = name
        self._holds: list[_HeldLock] = []

    @property
    def held(self) -> bool:
        """Whether this lock was acquired by this process, and not yet released."""
        return bool(self._holds) and self._holds[-1].handle >= 0

    def acquire(self) -> None:
        """Take the lock, or share it if this process has it already; then other runs cannot save in the folder.

        Waits two seconds for a run that is about to end.

        Raises:
            FolderInUseError: another run has it, or this one has lost it.
            CheckpointError: the folder is not there, full or read-only: a run that could not save says so before it
                trains.

        Ranks: main only.
        """
        _close_in_children()
        with _MUTEX:
            if not self.held:
                self._holds = []  # what a forked child has inherited
            path = _path(self.folder, self._name)
            if path not in _HELD:
                hold = _HeldLock(path)
                try:
                    hold.take()
                except OSError as error:
                    what = (
                        f"cannot save or delete a checkpoint in {self.folder}, because its lock {path} cannot be taken"
                    )
                    raise storage.save_error(path, error, what=what) from error
                _HELD[path] = hold
            _HELD[path].require()
            _HELD[path].count += 1
            self._holds.append(_HELD[path])

    def release(self) -> None:
        """Undo one :meth:`acquire`; the last one in this process gives the folder back. Without one, does nothing.

        Ranks: main only.
        """
        with _MUTEX:
            if not self.held:
                return
            hold = self._holds.pop()
            hold.count -= 1
            if not hold.count:
                del _HELD[hold.path]
                hold.give_back()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock for the length of a ``with`` block.

        Raises:
            CheckpointError: as :meth:`acquire`.

        Ranks: main only.
        """
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def require(self) -> None:
        """Make sure that the folder is still this run's, right before something in it is renamed or deleted.

        Costs one small read; may be called from any thread.

        Raises:
            CheckpointError: the lock is not held, or another run has taken it over.

        Ranks: main only.
        """
        if not self.held:
            raise CheckpointError(f"the lock of {self.folder} is not held: acquire it first.")
        self._holds[-1].require()

    def remove(self, path: Path) -> None:
        """Delete a checkpoint.

        Args:
            path: a directory in the folder; it may be gone already.

        Raises:
            CheckpointError: as :meth:`require`; or it cannot be moved.

        Ranks: main only.
        """
        self.require()
        replaced = path.with_name(REPLACED_PREFIX + path.name)
        if os.path.lexists(replaced):  # by a save that was killed right after it; it would come back
            remove_directory(replaced)
        remove_directory(path)

    def clean(self) -> None:
        """Remove what interrupted saves have left, and put back what one of them had moved away.

        Raises:
            CheckpointError: as :meth:`require`; what cannot be removed is left without a word.

        Ranks: main only, with no save of this process in progress.
        """
        self.require()
        storage.clean_leftovers(self.folder, self.require)
