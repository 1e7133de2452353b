"""What holds the checkpoints of a folder besides the folder itself, such as an object store.

Of most folders there is no such thing: :class:`Remote` itself does nothing. What the folder is a
mirror of is told by whoever makes the mirror (:data:`REMOTES`), so that a Checkpointer, an average
of checkpoints or a search for weights finds it by the folder alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from ddpkit.checkpointing.checkpoint import Checkpoint
from ddpkit.checkpointing.places import plain_path
from ddpkit.checkpointing.storage import FolderLock, VerifyMode, verify


class Remote:
    """The second place of a folder's checkpoints: here there is none.

    Ranks: main only, but for :meth:`fetch_same` and :meth:`fetch_same_file`.

    Example:
        >>> Remote().others((), print)
        []
    """

    #: How messages call it; empty where there is none.
    shown = ""

    # ---------------------------------------------------------------------------------- finding

    def others(
        self,
        present: Collection[str],
        report: Callable[[Path, str], object],
    ) -> list[Checkpoint]:
        """Return the complete checkpoints that are there and not in the folder.

        Args:
            present: names of the checkpoints in the folder.
            report: called with the path of one that is damaged, and the reason.
        """
        return []

    def has(self, name: str) -> bool:
        """Return whether a checkpoint of this name is there."""
        return False

    def faults(
        self,
        path: Path,
        mode: VerifyMode,
    ) -> list[str]:
        """Say why a checkpoint is not what was saved, as :func:`verify` does."""
        return verify(path, mode)

    def fetch(self, path: Path) -> None:
        """Copy a checkpoint down to its place in the folder, complete, unless it is there.

        Raises:
            CheckpointError: it cannot be copied.
        """

    def fetch_file(self, path: Path) -> None:
        """Copy a file that is no part of a checkpoint down, unless it is here or not there.

        Raises:
            CheckpointError: it cannot be copied.
        """

    def offer(self, name: str) -> None:
        """See to it that a checkpoint of the folder is there, or on its way, for other machines."""

    def fetch_same(
        self,
        path: Path,
        manifest: str,
        mode: VerifyMode,
    ) -> None:
        """Have the checkpoint that rank 0 has in the folder of another machine, be it that one of
        this name is there, or that rank 0's is still on its way.

        Args:
            path: of the checkpoint on this machine.
            manifest: SHA-256 of rank 0's manifest.
            mode: how a copy that is here already is verified.

        Raises:
            CheckpointError: it does not come in time, or cannot be copied.

        Ranks: any; those of one machine do it once.
        """

    def fetch_same_file(
        self,
        path: Path,
        sha256: str,
    ) -> None:
        """Likewise, a file that is no part of a checkpoint.

        Raises:
            CheckpointError: the one that is there is another, or cannot be copied.
        """

    def folder_with(
        self,
        path: Path,
        file: str,
    ) -> Path:
        """Return a folder that holds this one file of a checkpoint."""
        return path

    def behind_link(self, path: Path) -> Path:
        """Return the checkpoint that a link stands for there, where the folder has no such link."""
        return path

    # ----------------------------------------------------------------------------------- saving

    def acquire(self) -> None:
        """Take the lock of the other place, beside that of the folder."""

    def release(self) -> None:
        """Undo one :meth:`acquire`."""

    def require(self) -> None:
        """Make sure that the lock is still held, right before something is written or deleted."""

    def clean(self) -> None:
        """Remove what interrupted saves have left there."""

    def put(
        self,
        staging: Path,
        name: str,
    ) -> None:
        """Store a sealed checkpoint, before it gets its name in the folder."""

    def saved(self, name: str) -> None:
        """Hear that a checkpoint has its name in the folder."""

    def deleted(self, names: Collection[str]) -> None:
        """Delete there what the folder has no more."""

    def set_aside(
        self,
        names: Collection[str],
        aside: str,
    ) -> None:
        """Move checkpoints into a subfolder there."""

    # ------------------------------------------------------------------------------------- runs

    def begin(self) -> None:
        """Hear that a run begins which saves into the folder."""

    def finish(
        self,
        *,
        failed: bool = False,
    ) -> None:
        """Wait, for a limited time, until all that was saved is there.

        Args:
            failed: whether the run ends by an exception.

        Raises:
            CheckpointError: it is not.
        """


NO_REMOTE = Remote()


class Remotes:
    """Which folders are mirrors, and of what.

    State: as long as the process.
    """

    def __init__(self) -> None:
        self._makers: dict[Path, Callable[[Path], Remote]] = {}
        self._made: dict[Path, Remote] = {}
        self._mutex = threading.RLock()

    def register(
        self,
        root: Path,
        make: Callable[[Path], Remote],
    ) -> None:
        """Note that a folder is a mirror, with all folders in it.

        Args:
            root: the folder.
            make: makes the remote of a folder of checkpoints in it.
        """
        with self._mutex:
            self._makers[plain_path(root)] = make

    def forget(self, root: Path) -> None:
        """Undo :meth:`register`."""
        root = plain_path(root)
        with self._mutex:
            self._makers.pop(root, None)
            self._made = {
                path: made for path, made in self._made.items() if not path.is_relative_to(root)
            }

    def of(self, folder: str | os.PathLike[str]) -> Remote:
        """Return the remote of a folder of checkpoints; :data:`NO_REMOTE` of most."""
        if not self._makers:
            return NO_REMOTE
        path = plain_path(folder)
        with self._mutex:
            if path not in self._made:
                roots = [root for root in self._makers if path.is_relative_to(root)]
                if not roots:
                    return NO_REMOTE
                nearest = max(roots, key=lambda root: len(root.parts))
                self._made[path] = self._makers[nearest](path)
            return self._made[path]


REMOTES = Remotes()


class MirrorLock(FolderLock):
    """The lock of a folder that is a mirror, together with that of what it mirrors.

    Args:
        folder: as of :class:`FolderLock`.
        remote: has the other lock.

    Ranks: main only.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        remote: Remote,
    ) -> None:
        super().__init__(folder)
        self._remote = remote

    def acquire(self) -> None:
        """Take both locks, that of the folder first."""
        super().acquire()
        try:
            self._remote.acquire()
        except BaseException:
            super().release()
            raise

    def release(self) -> None:
        """Undo one :meth:`acquire`."""
        was_held = self.held
        super().release()
        if was_held:
            self._remote.release()

    def require(self) -> None:
        """Make sure that both locks are still held."""
        super().require()
        self._remote.require()

    def clean(self) -> None:
        """Remove what interrupted saves have left in both places."""
        super().clean()
        self._remote.clean()


def lock_of(folder: str | os.PathLike[str]) -> FolderLock:
    """Return a lock of a folder, and of what it mirrors, where it is a mirror."""
    remote = REMOTES.of(folder)
    return FolderLock(folder) if remote is NO_REMOTE else MirrorLock(folder, remote)
