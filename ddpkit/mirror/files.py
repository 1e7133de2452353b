"""The files of an output folder that are no checkpoints: copied up where they have changed, and
down at the start of a run.

A file stands in the store before the checkpoint that counts its rows: a run that goes on from there
finds all of them, and takes out those that it writes again, as on a disk.
"""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ddpkit.base import EARLIER
from ddpkit.checkpointing import DIRECTORY_PREFIX
from ddpkit.logger import get_logger
from ddpkit.object_store import NameIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpkit.object_store import Objects

logger = get_logger(__name__)

BLOCK_BYTES = 8 << 20
ALL = "*"
_LINKS = ("latest", "best")
# names the files that were about to be copied up
FILE_INDEX = NameIndex(".files.json", "files", forbidden="\0")


class Files:
    """Copies the files of a folder to and from a store.

    Args:
        objects: of the store's folder.
        folder: of this machine.

    Ranks: main only, but for :meth:`pull`, which the first of each machine calls.
    """

    def __init__(
        self,
        objects: Objects,
        folder: Path,
    ) -> None:
        self._objects = objects
        self._folder = folder
        self._mutex = threading.Lock()
        # as they were when they were copied, by name: size and time of the change
        self._copied: dict[str, tuple[int, int]] = {}
        self._indexed: set[str] = set()

    def pull(
        self,
        *,
        replaces: bool,
    ) -> int:
        """Copy files down.

        Args:
            replaces: whether files that are here are replaced by those of the store.

        Returns:
            How many were copied.

        Raises:
            ObjectStoreError: the store cannot be asked.
        """
        count = 0
        with self._mutex:
            self._indexed = FILE_INDEX.read(self._objects)
            for name in sorted({*self._objects.sizes(), *self._indexed}):
                if not _travels(PurePosixPath(name), is_pull=True):
                    continue
                path = self._folder / name
                if (replaces or not path.exists()) and self._get(name, path):
                    self._copied[name] = _state(path)
                    count += 1
        return count

    def push(self, only: str = ALL) -> int:
        """Copy up the files that have changed since they were copied, and delete those that are
        gone.

        Args:
            only: pattern of the names at the top.

        Returns:
            How many were copied.

        Raises:
            ObjectStoreError: the store cannot be asked.
        """
        count = 0
        with self._mutex:
            present = dict(self._present())
            if only == ALL and not self._indexed.issuperset(present):
                self._index({*self._indexed, *present})
            for name, state in present.items():
                is_asked = only == ALL or PurePosixPath(name).match(only)
                path = self._folder / name
                if is_asked and self._copied.get(name) != state and path.exists():
                    self._send(path, name)
                    self._copied[name] = state
                    count += 1
            gone = [name for name in self._copied if name not in present]
            for name in gone if only == ALL else ():
                self._objects.delete(name)
                del self._copied[name]
            if only == ALL and not self._indexed.isdisjoint(gone):
                self._index(self._indexed - set(gone))
        return count

    def _index(self, names: set[str]) -> None:
        FILE_INDEX.write(self._objects, names)
        self._indexed = names

    def _send(
        self,
        path: Path,
        name: str,
    ) -> None:
        """Copy a file up as it is now; it may grow meanwhile."""
        if path.stat().st_size <= BLOCK_BYTES:
            self._objects.write(name, path.read_bytes())
            return
        copy = path.with_name(f".tmp-{uuid.uuid4().hex[:12]}")
        try:
            shutil.copyfile(path, copy)
            self._objects.send(copy, name)
        finally:
            copy.unlink(missing_ok=True)

    def _present(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for parent, folders, files in os.walk(self._folder):
            place = PurePosixPath(Path(parent).relative_to(self._folder).as_posix())
            folders[:] = [name for name in folders if _travels(place / name)]
            yield from self._states(place, files)

    def _states(
        self, place: PurePosixPath, files: Iterable[str]
    ) -> Iterator[tuple[str, tuple[int, int]]]:
        for file in files:
            name = place / file
            path = self._folder / name
            if not _travels(name) or path.is_symlink() or not path.is_file():
                continue
            try:
                yield str(name), _state(path)
            except FileNotFoundError:  # a file that somebody writes under another name first
                continue

    def _get(
        self,
        name: str,
        path: Path,
    ) -> bool:
        """Copy a file down; return whether it is there, of which a late listing says nothing."""
        size = self._objects.size(name)
        if size is None:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".tmp-{uuid.uuid4().hex[:12]}")
        try:
            with unfinished.open("wb") as file:
                for start in range(0, size, BLOCK_BYTES):
                    end = min(start + BLOCK_BYTES, size)
                    file.write(self._objects.read_range(name, start, end))
            unfinished.replace(path)
        except FileNotFoundError:  # deleted meanwhile
            return False
        finally:
            unfinished.unlink(missing_ok=True)
        return True


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _travels(
    name: PurePosixPath,
    *,
    is_pull: bool = False,
) -> bool:
    """Return whether a file or folder is one that is copied: no checkpoint, lock or link to a
    checkpoint, nothing unfinished; down also nothing that an earlier run has left.
    """
    parts = name.parts
    if not parts or name.is_absolute() or ".." in parts:
        return not parts
    if is_pull and (parts[0].startswith(EARLIER) or name.name in _LINKS):
        return False
    return not any(
        part.startswith((f"{DIRECTORY_PREFIX}+", ".")) or part.endswith(".tmp") for part in parts
    )
