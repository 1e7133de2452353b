"""One run at a time saves into a folder of checkpoints.

The lock is a directory ``.lock`` in that folder with one file in it, named by a new random token each time::

    <checkpoints_dir>/.lock/<token>     who holds it, as JSON; its time is renewed every ten seconds

**Taking** renames a directory, made elsewhere with the file in it, to ``.lock``: this fails where ``.lock`` holds a
file, so one of many takers wins. **Removing**, by the owner or by the successor of a dead one, deletes the file by its
token, then the directory if it is empty. So a late process cannot remove or renew another's lock, and ``flock``,
which not every network file system shares between hosts, is not needed.

**Is the owner dead?** On the same host: if its process is gone, is a zombie, or has another start time; a killed one
that is not gone yet is waited for, one that lives is given two seconds to end. On another host, or if the lock cannot
be read: if the file's time stands still for a lease, which is three renewals. Clocks of two hosts are never compared.

**A run that was wrongly taken for dead** does no harm. It checks that the lock is still its own right before every
rename (:meth:`FolderLock.require`); its half-made checkpoints are removed by its successor, before that one looks for
checkpoints; a checkpoint that it has just moved away to replace or delete is put back, by itself or by its successor.

Source: POSIX rename(2): "if newpath is a directory, it must be empty"; NFS refreshes a file's state when it is opened
(close-to-open consistency, https://man7.org/linux/man-pages/man5/nfs.5.html), so a lock is always read by opening its
file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from ddpkit.base import has_ended, is_ending, state_and_start, this_place
from ddpkit.checkpointing import storage
from ddpkit.checkpointing.storage import REPLACED_PREFIX, STAGING_PREFIX, remove_directory
from ddpkit.errors import CheckpointError, FolderInUseError
from ddpkit.logger import get_logger

logger = get_logger(__name__)

LOCK_NAME = ".lock"
RENEWAL_SECONDS = 10.0
RENEWALS_PER_LEASE = 3
RENEWALS_OF_THE_LIVING = 2  # a run that is about to die may renew once more
GRACE_SECONDS = 2.0  # for a run of this host that may be about to end; less, where a renewal is less
LONGEST_NAP_SECONDS = 0.2

OCCUPIED = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}
GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


# ---------------------------------------------------------------------------------------- who holds a folder


@dataclass(frozen=True)
class Holder:
    """Who holds the lock of a folder, as written down when it was taken.

    Args:
        token: drawn when the lock was taken.
        host: name of the machine; empty in a record that cannot be read.
        boot_id: drawn by its kernel at every boot.
        pid_namespace: in which ``pid`` counts.
        pid: the process; 0 in a record that cannot be read.
        process_started: when the process started, in clock ticks since boot.
        since: when it took the lock, UTC.
        script: the name of its script.

    Ranks: local.

    Example:
        >>> Holder("1f", "node7", "b", "pid:[1]", 12, 34, "2026-01-31 12:00:00", "train.py").has_ended()
        False
    """

    token: str
    host: str = ""
    boot_id: str = ""
    pid_namespace: str = ""
    pid: int = 0
    process_started: int = 0
    since: str = ""
    script: str = ""

    def is_here(self) -> bool:
        """Say whether its process can be looked up from this one.

        Ranks: local.
        """
        place = (self.host, self.boot_id, self.pid_namespace)
        return all(place) and self.pid > 0 and place == this_place()

    def has_ended(self) -> bool:
        """Say whether its process is known to have ended. One that cannot be looked up is not.

        Ranks: local.
        """
        if self.is_here() and self.pid == os.getpid():  # else it is of the program that this one replaced by exec
            return all(hold.token != self.token for hold in list(_HELD.values()))
        return self.is_here() and has_ended(self.pid, self.process_started)

    def __str__(self) -> str:
        if not self.pid:
            return "somebody whose lock cannot be read"
        return f"process {self.pid} on {self.host} ({self.script or 'no script'}), since {self.since} UTC"


def _own_record(token: str) -> Holder:
    pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    script = Path((getattr(sys, "argv", None) or [""])[0]).name
    return Holder(token, *this_place(), pid, state_and_start(pid)[1], since, ascii(script[:80])[1:-1])


def holder(folder: str | os.PathLike[str]) -> Holder | None:
    """Say who holds a folder of checkpoints; changes nothing, takes nothing.

    Args:
        folder: the folder; a missing folder is not locked.

    Returns:
        The holder, which may have ended (:meth:`Holder.has_ended`), or None.

    Raises:
        FolderInUseError: the lock is another user's, and cannot be looked into.
        CheckpointError: the lock cannot be read.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with FolderLock(folder).hold():
        ...     holder(folder).pid == os.getpid()
        True
        >>> holder(folder) is None
        True
    """
    found = _find(Path(folder))
    return None if found is None else found.holder


class _Found(NamedTuple):
    """A lock as it was at one moment."""

    path: Path
    holder: Holder
    renewed: int  # the file's time in nanoseconds


def _find(folder: Path) -> _Found | None:
    lock = folder / LOCK_NAME
    try:
        for path in sorted(lock.iterdir()) if lock.is_dir() else [lock]:
            # A directory: it was renamed to its place after the look before, when nobody held the lock.
            with contextlib.suppress(FileNotFoundError, IsADirectoryError), path.open("rb") as file:
                return _Found(path, _parse(path.name, file.read()), os.fstat(file.fileno()).st_mtime_ns)
    except PermissionError as error:
        raise FolderInUseError(
            f"the lock {lock} is another user's, and this one may not look into it. Wait until it is gone, or give "
            "this run a folder of its own. If it is certain that the other has ended, have its owner remove the lock."
        ) from error
    except OSError as error:
        if error.errno not in GONE:
            raise CheckpointError(f"cannot read the lock {lock}: {error}.") from error
    return None


def _parse(token: str, raw: bytes) -> Holder:
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        record = json.loads(raw)
        named = {each.name: record[each.name] for each in fields(Holder)}
        typed = all(type(named[each.name]).__name__ == each.type for each in fields(Holder))
        if typed and named["pid"] > 0 and all(str(value).isprintable() for value in named.values()):
            return Holder(**named)
    return Holder(token)


# ---------------------------------------------------------------------------------------- waiting for a folder


class _LockWaiter:
    """Waits until no live process holds a folder, and removes the lock of a dead run."""

    def __init__(self, folder: Path, renewal_seconds: float) -> None:
        self.folder = folder
        self.renewal = renewal_seconds
        self.lease = RENEWALS_PER_LEASE * renewal_seconds
        self.seen: _Found | None = None
        self.since = 0.0
        self.renewals = 0

    def is_free(self) -> bool:
        """Say whether the lock may be taken; raise if its owner lives."""
        now = time.monotonic()  # before the look: what is unchanged after it was unchanged for as long
        found = _find(self.folder)
        if found is None:
            return True
        if self.seen is None or self.seen.path != found.path:
            self.since, self.renewals = now, 0
            if not found.holder.has_ended():
                logger.announce("%s is held by %s: waiting to see whether it lives.", self.folder, found.holder)
        elif self.seen.renewed != found.renewed and not found.holder.is_here():
            self.since, self.renewals = now, self.renewals + 1
        self.seen = found
        if not self._is_over(found.holder, now - self.since):
            return False
        run = found.holder.host, found.holder.pid, found.holder.process_started
        say = logger.debug if run in _TOLD else logger.warning  # a run has a lock in each of its folders
        say("%s: taking over the lock of %s, which has ended.", self.folder, found.holder)
        _TOLD.add(run)
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # another one was faster
            found.path.unlink()
        return True

    def _is_over(self, owner: Holder, seconds: float) -> bool:
        if not owner.is_here():
            if self.renewals >= RENEWALS_OF_THE_LIVING:
                raise self._refusal("it was renewed while this process watched", owner)
            return seconds >= self.lease
        patience = self.lease if is_ending(owner.pid) else min(GRACE_SECONDS, self.renewal)
        if seconds >= patience and not owner.has_ended():
            raise self._refusal("it is alive", owner)
        return owner.has_ended()

    def _refusal(self, why: str, by: Holder) -> FolderInUseError:
        end = f"end it (kill {by.pid})" if by.is_here() else "end it"
        rest = "" if by.is_here() else f" If it is certain that the other has ended, remove {self.folder / LOCK_NAME}."
        return FolderInUseError(
            f"the folder {self.folder} is in use by another run: {by} ({why}). Wait for it, {end}, or give this run a "
            f"folder of its own.{rest}"
        )


# ---------------------------------------------------------------------------------------- what this process holds


class _HeldLock:
    """A folder's lock in the hands of this process, kept fresh by a thread."""

    def __init__(self, folder: Path, renewal_seconds: float) -> None:
        self.folder = folder
        self.renewal = renewal_seconds
        self.pid = os.getpid()
        self.token = uuid.uuid4().hex
        self.record = json.dumps(asdict(_own_record(self.token))).encode()
        self.path = folder / LOCK_NAME / self.token
        self.count = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep_fresh, name=f"lock of {folder}", daemon=True)

    def take(self) -> _HeldLock:
        """Take the lock; if that fails, for whatever reason, it is not taken."""
        lock = self.path.parent
        try:
            waiter = _LockWaiter(self.folder, self.renewal)
            while not (waiter.is_free() and self._place()):
                time.sleep(min(LONGEST_NAP_SECONDS, self.renewal / 20))
            try:
                half_made = [path for path in self.folder.glob(f"{STAGING_PREFIX}*") if path.is_dir()]
                self.require()  # after the listing: what another run makes from now on is not in it
                for path in half_made:
                    remove_directory(path)
                self._thread.start()
            except BaseException:
                self._remove()
                raise
            return self
        except FolderInUseError:
            raise
        except (CheckpointError, OSError, RuntimeError) as error:  # the last: no thread can be started
            cause = error.__cause__ or error
            what = f"cannot save or delete a checkpoint in {self.folder}, because its lock {lock} cannot be taken"
            raise storage.save_error(lock, cause, what=what) from cause

    def _place(self) -> bool:
        """Rename the lock to its place; return False if another process was faster."""
        staging = self.folder / f"{STAGING_PREFIX}{self.token[:12]}"
        storage.FILES.make_directory(staging)
        try:
            storage.FILES.write(staging / self.token, lambda file: file.write(self.record))
            storage.FILES.sync_file(staging / self.token)
            storage.FILES.rename(staging, self.path.parent)
        except OSError as error:
            swept = error.errno == errno.ENOENT and self.folder.is_dir()  # as half-made, by a faster one
            if error.errno in OCCUPIED or swept:
                return False
            raise
        finally:
            storage.discard_staging(staging)
        return True

    def give_back(self) -> None:
        self._done.set()
        self._thread.join()
        self._remove()

    def _remove(self) -> None:
        """Remove this lock and no other; one that resists is found dead by the next run."""
        with contextlib.suppress(OSError):
            storage.FILES.remove_tree(self.path)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def _keep_fresh(self) -> None:
        while not self._done.wait(self.renewal):
            try:
                os.utime(self.path)  # never makes a file, and no other run has one of this name
            except OSError as error:
                if error.errno in GONE:
                    logger.error("%s", self._how_lost())  # noqa: TRY400 -- no traceback
                    return
                logger.warning("Cannot renew the lock of %s: %s. It is tried again.", self.folder, error)

    def require(self) -> None:
        try:
            self.path.open("rb").close()
        except OSError as error:
            if error.errno not in GONE:
                raise CheckpointError(f"cannot look at the lock {self.path}: {error}.") from error
            raise FolderInUseError(self._how_lost()) from None
        if self.pid != os.getpid():
            raise FolderInUseError(f"The folder {self.folder} is held by process {self.pid}, not by this child of it.")

    def _how_lost(self) -> str:
        by = None
        with contextlib.suppress(CheckpointError):
            by = holder(self.folder)
        why = "its lock is gone" if by is None else f"it was taken over by {by}"
        return (
            f"The folder {self.folder} is no longer this run's: {why}. Nothing more is saved or deleted there. End "
            "this run, or give it a folder of its own."
        )


