"""The right to write into a folder of a store, for one run at a time.

A store has no locks. What it has is an object that is made only where there is none. So the lock is
an object that names its owner, :data:`LOCK_NAME`, and three things follow from the fact that
nothing removes it when its owner is killed:

- The owner renews it: a thread writes a small object beside it, under a name that only this owner
  has, every :data:`RENEWAL_SECONDS`. The lock itself is never written again by its owner: a process
  that was stopped for minutes and goes on cannot overwrite the record of the run that has taken
  over.
- A lock that was not renewed for :data:`LEASE_SECONDS`, by the clock of the process that waits, is
  taken over; at once where its owner was a process of this machine that has ended. Of several that
  wait one may: it makes an object whose name tells which record it is about to replace, if there is
  none. A run that is alive is seen within one renewal, and is an error at once.
- The owner asks, with :meth:`StoreLock.require`, before each thing that cannot be taken back
  whether the record is still its own.

Where a store cannot decide who was first (``creates`` of its kind in
:mod:`ddpkit.object_store.filesystem`, and a look at whether it really does), the run that starts
last has the folder, and a warning says so.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from ddpkit.errors import CheckpointError, FolderInUseError, ObjectStoreError
from ddpkit.logger import get_logger
from ddpkit.object_store.failures import explained
from ddpkit.object_store.filesystem import NOTHING
from ddpkit.object_store.objects import Objects
from ddpkit.object_store.owner import Owner, decoded, this_process

logger = get_logger(__name__)

LOCK_NAME = ".lock"
RENEWAL_SECONDS = 10.0
LEASE_SECONDS = 60.0
LOOK_SECONDS = 1.0
GRACE_SECONDS = 2.0  # for a run of this machine that is about to end


class _Hold:
    """A lock of this process in a store, and how often it was acquired."""

    def __init__(self, objects: Objects, name: str, owner: Owner) -> None:
        self.objects = objects
        self.name = name
        self.owner = owner
        self.process = os.getpid()
        self.count = 0
        self.excludes = True
        self._ended = threading.Event()
        self._renewals = 0
        self.renew()
        thread = threading.Thread(
            target=self._keep,
            name=f"ddpkit lock of {objects.url}",
            daemon=True,
        )
        thread.start()
        self._thread = thread

    def renew(self) -> None:
        """Show those that wait that this run is alive."""
        self._renewals += 1
        self.objects.write(_alive(self.name, self.owner), str(self._renewals).encode())

    def _keep(self) -> None:
        while not self._ended.wait(RENEWAL_SECONDS):
            try:
                self.renew()
            except Exception as error:  # noqa: BLE001 -- tried again; a loss is seen by `require`
                logger.warning(
                    "The lock of %s was not renewed: %s: %s",
                    self.objects.url,
                    type(error).__name__,
                    error,
                )

    def require(self) -> None:
        """Raise if the record is another's."""
        found = _owner_of(self.objects, self.name)
        if found != self.owner:
            _LOST.add((self.objects.place, self.name))
            who = "nobody" if found is None else found.words
            raise FolderInUseError(
                f"The folder {self.objects.url} is no longer locked by this run: its lock "
                f"{self.name} names {who}. Nothing more is saved or deleted there. End this run, "
                "or give it a folder of its own."
            )

    def give_back(self) -> None:
        self._ended.set()
        self._thread.join()
        try:
            if _owner_of(self.objects, self.name) == self.owner:
                self.objects.delete(self.name)
            self.objects.delete(_alive(self.name, self.owner))
        except ObjectStoreError as error:
            logger.warning(
                "The lock of %s was not given back; the next run waits %.0f seconds for it: %s",
                self.objects.url,
                LEASE_SECONDS,
                error,
            )


def _alive(name: str, owner: Owner) -> str:
    return f"{name}.alive-{owner.token}"


def _claim(name: str, owner: Owner) -> str:
    return f"{name}.after-{owner.token}"


def _owner_of(objects: Objects, name: str) -> Owner | None:
    try:
        return decoded(objects.read(name))
    except FileNotFoundError:
        return None


def _content(objects: Objects, name: str) -> bytes | None:
    try:
        return objects.read(name)
    except FileNotFoundError:
        return None


# ------------------------------------------------------------------------------------------- taking


