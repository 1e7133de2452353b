"""One run at a time saves into a folder of checkpoints.

The lock is a directory ``.lock`` in that folder with one file in it, named by a token that is drawn anew each time::

    <checkpoints_dir>/.lock/<token>     line 1: who holds it, as JSON; line 2: a counter, renewed every ten seconds

**Taking** it is renaming a directory, made elsewhere with the file in it, to ``.lock``: that works where ``.lock`` is
not there or empty, and fails where it holds a file, so one of many takers wins. **Removing** it, by its owner or by who
takes over from a dead one, is deleting the file *by its token* and then the directory if it is empty. A process that
comes late, whatever it believes, therefore never removes, renews or replaces the lock of somebody else: no step is a
check followed by an act on a name that may have changed hands. Nothing needs ``flock``, which network file systems
do not all offer, and no clock is compared with that of another host.

**Is the owner dead?** In the same boot and process namespace of the same host: when its process is gone, is a zombie,
or has another start time; a stopped process is alive. From elsewhere: when the counter stands still for three
renewals. A lock that cannot be read is treated like one from elsewhere.

**Is it alive?** In the same place as above: when its process has been there for two seconds, which a run needs that has
just been told to end. One that was killed and is not gone yet, because the kernel still frees its memory or ends a
write, is waited for, for three renewals at most. From elsewhere: when the counter was seen to move twice.

**Fencing.** A run that was taken for dead may still live: stopped, or cut off from the others. Call the old owner O and
the new one P. What O may do late, with P's takeover just after O looked:

- *O gives its checkpoint its name.* O passed :meth:`FolderLock.require` before the takeover, so its staging directory
  existed by then, and P, having taken the lock, first moves all of those away (:meth:`FolderLock.acquire`). Either O's
  rename came before that, and P, which looks for checkpoints afterwards, finds a complete one; or O's rename fails.
  A staging directory that O makes later never gets as far: O calls ``require`` after it and before the rename.
- *O moves a checkpoint away that it is about to replace.* It may be P's, of the same name. O's next rename fails as
  above, and O puts the checkpoint back; if O dies first, P's next save or search does (``restore_replaced``).
- *O deletes an old checkpoint.* :meth:`FolderLock.remove` moves it aside, then looks again whose the lock is: still
  O's means that it was O's when the checkpoint was moved. If not, it goes back to its name; if O dies first, P puts it
  back as above.
- *O removes leftovers*, or what it found when it took the lock. It lists them, then looks whose the lock is, then
  removes what it listed: names that are drawn at random and older than any takeover that it has not seen.
- *O puts back what a dead save had moved away* while P replaces a checkpoint of that very name: P's save fails with an
  error, and the old checkpoint is the one that stays.
- *O renews, or releases.* It opens or deletes the file of its own token, which is gone.

So a checkpoint of P is never changed or lost, and nothing of O appears once P has begun to look.

Source: POSIX rename(2): "if newpath is a directory, it must be empty"; NFS shows a fresh state to whoever opens a file
(close-to-open consistency, https://man7.org/linux/man-pages/man5/nfs.5.html), so a lock is always looked at by
opening its file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ddpkit import storage
from ddpkit.errors import CheckpointError, FolderInUseError
from ddpkit.liveness import has_ended, is_ending, state_and_start, this_place
from ddpkit.logger import get_logger
from ddpkit.storage import REPLACED_PREFIX, STAGING_PREFIX, TRASH_PREFIX, remove_directory

__all__ = ["LOCK_NAME", "RENEWAL_SECONDS", "FolderLock", "Holder", "holder"]

logger = get_logger(__name__)

LOCK_NAME = ".lock"
RENEWAL_SECONDS = 10.0
RENEWALS_PER_LEASE = 3
CHANGES_OF_THE_LIVING = 2  # a run that is about to die may renew once more
GRACE_SECONDS = 2.0  # for a run of this host that may be about to end; less, where a renewal is less
LONGEST_NAP_SECONDS = 0.2
NFS_PREFIX = ".nfs"  # what an NFS client makes of a file that is deleted while one of its processes reads it

OCCUPIED = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}
GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
LONGEST_RECORD = 4096


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
        script: the name of what it runs.

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

    @classmethod
    def this_process(cls, token: str) -> Holder:
        """Describe this process.

        Args:
            token: of the lock that it is about to take.

        Returns:
            The description.

        Ranks: local.
        """
        pid = os.getpid()
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        script = Path((getattr(sys, "argv", None) or [""])[0]).name
        return cls(token, *this_place(), pid, state_and_start(pid)[1], since, ascii(script[:80])[1:-1])

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
        if not self.is_here():
            return False
        if self.pid == os.getpid():  # a lock of this very process, or of one that it took the place of with exec
            return all(hold.token != self.token for hold in list(_Holds.of_this_process().values()))
        return has_ended(self.pid, self.process_started)

    def is_ending(self) -> bool:
        """Say whether its process was killed, or ends by itself, and is not gone yet.

        Ranks: local.
        """
        return self.is_here() and is_ending(self.pid)

    def __str__(self) -> str:
        if not self.pid:
            return "somebody whose lock cannot be read"
        return f"process {self.pid} on {self.host} ({self.script or 'no script'}), since {self.since} UTC"


def holder(folder: str | os.PathLike[str]) -> Holder | None:
    """Say who holds a folder of checkpoints; changes nothing, takes nothing.

    Args:
        folder: the folder; one that does not exist is held by nobody.

    Returns:
        The holder, which may have ended (:meth:`Holder.has_ended`), or None.

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