_TOLD: set[tuple[str, int, int]] = set()  # runs whose locks this process has taken over
_HELD: dict[tuple[int, str], _HeldLock] = {}  # by process, since a forked child holds nothing, and by folder
_MUTEX = threading.RLock()


class FolderLock:
    """The right to save into a folder of checkpoints, for one process at a time.

    Within a process several locks of one folder share it, and it is given back with the last. A forked child holds
    nothing. ``kill -9`` leaves the lock behind, and the next run takes it over: at once on the same host, after three
    renewals from elsewhere. See the module for what keeps a run that was wrongly taken for dead from doing harm.

    Args:
        folder: of the checkpoints; must exist when the lock is taken.
        renewal_seconds: how often the lock is renewed; the same for all runs that share a folder.

    Attributes:
        folder: as given, an absolute ``Path``: the working directory may change while it is held.

    Ranks: main only (one process of a run).

    State: a directory ``.lock`` in the folder, and a thread that renews it, as long as it is held.

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

    def __init__(self, folder: str | os.PathLike[str], *, renewal_seconds: float = RENEWAL_SECONDS) -> None:
        self.folder = Path(folder).absolute()
        self._renewal_seconds = renewal_seconds
        self._holds: list[_HeldLock] = []

    @property
    def held(self) -> bool:
        """Whether this lock was acquired by this process, and not yet released."""
        return bool(self._holds) and self._holds[-1].pid == os.getpid()

    def acquire(self) -> None:
        """Take the lock, or share it if this process has it already; then other runs cannot save in the folder.

        Waits for a run that is about to end: two seconds for a process of this host that lives, up to three renewals
        for one that was killed and is not gone yet, and for the lock of another host to prove dead or alive.

        Raises:
            CheckpointError: another run holds it and lives; it was lost to another run; or the folder is not there,
                full or read-only: a run that could not save says so before it trains.

        Ranks: main only.

        State: removes the staging directories of others once the lock is taken.
        """
        with _MUTEX:
            if not self.held:
                self._holds = []  # what a forked child has inherited
            key = (os.getpid(), os.path.realpath(self.folder))
            if key not in _HELD:
                _HELD[key] = _HeldLock(self.folder, self._renewal_seconds).take()
            hold = _HELD[key]
            hold.require()
            hold.count += 1
            self._holds.append(hold)

    def release(self) -> None:
        """Undo one :meth:`acquire`; the last one in this process gives the folder back. Without one, does nothing.

        Ranks: main only.
        """
        if not self.held:
            return
        with _MUTEX:
            hold = self._holds.pop()
            hold.count -= 1
            if not hold.count:
                for key in [key for key, each in _HELD.items() if each is hold]:
                    del _HELD[key]
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
        if not self._holds:
            raise CheckpointError(f"the lock of {self.folder} is not held: acquire it first.")
        self._holds[-1].require()

    def remove(self, path: Path) -> None:
        """Delete a checkpoint, unless the folder turns out to be another run's.

        Args:
            path: a directory in the folder; it may be gone already.

        Raises:
            CheckpointError: as :meth:`require`, and the checkpoint is back at its place; or it cannot be moved.

        Ranks: main only.
        """
        self.require()
        aside = path.with_name(REPLACED_PREFIX + path.name)
        try:
            if os.path.lexists(aside) and os.path.lexists(path):  # of a save that ended right after it replaced this
                remove_directory(aside)
            storage.FILES.rename(path, aside)
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointError(f"cannot remove {path}: {error}. Its folder must be writable.") from error
        try:
            self.require()  # still ours, hence ours when it was moved
            remove_directory(aside)
        except CheckpointError as error:
            with contextlib.suppress(OSError):  # put back already by the run that holds the folder now
                storage.FILES.rename(aside, path)
            raise type(error)(str(error).replace(aside.name, path.name)) from error.__cause__

    def clean(self) -> None:
        """Remove what interrupted saves have left, and put back what one of them had moved away.

        Raises:
            CheckpointError: as :meth:`require`; what cannot be removed is left without a word.

        Ranks: main only, with no save of this process in progress.
        """
        self.require()
        storage.clean_leftovers(self.folder, self.require)
