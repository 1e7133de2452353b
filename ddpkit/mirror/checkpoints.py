"""The checkpoints of one folder of a mirror: which are in the store, and how they are copied."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ddpkit.base import earlier_folder
from ddpkit.checkpointing import (
    MANIFEST_NAME,
    META_NAME,
    STAGING_PREFIX,
    SUFFIX,
    Checkpoint,
    ObjectFolder,
    Remote,
    target_of,
    verify,
)
from ddpkit.errors import CheckpointError, FolderInUseError, ObjectStoreError
from ddpkit.logger import get_logger
from ddpkit.mirror.machine_copies import MachineCopies
from ddpkit.mirror.run_id import RUN_FILE, decoded, encoded, new_id, read_local, write_local
from ddpkit.object_store import StoreLock

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ddpkit.checkpointing import VerifyMode
    from ddpkit.object_store import Objects

logger = get_logger(__name__)

LINKS = ("latest", "best")
FETCHED = ".fetched"  # single files of checkpoints that are in the store alone


class Copies(Protocol):
    """What the checkpoints of a mirror ask of it.

    Attributes:
        url: of the folder in the store.
    """

    url: str

    def objects_of(self, url: str) -> Objects:
        """Return the objects of a folder in the store."""
        ...

    def begin(self) -> None:
        """Copy the other files down."""
        ...

    def push(self, lock: StoreLock | None = None) -> None:
        """Copy the other files up, if the lock is still held."""
        ...


class MirrorRemote(Remote):
    """The checkpoints of a folder in a mirror, in the store.

    A save is in the store before it has its name in the folder. While this process holds the lock,
    nobody else changes what is there, and it is listed once.

    Args:
        mirror: that the folder is in.
        folder: of this machine.
        place: of the folder in the mirror; empty: it is the mirror itself.

    Attributes:
        lock: of the folder in the store.

    Ranks: main only, but for :meth:`fetch_same` and :meth:`fetch_same_file`.
    """

    def __init__(
        self,
        mirror: Copies,
        folder: Path,
        place: str,
    ) -> None:
        self._mirror = mirror
        self._folder = folder
        self._url = f"{mirror.url}/{place}" if place else mirror.url
        self._store = ObjectFolder(self._url)
        self.lock = StoreLock(self._url)
        self._holds = 0
        self._names: set[str] | None = None
        self._found: dict[str, Checkpoint] = {}
        self._links: dict[str, str | None] = {}
        self._is_clean = False
        self._changing = threading.Lock()  # one thread at a time changes what is in the store
        self.shown = self._store.url

    # ---------------------------------------------------------------------------------- finding

    def others(
        self,
        present: Collection[str],
        report: Callable[[Path, str], object],
    ) -> list[Checkpoint]:
        """Return the complete checkpoints that are in the store and not in the folder."""
        found = []
        for name in sorted(self._all_names() - set(present)):
            try:
                found.append(self._read(name))
            except ObjectStoreError:
                raise
            except CheckpointError as error:
                report(self._folder / name, str(error))
        return found

    def has(self, name: str) -> bool:
        """Return whether a checkpoint of this name is in the store."""
        return name in self._all_names()

    def faults(
        self,
        path: Path,
        mode: VerifyMode,
    ) -> list[str]:
        """Say why a checkpoint is not what was saved: in the folder, or else in the store."""
        if path.exists() or mode == "off":
            return verify(path, mode)
        return self._store.verify(path.name, mode)

    def fetch(self, path: Path) -> None:
        """Copy a checkpoint down, unless it is in the folder; it is verified then."""
        if path.exists():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        logger.info("Copying %s/%s to %s", self.shown, path.name, str(self._folder))
        self._store.get(path.name, self._folder)

    def fetch_file(self, path: Path) -> None:
        """Copy a file that is no part of a checkpoint down, unless it is here or not there."""
        if path.exists():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._store.get_file(path.name, path)

    def fetch_same(
        self,
        path: Path,
        manifest: str,
        mode: VerifyMode,
    ) -> None:
        """Have the checkpoint that rank 0 has in the folder of this machine, too."""
        MachineCopies(self._store, self._folder).have(path.name, manifest, mode)

    def fetch_same_file(
        self,
        path: Path,
        sha256: str,
    ) -> None:
        """Likewise, a file that is no part of a checkpoint."""
        MachineCopies(self._store, self._folder).have_file(path.name, sha256)

    def folder_with(
        self,
        path: Path,
        file: str,
    ) -> Path:
        """Return a folder of this machine that holds one file of a checkpoint."""
        if path.exists():
            return path
        folder = self._folder / FETCHED / path.name
        with contextlib.suppress(FileNotFoundError):
            data = self._store.read_entry(path.name, file)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(data)
        return folder

    def _all_names(self) -> set[str]:
        if self._names is None or not self._holds:
            self._names = set(self._store.names())
        return self._names

    def _read(self, name: str) -> Checkpoint:
        known = self._found.get(name)
        if known is not None and self._holds:
            return known
        meta = self._store.meta(name)
        files = {
            file.removesuffix(SUFFIX): self._folder / name / file
            for file in sorted({entry.partition("/")[0] for entry in self._store.entries(name)})
            if file.endswith(SUFFIX)
        }
        if not isinstance(meta.get("unixtime"), (int, float)):
            raise CheckpointError(f"{META_NAME} does not say when the checkpoint was saved")
        self._found[name] = Checkpoint(self._folder / name, meta, files)
        return self._found[name]

    def behind_link(self, path: Path) -> Path:
        """Return the checkpoint that ``latest`` or ``best`` stands for in the store."""
        if path.name not in LINKS or os.path.lexists(path):
            return path
        try:
            name = self._objects.read(path.name).decode().strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return path
        return path.with_name(name) if self.has(name) else path

    # ----------------------------------------------------------------------------------- saving

    def acquire(self) -> None:
        """Take the lock of the folder in the store."""
        self.lock.acquire()
        if not self._holds:
            self._names = None
            self._found.clear()
        self._holds += 1

    def release(self) -> None:
        """Undo one :meth:`acquire`."""
        self._holds -= 1
        self.lock.release()

    def require(self) -> None:
        """Make sure that the lock is still held."""
        self.lock.require()

    def clean(self) -> None:
        """Remove what interrupted saves have left in the store, once."""
        if not self._is_clean:
            self._store.clean(self.lock)
            self._is_clean = True

    def put(
        self,
        staging: Path,
        name: str,
    ) -> None:
        """Copy a sealed checkpoint up, after the files that a run from there goes on with."""
        self._mirror.push(self.lock)
        # the store calls it as the directory is called
        parent = self._folder / f"{STAGING_PREFIX}{uuid.uuid4().hex[:12]}"
        parent.mkdir()
        try:
            (parent / name).symlink_to(staging.absolute(), target_is_directory=True)
            self._store.put(parent / name, lock=self.lock)
        finally:
            shutil.rmtree(parent, ignore_errors=True)
        self._all_names().add(name)
        self._found.pop(name, None)

    def saved(self, name: str) -> None:
        """Have the object ``latest`` name the checkpoint."""
        self._copy_links()

    def deleted(self, names: Collection[str]) -> None:
        """Delete checkpoints in the store."""
        self._copy_links()
        for name in names:
            if self.has(name):
                self.lock.require()
                self._store.delete(name)
                self._all_names().discard(name)

    def set_aside(
        self,
        names: Collection[str],
        aside: str,
    ) -> None:
        """Move checkpoints into a subfolder of the store, where no search finds them."""
        for name in names:
            if not self.has(name):
                continue
            source = self._folder / name
            if source.exists() and not self._is_as_there(source):
                own = self._folder / aside
                into = earlier_folder(self._folder, [name], other_than=own)
                source = self._store.get(name, into)
            else:
                self.fetch(source)
            self._move_there(source, aside)
        if not self._all_names():
            self.note_run(begins=True)
        self._copy_links()

    def _is_as_there(self, path: Path) -> bool:
        """Return whether a checkpoint of this machine is the one of its name in the store."""
        manifest = self._store.read_entry(path.name, MANIFEST_NAME)
        return (path / MANIFEST_NAME).read_bytes() == manifest

    def _move_there(
        self,
        copy: Path,
        aside: str,
    ) -> None:
        """Move a checkpoint of the store into a subfolder of it.

        Args:
            copy: of it on this machine.
            aside: name of the subfolder.
        """
        with self._changing:
            there = ObjectFolder(f"{self._url}/{aside}")
            there.put(copy, lock=self.lock)
            self.lock.require()
            self._store.delete(copy.name)
        self._all_names().discard(copy.name)

    def _copy_links(self) -> None:
        """Have a small object with the name of a checkpoint stand for each link of the folder."""
        for link in LINKS:
            target = target_of(self._folder / link)
            if target is not None and not self.has(target):
                continue  # it is on its way
            if link in self._links and self._links[link] == target:
                continue
            if target is not None:
                self._objects.write(link, f"{target}\n".encode())
            elif link in self._links:
                self._objects.delete(link)
            self._links[link] = target

    # ------------------------------------------------------------------------------------- runs

    def begin(self) -> None:
        """Copy the other files down, before a run writes its own."""
        self._mirror.begin()
        self.note_run()

    def run_there(self) -> str | None:
        """Return the run that the checkpoints in the store are of."""
        try:
            return decoded(self._objects.read(RUN_FILE))
        except FileNotFoundError:
            return None

    def note_run(
        self,
        *,
        begins: bool = False,
    ) -> None:
        """Note, here and in the store, which run the checkpoints are of.

        Args:
            begins: whether a new run begins.
        """
        there = None if begins else self.run_there()
        run = there or (None if begins else read_local(self._folder)) or new_id()
        if there != run:
            self._objects.write(RUN_FILE, encoded(run))
        write_local(self._folder, run)

    @property
    def _objects(self) -> Objects:
        return self._mirror.objects_of(self._url)

    def finish(
        self,
        *,
        failed: bool = False,
    ) -> None:
        """Copy the last files up."""
        try:
            self._mirror.push(self.lock)
        except FolderInUseError:
            raise
        except CheckpointError as error:
            logger.warning("%s The next save, or the end of the process, copies them.", error)