@dataclass(frozen=True)
class _Found:
    """A lock as it was at one moment."""

    path: Path
    holder: Holder
    content: tuple[bytes, int]  # the file's bytes and its time in nanoseconds: whatever changes is alive


def _find(folder: Path) -> _Found | None:
    lock = folder / LOCK_NAME
    try:
        names = sorted(path.name for path in lock.iterdir())
    except NotADirectoryError:
        return _look(lock)
    except PermissionError as error:
        raise FolderInUseError(
            f"the lock {lock} is another user's, and this one may not look into it: whether that run lives cannot be "
            "told. Wait until the lock is gone, or give this run a folder of its own. If it is certain that the other "
            "has ended, remove the lock, or have its owner do so."
        ) from error
    except OSError:
        return None
    found = (_look(lock / name) for name in names if not name.startswith(NFS_PREFIX))
    return next((each for each in found if each is not None), None)


def _look(path: Path) -> _Found | None:
    raw = b""
    try:
        if stat.S_ISREG(path.lstat().st_mode):  # opening a pipe may never end
            with contextlib.suppress(PermissionError), path.open("rb") as file:
                raw = file.read(LONGEST_RECORD)
        changed = path.lstat().st_mtime_ns
    except OSError as error:
        if error.errno in GONE:
            return None
        raise CheckpointError(f"cannot read the lock {path}: {error}.") from error
    return _Found(path, _parse(path.name, raw), (raw, changed))


def _parse(token: str, raw: bytes) -> Holder:
    try:
        record = json.loads(raw.split(b"\n", 1)[0])
        named = {field.name: record[field.name] for field in fields(Holder)}
        typed = all(type(named[field.name]).__name__ == field.type for field in fields(Holder))
        if typed and named["pid"] > 0 and all(str(value).isprintable() for value in named.values()):
            return Holder(**named)
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return Holder(token)


# ---------------------------------------------------------------------------------------- waiting for a folder


class _Watch:
    """Waits until nobody alive holds a folder, and removes the locks of the dead; refuses if somebody lives."""

    def __init__(self, folder: Path, renewal_seconds: float) -> None:
        self.folder = folder
        self.renewal = renewal_seconds
        self.lease = RENEWALS_PER_LEASE * renewal_seconds
        self.since = time.monotonic()
        self.slept = 0.0
        self.seen: _Found | None = None
        self.changes = 0

    def until_free(self) -> None:
        while True:
            now = time.monotonic()  # before the look: what is unchanged after it was unchanged for as long
            found = _find(self.folder)
            if found is None:
                return
            if self.is_over(found, now):
                logger.warning("%s: taking over the lock of %s, which has ended.", self.folder, found.holder)
                _unlink(found.path)
            else:
                self.nap()

    def nap(self) -> None:
        """Sleep a little, but not for ever."""
        if self.slept > 3 * self.lease:
            raise self.refusal("others come and go", holder(self.folder))
        seconds = min(LONGEST_NAP_SECONDS, self.renewal / 20)
        time.sleep(seconds)
        self.slept += seconds

    def is_over(self, found: _Found, now: float) -> bool:
        if self.seen is None or self.seen.path != found.path:
            self.seen, self.since, self.changes = found, now, 0
            if not found.holder.has_ended():
                logger.announce("%s is held by %s: waiting to see whether it lives.", self.folder, found.holder)
        if found.holder.is_here():
            if found.holder.has_ended():
                return True
            patience = self.lease if found.holder.is_ending() else min(GRACE_SECONDS, self.renewal)
            if now - self.since >= patience:
                raise self.refusal("it is alive", found.holder)
            return False
        if self.seen.content != found.content:
            self.seen, self.since, self.changes = found, now, self.changes + 1
        if self.changes >= CHANGES_OF_THE_LIVING:
            raise self.refusal("it was renewed while this process watched", found.holder)
        return now - self.since >= self.lease

    def refusal(self, why: str, by: Holder | None) -> CheckpointError:
        if by is not None and by.is_here():
            end = f"end it (kill {by.pid})"
            rest = ""
        else:
            end = "end it"
            rest = f" If it is certain that the other has ended, remove {self.folder / LOCK_NAME}."
        return FolderInUseError(
            f"the folder {self.folder} is in use by another run: {by or 'others'} ({why}). Two runs cannot save into "
            f"one folder. Wait for the other, {end}, or give this run a folder of its own.{rest}"
        )