def _take(objects: Objects, name: str) -> _Hold:
    own = this_process()
    waiting = _Waiting(objects, name)
    while not _is_created(objects, name, own):
        holder = _owner_of(objects, name)
        if holder is None:  # given back meanwhile
            continue
        # a lock of this process that is not among the held ones could not be given back
        if holder.is_gone or holder.is_of_process_of(own) or waiting.is_over(holder):
            if _is_taken_over(objects, name, holder, own):
                break
            waiting = _Waiting(objects, name)
    hold = _Hold(objects, name, own)
    hold.excludes = _does_exclude(objects, name, own)
    return hold


def _is_created(objects: Objects, name: str, own: Owner) -> bool:
    """Make the lock's object; also true where an attempt has made it whose answer was lost."""
    try:
        objects.create(name, own.encoded())
    except FileExistsError:
        return _owner_of(objects, name) == own
    return True


class _Waiting:
    """Looks whether the owner of a lock is alive: seen by what it renews, and by this clock."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self._name = name
        self._seen: tuple[object, ...] | None = None
        self._since = self._begun = time.monotonic()

    def is_over(self, holder: Owner) -> bool:
        """Wait a moment; say whether the lock was not renewed for so long that its owner is gone.

        Raises:
            FolderInUseError: its owner is alive.
        """
        seen = holder, _content(self._objects, _alive(self._name, holder))
        now = time.monotonic()
        renewed = self._seen is not None and self._seen[0] == holder and self._seen != seen
        if renewed or (holder.is_here and now > self._begun + GRACE_SECONDS):
            raise FolderInUseError(
                f"the folder {self._objects.url} is in use by another run: {holder.words}. Wait "
                "for it, end it, or give this run a folder of its own."
            )
        if self._seen != seen:
            self._tell(holder)
            self._seen = seen
            self._since = now
        if now > self._since + LEASE_SECONDS:
            return True
        time.sleep(LOOK_SECONDS)
        return False

    def _tell(self, holder: Owner) -> None:
        if not holder.is_here:
            logger.info(
                "%s is locked by %s: waiting up to %.0f seconds for a sign of it.",
                self._objects.url,
                holder.words,
                LEASE_SECONDS,
            )


def _is_taken_over(objects: Objects, name: str, holder: Owner, own: Owner) -> bool:
    """Replace the record of an owner that is gone, if nobody else does."""
    claim = _claim(name, holder)
    try:
        objects.create(claim, own.encoded())
    except FileExistsError:
        if not _is_left(objects, claim, own):
            return False
    try:
        if _owner_of(objects, name) != holder:  # another one has replaced it, and its claim is gone
            return False
        objects.write(name, own.encoded())
        objects.delete(_alive(name, holder))
    finally:
        objects.delete(claim)
    logger.warning(
        "%s was locked by %s, which is gone: this run has taken it over.",
        objects.url,
        holder.words,
    )
    return True


def _is_left(objects: Objects, claim: str, own: Owner) -> bool:
    """Wait for the process that is about to replace a record; say whether it was killed there."""
    claimant = _owner_of(objects, claim)
    if claimant == own:  # an attempt whose answer was lost
        return True
    end = time.monotonic() + LEASE_SECONDS
    while claimant is not None and not claimant.is_gone and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
        if _owner_of(objects, claim) != claimant:
            return False
    if claimant is None or _owner_of(objects, claim) != claimant:
        return False
    objects.delete(claim)
    return False  # and begin again: of several that wait one makes it anew


def _does_exclude(objects: Objects, name: str, own: Owner) -> bool:
    """Say whether the store refuses to make an object that is there; warn where it does not, and so
    keeps nobody out.
    """
    excludes = objects.kind.creates
    if excludes:
        try:
            objects.create(name, own.encoded())
            excludes = False
        except FileExistsError:
            pass
    if not excludes:
        logger.warning_once(
            "%s cannot be locked: this store does not say whether an object was there before. "
            "Nothing stops a second run.",
            objects.url,
        )
    return excludes


# -------------------------------------------------------------------------------------------- lock


_HELD: dict[Hashable, _Hold] = {}
_LOST: set[Hashable] = set()  # found to be another run's, whoever asked
_MUTEX = threading.RLock()


@functools.cache
def _prepare() -> None:
    """Have forked children forget what this process holds, and give it back when it exits."""
    os.register_at_fork(
        before=_MUTEX.acquire,
        after_in_parent=_MUTEX.release,
        after_in_child=_hold_nothing,
    )
    atexit.register(_give_all_back)


def _hold_nothing() -> None:
    _HELD.clear()
    _MUTEX.release()


def _give_all_back() -> None:
    with _MUTEX:
        holds = list(_HELD.values())
        _HELD.clear()
    for hold in holds:
        try:
            hold.give_back()
        except Exception as error:  # noqa: BLE001 -- the process ends; the others are given back
            logger.warning(
                "The lock of %s was not given back: %s: %s",
                hold.objects.url,
                type(error).__name__,
                error,
            )


class StoreLock:
    """The right to write into a folder of a store, for one process at a time.

    Within a process several locks of one folder share it, and it is given back with the last, or
    when the process exits. A forked child holds nothing. After ``kill -9`` the next run on this
    machine has it at once, and one on another machine after a minute.

    Args:
        url: of the folder; nothing need be there.
        name: of the lock's object in it.
        storage_options: for the filesystem of fsspec.

    Attributes:
        url: of the folder, as it is shown.

    Raises:
        MissingExtraError: a package is missing; the message names it.
        ConfigError: no filesystem has this protocol.

    Ranks: main only (one process of a run).

    State: objects in the folder, and a thread, as long as it is held.

    Example:
        >>> lock = StoreLock("memory://bucket/run")
        >>> with lock.hold():
        ...     lock.require()
        ...     lock.held
        True
        >>> lock.held
        False
    """

    def __init__(
        self,
        url: str,
        name: str = LOCK_NAME,
        storage_options: Mapping[str, Any] = NOTHING,
    ) -> None:
        self._objects = Objects(url, storage_options)
        self._name = name
        self._holds: list[_Hold] = []

    @property
    def url(self) -> str:
        """The folder, as it is shown."""
        return self._objects.url

    @property
    def held(self) -> bool:
        """Whether this lock was acquired by this process, and not yet released."""
        return bool(self._holds) and self._holds[-1] in _HELD.values()

    @property
    def excludes(self) -> bool:
        """Whether a held lock keeps other runs out: its store can decide who was first."""
        return self.held and self._holds[-1].excludes

    @property
    def lost(self) -> bool:
        """Whether this process has found that it is another run's, and has not taken it since."""
        return self._key in _LOST

    @property
    def token(self) -> str:
        """What tells this hold of the lock from all others; empty where it is not held."""
        return self._holds[-1].owner.token if self.held else ""

    @property
    def _key(self) -> Hashable:
        return self._objects.place, self._name

    def acquire(self) -> None:
        """Take the lock, or share it if this process has it already.

        Waits two seconds for a run of this machine that is about to end, and up to a minute for a
        sign of a run of another machine.

        Raises:
            FolderInUseError: another run has it, or this one has lost it.
            ObjectStoreError: the store cannot be reached, or refuses: a run that could not save
                there says so before it trains. It is a ``CheckpointUsageError`` too where something
                has to be set up.

        Ranks: main only.
        """
        _prepare()
        with _MUTEX:
            hold = _HELD.get(self._key) or self._taken()
            if self._key not in _HELD:
                _LOST.discard(self._key)
            _HELD[self._key] = hold
            hold.require()
            hold.count += 1
            self._holds.append(hold)

    def _taken(self) -> _Hold:
        try:
            return _take(self._objects, self._name)
        except FolderInUseError:
            _LOST.add(self._key)
            raise
        except FileNotFoundError as error:
            raise explained(self.url, f"write {self._name}", error) from error

    def release(self) -> None:
        """Undo one :meth:`acquire`; the last one in this process gives the folder back. Without
        one, does nothing.

        Ranks: main only.
        """
        with _MUTEX:
            if not self.held:
                return
            hold = self._holds.pop()
            hold.count -= 1
            if not hold.count:
                del _HELD[self._key]
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
        """Make sure that the folder is still this run's, right before something in it is replaced
        or deleted. Costs one small request; may be called from any thread.

        Raises:
            CheckpointError: the lock is not held, or another run has taken it over.
            ObjectStoreError: the store cannot be asked.

        Ranks: main only.
        """
        if not self.held:
            raise CheckpointError(f"the lock of {self.url} is not held: acquire it first.")
        self._holds[-1].require()
