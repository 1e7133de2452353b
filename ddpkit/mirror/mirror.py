"""One output folder in an object store, and the folder of this machine that stands for it."""

from __future__ import annotations

import contextlib
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ddpkit.base import EARLIER, move_to_earlier, writing
from ddpkit.checkpointing import DIRECTORY_PREFIX, REMOTES
from ddpkit.compat import before_pools_end
from ddpkit.control import at_exit
from ddpkit.distributed import get_rank, is_local_rank_zero
from ddpkit.logger import get_logger, show_as
from ddpkit.mirror.checkpoints import MirrorRemote
from ddpkit.mirror.files import Files
from ddpkit.mirror.kept import KeptRemote
from ddpkit.mirror.local_folder import NOT_COPIED, Occupancy, remove_left_behind
from ddpkit.object_store import Objects, StoreLock

if TYPE_CHECKING:
    from ddpkit.checkpointing import Remote

logger = get_logger(__name__)

LOGS_OF_A_RANK = "log.rank*.txt"
RUN_LOCK = ".run.lock"  # in the store, as on a disk


class Mirror:
    """A folder of this machine that stands for a folder of an object store.

    Args:
        url: of the folder in the store.
        folder: of this machine.
        is_kept: whether it stays from run to run.
        travels: whether anything is copied.

    Attributes:
        url: as given.
        folder: as given.
        is_kept: as given.
        travels: as given.

    Raises:
        MissingExtraError: a package is missing.
        ConfigError: no store is known by this URL.

    Ranks: every rank makes its own; the main process copies.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        *,
        is_kept: bool,
        travels: bool,
    ) -> None:
        self.url = url
        self.folder = folder
        self.is_kept = is_kept
        self.travels = travels
        self.objects = Objects(url)
        self.files = Files(self.objects, folder)
        self._occupancy: Occupancy | None = None
        self._mutex = threading.RLock()
        self._has_begun = False
        self._run_lock: StoreLock | None = None
        self._locks: list[StoreLock] = []  # of the whole folder, and of those of checkpoints in it

    def open(self) -> None:
        """Make the folder, empty unless it is kept."""
        with writing(f"the mirror of {self.url}"):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            if is_local_rank_zero() and not self.is_kept:
                remove_left_behind()
                shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)
            if not self.is_kept:
                self._occupancy = Occupancy(self.folder)
        show_as(self.folder, self.objects.url)
        at_exit(self.leave)

    def objects_of(self, url: str) -> Objects:
        """Return the objects of a folder in the store."""
        inside = url.removeprefix(self.url).strip("/")
        return self.objects.inside(inside) if inside else self.objects

    def run_lock(self) -> StoreLock:
        """Return the lock that one run at a time has of the whole folder; always the same one."""
        if self._run_lock is None:
            self._run_lock = StoreLock(self.url, RUN_LOCK)
            self._locks.append(self._run_lock)
        return self._run_lock

    def remote(self, folder: Path) -> Remote:
        """Return what stands in the store for a folder of checkpoints in this mirror."""
        place = folder.relative_to(self.folder).as_posix()
        kind = KeptRemote if self.is_kept else MirrorRemote
        remote = kind(self, folder, "" if place == "." else place)
        self._locks.append(remote.lock)
        return remote

    # ------------------------------------------------------------------------------------ copying

    def begin(self) -> None:
        """Copy the files of the store down, before a run writes its own.

        Raises:
            CheckpointError: the store cannot be asked.

        Ranks: the first of each machine.
        """
        with self._mutex:
            if self._has_begun or not self.travels:
                return
            count = self.files.pull(replaces=self.is_kept and not self._keeps_own_files())
            self._has_begun = True
            before_pools_end(self._copy_last)  # which packages of stores send their requests by
            at_exit(self.close)  # before the locks are given back, which were taken before this
        if count:
            logger.debug("%d files were copied from %s to %s", count, self.objects.url, self.folder)

    def read_all(self) -> None:
        """Copy the files of the store down, of a run that this process is not: nothing goes up."""
        self.files.pull(replaces=True)

    def _keeps_own_files(self) -> bool:
        """Return whether the files of this machine are at least as new as those in the store, in a
        mirror that stays; files of another run are moved away.
        """
        folders = {path.parent for path in self.folder.rglob(f"{DIRECTORY_PREFIX}+*")}
        found = [
            REMOTES.of(folder)
            for folder in folders
            if not _is_aside(folder.relative_to(self.folder))
        ]
        kept = [remote for remote in found if isinstance(remote, KeptRemote)]
        if any(remote.is_of_another_run() for remote in kept):
            move_to_earlier(path for path in self.folder.iterdir() if path.name[0] != ".")
            return False
        return any(remote.is_ahead() for remote in kept)

    def push(self, lock: StoreLock | None = None) -> None:
        """Copy up the files that have changed.

        Args:
            lock: of a folder of checkpoints in this one, if it is held.

        Raises:
            CheckpointError: they cannot be copied.
            FolderInUseError: another run has taken a lock over; nothing is copied from then on.

        Ranks: main only.
        """
        if not self.travels or not self._has_begun or self._is_lost:
            return
        self._require(lock)
        self.files.push()

    def _require(self, lock: StoreLock | None = None) -> None:
        """Make sure that no other run has the folder in the store, by the locks that are held."""
        for each in (lock, self._run_lock):
            if each is not None and each.held:
                each.require()

    @property
    def _is_lost(self) -> bool:
        """Whether the folder in the store, or one of checkpoints in it, is another run's."""
        return any(lock.lost for lock in self._locks)

    # ------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Copy up what is left; what fails is told. Then :meth:`begin` begins anew."""
        with self._mutex:
            self._copy_last()
            self._has_begun = False

    def leave(self) -> None:
        """Leave the folder; the last process of the machine removes it, unless it is kept."""
        self.close()
        occupancy = self._occupancy
        self._occupancy = None
        if occupancy is not None:
            occupancy.end(removes=not (self.folder / NOT_COPIED).exists())

    def _copy_last(self) -> None:
        if not self.travels or not self._has_begun or self._is_lost:
            return
        try:
            self._require()
            if not get_rank():
                self.files.push()
            elif is_local_rank_zero():
                self.files.push(LOGS_OF_A_RANK)
        except Exception as error:  # noqa: BLE001 -- at exit a package may have no threads any more
            with contextlib.suppress(OSError):
                (self.folder / NOT_COPIED).touch()
            logger.warning("The last files of this run stay in %s: %s", str(self.folder), error)


def _is_aside(folder: Path) -> bool:
    """Return whether checkpoints in a folder of the mirror are none that a run goes on from."""
    return any(part.startswith((EARLIER, ".")) for part in folder.parts)