def _unlink(path: Path) -> None:
    """Delete a file. Never a directory: what was a file named ``.lock`` may be somebody's lock by now."""
    try:
        path.unlink()
    except OSError as error:
        if error.errno not in GONE and not (path.name == LOCK_NAME and path.is_dir()):
            raise CheckpointError(f"cannot remove the lock {path} of a run that has ended: {error}.") from error


# ---------------------------------------------------------------------------------------- what this process holds


class _Hold:
    """A folder's lock in the hands of this process, kept fresh by a thread."""

    def __init__(self, folder: Path, renewal_seconds: float) -> None:
        self.folder = folder
        self.renewal = renewal_seconds
        self.pid = os.getpid()
        self.token = uuid.uuid4().hex
        self.record = json.dumps(asdict(Holder.this_process(self.token))).encode() + b"\n"
        self.path = folder / LOCK_NAME / self.token
        self.beats = self.count = 0
        self.lost = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep_fresh, name=f"lock of {folder}", daemon=True)

    def take(self) -> None:
        """Take the lock; if that fails, for whatever reason, it is not taken."""
        try:
            self._take()
        except FolderInUseError:
            raise
        except (CheckpointError, OSError, RuntimeError) as error:  # the last: no thread can be started
            cause, lock = error.__cause__ or error, self.path.parent
            what = f"cannot save or delete a checkpoint in {self.folder}, because its lock {lock} cannot be taken"
            raise storage.save_error(lock, cause, what=what) from cause

    def _take(self) -> None:
        watch = _Watch(self.folder, self.renewal)
        watch.until_free()
        while not self._place():
            watch.nap()
            watch.until_free()
        try:
            for path in self.listed(STAGING_PREFIX):
                remove_directory(path)
            self._thread.start()
        except BaseException:
            self._remove()
            raise

    def listed(self, *prefixes: str) -> list[Path]:
        """Return the directories of these prefixes, none of which was made by a later owner of the lock."""
        names = _names(self.folder)
        self.require()  # after the listing: what another run makes from now on is not in it
        return [self.folder / name for name in names if name.startswith(prefixes) and (self.folder / name).is_dir()]

    def _place(self) -> bool:
        """Put the lock where it belongs; say whether that worked, or somebody else was faster."""
        lock = self.folder / LOCK_NAME
        staging = lock.with_name(f"{STAGING_PREFIX}{uuid.uuid4().hex[:12]}")
        storage.FILES.make_directory(staging)
        try:
            storage.FILES.write(staging / self.token, lambda file: file.write(self._text()))
            storage.FILES.sync_file(staging / self.token)
            storage.FILES.rename(staging, lock)
        except OSError as error:
            storage.discard_staging(staging)
            swept = error.errno == errno.ENOENT and self.folder.is_dir()  # by the fence of a faster one
            if error.errno in OCCUPIED or swept:
                return False
            raise
        except BaseException:
            storage.discard_staging(staging)
            raise
        return True

    def _text(self) -> bytes:
        return self.record + f"{self.beats:020d}\n".encode()

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
        complained = False
        while not self._done.wait(self.renewal):
            self.beats += 1
            try:
                with self.path.open("r+b") as file:  # never makes a file, and no other run has one of this name
                    file.seek(len(self.record))
                    file.write(self._text()[len(self.record) :])
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                if error.errno in GONE:
                    self.lost = True
                    logger.error("%s Nothing more can be saved there.", self._how_lost())  # noqa: TRY400 -- no traceback
                    return
                if not complained:
                    complained = True
                    logger.warning("Cannot renew the lock of %s: %s. It is tried again.", self.folder, error)

    def is_ours(self) -> bool:
        if self.lost or self.pid != os.getpid():
            return False
        try:
            with self.path.open("rb") as file:
                self.lost = file.readline() != self.record
        except OSError as error:
            if error.errno not in GONE:
                raise CheckpointError(f"cannot look at the lock {self.path}: {error}.") from error
            self.lost = True
        return not self.lost

    def require(self) -> None:
        if not self.is_ours():
            raise FolderInUseError(
                f"{self._how_lost()} Nothing is saved or deleted there any more, lest another run's checkpoints are "
                "harmed. End this run, or give it a folder of its own."
            )

    def _how_lost(self) -> str:
        by = None
        with contextlib.suppress(CheckpointError):
            by = holder(self.folder)
        if by is not None and by.token != self.token:
            return f"The folder {self.folder} is no longer this run's: it was taken over by {by}."
        if self.pid != os.getpid():
            return f"The folder {self.folder} is held by process {self.pid}, and not by this child of it."
        return f"The lock {self.path.parent} of this run is gone: it, or its folder, was removed."


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot list {folder}: {error}.") from error


class _Holds:
    """All that this process holds, by folder. A forked child starts with nothing."""

    pid = os.getpid()
    mutex = threading.RLock()
    by_folder: dict[str, _Hold] = {}  # noqa: RUF012 -- one for the process, on purpose

    @classmethod
    def of_this_process(cls) -> dict[str, _Hold]:
        if cls.pid != os.getpid():
            cls.pid, cls.mutex, cls.by_folder = os.getpid(), threading.RLock(), {}
        return cls.by_folder


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
        self._holds: list[_Hold] = []

    @property
    def held(self) -> bool:
        """Whether this lock was acquired by this process, and not yet released."""
        return bool(self._holds) and self._holds[-1].pid == os.getpid()

    def acquire(self) -> None:
        """Take the lock, or share it if this process has it already; then nobody else's half-made save can appear.

        Waits for a run that is about to end: two seconds for a process of this host that lives, up to three renewals
        for one that was killed and is not gone yet, and for the lock of another host to prove dead or alive.

        Raises:
            CheckpointError: another run holds it and lives; it was lost to another run; or the folder is not there,
                full or read-only: a run that could not save says so before it trains.

        Ranks: main only.

        State: removes the staging directories of others once the lock is taken.
        """
        folders = _Holds.of_this_process()
        with _Holds.mutex:
            if not self.held:
                self._holds = []  # what a forked child has inherited
            key = os.path.realpath(self.folder)
            hold = folders.get(key)
            if hold is None:
                hold = _Hold(self.folder, self._renewal_seconds)
                hold.take()
                folders[key] = hold
            else:
                hold.require()
            hold.count += 1
            self._holds.append(hold)

    def release(self) -> None:
        """Undo one :meth:`acquire`; the last one in this process gives the folder back. Without one, does nothing.

        Ranks: main only.
        """
        if not self.held:
            return
        folders = _Holds.of_this_process()
        with _Holds.mutex:
            hold = self._holds.pop()
            hold.count -= 1
            if not hold.count:
                for key in [key for key, each in folders.items() if each is hold]:
                    del folders[key]
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
            path: a directory in the folder. One that is gone already is no error.

        Raises:
            CheckpointError: as :meth:`require`, and the checkpoint is back at its place; or it cannot be moved.

        Ranks: main only.
        """
        self.require()
        aside = path.with_name(REPLACED_PREFIX + path.name)
        try:
            if os.path.lexists(aside) and os.path.lexists(path):
                self._drop(aside)
            storage.FILES.rename(path, aside)
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointError(f"cannot remove {path}: {error}. Its folder must be writable.") from error
        try:
            self.require()  # still ours, hence ours when it was moved
            remove_directory(aside)
        except CheckpointError as error:
            with contextlib.suppress(OSError):  # put back already by who holds the folder now
                storage.FILES.rename(aside, path)
            raise type(error)(str(error).replace(aside.name, path.name)) from error.__cause__

    def _drop(self, old: Path) -> None:
        """Delete what a save has replaced that died right after, unless the folder turns out to be another run's."""
        trash = old.with_name(f"{TRASH_PREFIX}{uuid.uuid4().hex[:12]}")
        storage.FILES.rename(old, trash)
        try:
            self.require()
        except CheckpointError:
            with contextlib.suppress(OSError):
                storage.FILES.rename(trash, old)
            raise
        remove_directory(trash)

    def clean(self) -> None:
        """Remove what interrupted saves have left, and put back what one of them had moved away.

        Raises:
            CheckpointError: as :meth:`require`; what cannot be removed is left without a word.

        Ranks: main only, with no save of this process in progress.
        """
        self.require()
        paths = self._holds[-1].listed(STAGING_PREFIX, TRASH_PREFIX)
        storage.restore_replaced(self.folder)
        for path in paths:
            with contextlib.suppress(CheckpointError):
                remove_directory(path)
