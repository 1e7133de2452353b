"""Checkpoints in a folder of an object store, such as S3, and other files of a run beside them.

A checkpoint exists there when its manifest does. Its files are written first, the manifest last,
and a deletion begins with the manifest. Nothing is renamed: stores cannot. A checkpoint that
replaces one of its name is another version beside it (:mod:`ddpkit.checkpointing.object_names`).

What exists is known by name, and not by a listing, which some stores give late
(:mod:`ddpkit.checkpointing.object_index`).
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ddpkit.base import do_nothing, replacing
from ddpkit.checkpointing import storage
from ddpkit.checkpointing.checkpoint import DIRECTORY_PREFIX
from ddpkit.checkpointing.object_index import INDEX, read_index
from ddpkit.checkpointing.object_names import (
    folder_of,
    is_one_part,
    may_come_again,
    name_and_version,
    newest_versions,
)
from ddpkit.checkpointing.object_transfer import (
    FileWriter,
    as_sizes,
    delete_objects,
    read_files,
    send_files,
    sizes_now,
)
from ddpkit.checkpointing.storage import (
    MANIFEST_NAME,
    META_NAME,
    MOST_TEXT,
    VerifyMode,
    is_outside,
    make_staging,
    parse_manifest,
    publish_staging,
    read_manifest,
    save_error,
    sync_tree,
)
from ddpkit.errors import CheckpointError, ConfigError, ObjectStoreError
from ddpkit.logger import get_logger
from ddpkit.object_store import Objects, StoreLock

logger = get_logger(__name__)

READS = 2  # of a file that fails its checksum: the network, or what is stored
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class _Stored:
    """A checkpoint of a store.

    Attributes:
        folder: where it stands.
        text: its manifest.
        files: what that says of each file.
        piece_bytes: of the pieces in which files were hashed.
    """

    folder: str
    text: bytes
    files: Mapping[str, Mapping[str, Any]]
    piece_bytes: int

    def objects_of(self, names: Mapping[str, int]) -> dict[str, int]:
        return {f"{self.folder}/{name}": size for name, size in names.items()}


class ObjectFolder:
    """A folder of an object store that holds checkpoints.

    May be used from several threads, but one :meth:`put`, :meth:`delete` or :meth:`clean` at a time
    changes it. Every request is repeated while its error may pass.

    Args:
        url: of the folder, such as ``s3://bucket/run/save``. It need not be there, its bucket must.
        storage_options: for the filesystem of fsspec; without them credentials and endpoint are
            found as its package finds them. Never logged.
        reads_once: whether the manifest of a checkpoint is read once: for one look at a folder.

    Attributes:
        url: as it is shown: without a password.

    Raises:
        MissingExtraError: a package is missing; the message names it.
        ConfigError: no filesystem has this protocol.

    Ranks: main only (one process of a run); reading: local.

    Example:
        >>> folder = ObjectFolder("memory://bucket/run/save")
        >>> folder.names(), folder.has("log.txt")
        ([], False)
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] = NO_OPTIONS,
        *,
        reads_once: bool = False,
    ) -> None:
        self._objects = Objects(url, storage_options)
        self._reads_once = reads_once
        self._kept: dict[str, _Stored] = {}
        self._mutex = threading.Lock()
        self._complete: set[str] = set()  # folders that this object has completed
        self._going_on: set[str] = set()  # folders that it is about to complete
        self._left: set[str] = set()  # folders of its uploads that have failed
        self._folders: dict[str, str] = {}  # of each checkpoint, as last looked for

    @property
    def url(self) -> str:
        """The folder, as it is shown."""
        return self._objects.url

    # ------------------------------------------------------------------------------------- finding

    def names(self) -> list[str]:
        """Return the names of the checkpoints that are complete, sorted. Neither a listing that is
        late nor one that still shows what was deleted matters.

        Raises:
            ObjectStoreError: the store cannot be asked.
        """
        manifests = {f"{folder}/{MANIFEST_NAME}": folder for folder in self._candidates()}
        found = sizes_now(self._objects, manifests)
        complete = [manifests[name] for name, size in found.items() if size is not None]
        self._folders = newest_versions(complete)
        return sorted(self._folders)

    def _candidates(self, index: AbstractSet[str] | None = None) -> set[str]:
        """Return the folders in which something of a checkpoint may stand; the index may have been
        read before.
        """
        listed = {name.partition("/")[0] for name in self._objects.sizes() if "/" in name}
        with self._mutex:
            known = listed | self._complete | self._going_on | self._left
        known |= read_index(self._objects) if index is None else index
        return {folder for folder in known if folder.startswith(DIRECTORY_PREFIX)}

    def _require_one_part(self, name: str) -> None:
        """Refuse the name of a checkpoint that would lead to another folder, here or there."""
        if not is_one_part(name):
            raise CheckpointError(
                f"{name!r} is no name of a checkpoint of {self.url}: a name is one part of a path, "
                'without "/" and "\\". Give the name alone.'
            )

    def _folder_now(self, name: str) -> str:
        """Return where a checkpoint stands, looking anew.

        Raises:
            CheckpointError: there is none of this name.
        """
        self.names()
        if name not in self._folders:
            raise CheckpointError(f"{self.url} has no checkpoint {name}.")
        return self._folders[name]

    def _stored(self, name: str) -> _Stored:
        """Return a checkpoint, with its manifest.

        Raises:
            CheckpointError: there is none of this name, or its manifest is damaged.
        """
        if name in self._kept:
            return self._kept[name]
        folder = self._folders.get(name) or self._folder_now(name)
        try:
            text = self._read_text(folder, MANIFEST_NAME)
        except FileNotFoundError:  # replaced or deleted since it was looked for
            folder = self._folder_now(name)
            with self._damaged_if_missing(name):
                text = self._read_text(folder, MANIFEST_NAME)
        try:
            files, piece_bytes = parse_manifest(text)
        except CheckpointError as error:
            raise self._damaged(name, str(error)) from error
        outside = [file for file in files if is_outside(file)]
        if outside:
            raise self._damaged(name, f"its manifest names a file outside of it: {outside[0]!r}")
        stored = _Stored(folder, text, files, piece_bytes)
        if self._reads_once:
            self._kept[name] = stored
        return stored

    def manifest_now(self, name: str) -> bytes | None:
        """Return the manifest of a checkpoint, looking anew; None: there is none of this name.

        Raises:
            CheckpointError: it is no name of a checkpoint, or no manifest.
            ObjectStoreError: the store cannot be asked.
        """
        self._require_one_part(name)
        self.names()
        folder = self._folders.get(name)
        if folder is None:
            return None
        try:
            return self._read_text(folder, MANIFEST_NAME)
        except FileNotFoundError:  # replaced or deleted since it was looked for
            return None

    def _read_text(self, folder: str, name: str) -> bytes:
        """Read a manifest or a ``CKPT.yaml``, which are small."""
        size = self._objects.size(f"{folder}/{name}")
        if size is None:
            raise FileNotFoundError(name)
        if size > MOST_TEXT:
            raise self._damaged(folder, f"{name} has {size} bytes; at most {MOST_TEXT} are read")
        return self._objects.read(f"{folder}/{name}")

    def _damaged(self, name: str, reason: str) -> CheckpointError:
        return CheckpointError(f"the checkpoint {name} in {self.url} is damaged: {reason}.")

    @contextlib.contextmanager
    def _damaged_if_missing(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise self._damaged(name, f"{error} is missing") from error

    # ------------------------------------------------------------------------------------- writing

    def put(
        self,
        directory: Path,
        before_manifest: Callable[[], object] = do_nothing,
        lock: StoreLock | None = None,
    ) -> None:
        """Copy a complete checkpoint of this disk into the store, under its name. One of this name
        that is there is found until the new one is complete, and then deleted.

        Args:
            directory: of the checkpoint. What its manifest does not name is left out.
            before_manifest: called when all files are there, right before the checkpoint exists; an
                exception prevents it.
            lock: of this folder, or of one that it is in; held. It is required before each thing
                that is written or deleted. None: nobody else writes there.

        Raises:
            CheckpointError: the directory is no complete checkpoint, or another run has taken the
                lock over.
            ObjectStoreError: the store cannot be reached, or refuses. An earlier checkpoint of this
                name is still there.
        """
        self._require_one_part(directory.name)
        files = self._files_of(directory)
        name = directory.name
        index = read_index(self._objects)
        others = self._versions(name, index)
        version = 1 + max(others.values(), default=-1)
        require = do_nothing if lock is None else lock.require
        folder = folder_of(name, version, "" if lock is None else lock.token)
        with self._mutex:
            self._going_on.add(folder)
        try:
            require()
            INDEX.write(self._objects, {*index, *self._complete, folder})
            send_files(self._objects, folder, directory, files, require)
            before_manifest()
            require()
            text = (directory / MANIFEST_NAME).read_bytes()
            self._objects.write(f"{folder}/{MANIFEST_NAME}", text)
        except BaseException:
            with self._mutex:
                self._going_on.discard(folder)
                self._left.add(folder)
            raise
        with self._mutex:
            self._going_on.discard(folder)
            self._complete.add(folder)
            self._folders[name] = folder
        for other in {*others, *self._left}:
            require()
            self._delete_folder(other)

    def _files_of(self, directory: Path) -> dict[str, int]:
        """Return the sizes of the files of a checkpoint of this disk."""
        reason = "" if directory.name.startswith(DIRECTORY_PREFIX) else "it has another name"
        reason = reason or "; ".join(storage.verify(directory, "size"))
        if reason:
            raise CheckpointError(f"{directory} cannot be copied to {self.url}: {reason}.")
        return as_sizes(read_manifest(directory / MANIFEST_NAME)[0])

    def _versions(self, name: str, index: AbstractSet[str] | None = None) -> dict[str, int]:
        """Return the folders in which something of a checkpoint may stand, with their versions."""
        named = {folder: name_and_version(folder) for folder in self._candidates(index)}
        return {folder: version for folder, (own, version) in named.items() if own == name}

    def delete(self, name: str) -> None:
        """Delete a checkpoint: its manifest, so that it does not exist any more, and then the rest.
        One that is not there is no error.

        Raises:
            CheckpointError: the name is no name of a checkpoint.
            ObjectStoreError: the store cannot be reached, or refuses.
        """
        self._require_one_part(name)
        for folder in self._versions(name):
            self._delete_folder(folder)
        self._folders.pop(name, None)

    def _delete_folder(self, folder: str) -> None:
        """Delete what was listed, and what the manifest names, which may not be listed yet."""
        manifest = f"{folder}/{MANIFEST_NAME}"
        names = set(self._objects.sizes(folder))
        with contextlib.suppress(FileNotFoundError, CheckpointError):
            files, _ = parse_manifest(self._read_text(folder, MANIFEST_NAME))
            names |= {f"{folder}/{file}" for file in files if not is_outside(file)}
        self._objects.delete(manifest)
        with self._mutex:
            self._complete.discard(folder)
        delete_objects(self._objects, sorted(names - {manifest}))
        with self._mutex:
            self._left.discard(folder)

    def clean(self, lock: StoreLock) -> None:
        """Delete what interrupted uploads have left, and older versions of what was replaced.

        An upload of this object that is going on is left alone. One of another run cannot be: the
        lock keeps it out, and where it was taken over from a run that still lives, that run finds
        so before its manifest. Where a store cannot lock, nothing is deleted.

        Args:
            lock: of this folder, or of one that it is in; held.

        Raises:
            CheckpointError: the lock is not held, or another run has taken it over.
            ObjectStoreError: the store cannot be reached, or refuses.
        """
        candidates = self._candidates()
        self.names()
        kept = set(self._folders.values())
        lock.require()
        if not lock.excludes:
            return
        with self._mutex:
            kept |= self._going_on
        for folder in sorted(candidates - kept):
            lock.require()
            self._delete_folder(folder)
        lock.require()
        # a run that has lost the lock may still be sending a file there: so no save takes the name
        left = {folder for folder in candidates - kept if may_come_again(folder)}
        INDEX.write(self._objects, kept | left)
        self._end_uploads()

    def _end_uploads(self) -> None:
        """Have the store forget the parts of uploads that did not end, which no listing shows."""
        try:
            for name, upload in self._objects.unfinished():
                folder = name.partition("/")[0]
                if folder.startswith(DIRECTORY_PREFIX) and folder not in self._going_on:
                    self._objects.abort(name, upload)
        except ObjectStoreError as error:  # a permission of its own, and not each store knows it
            logger.debug("Parts of uploads that did not end may be left over: %s", error)

    # ------------------------------------------------------------------------------------- reading

    def get(self, name: str, into: Path) -> Path:
        """Copy a checkpoint into a folder of this disk, where it is complete or not there.

        Args:
            name: of the checkpoint.
            into: the folder, which is there. A checkpoint of this name in it is replaced.

        Returns:
            The directory of the checkpoint.

        Raises:
            CheckpointError: there is none of this name, it is damaged, or this disk cannot take it.
            ObjectStoreError: the store cannot be reached.
        """
        self._require_one_part(name)
        final = into / name
        staging = make_staging(final)
        try:
            self._fetch(name, staging)
            sync_tree(staging)
            publish_staging(staging, final)
        except BaseException as error:
            with contextlib.suppress(OSError):  # the next save removes what resists
                storage.FILES.remove_tree(staging)
            if isinstance(error, OSError):
                what = f"cannot copy {name} from {self.url} to {into}"
                raise save_error(final, error, what=what) from error
            raise
        return final

    def _fetch(self, name: str, staging: Path) -> None:
        """Copy the files of a checkpoint; those of its successor, if it is replaced meanwhile."""
        stored = self._stored(name)
        try:
            self._fetch_files(name, stored, staging)
        except CheckpointError:
            if self._folder_now(name) == stored.folder:
                raise
            storage.FILES.remove_tree(staging)
            storage.FILES.make_directory(staging)
            stored = self._stored(name)
            self._fetch_files(name, stored, staging)
        (staging / MANIFEST_NAME).write_bytes(stored.text)

    def _fetch_files(self, name: str, stored: _Stored, staging: Path) -> None:
        faults = self._size_faults(stored)
        if faults:
            raise self._damaged(name, "; ".join(faults))
        paths = {f"{stored.folder}/{file}": staging / file for file in stored.files}
        with self._damaged_if_missing(name):
            faults = self._checksum_faults(stored, FileWriter(paths))
        if faults:
            raise self._damaged(name, "; ".join(faults))

    def _size_faults(self, stored: _Stored) -> list[str]:
        wanted = as_sizes(stored.files)
        found = sizes_now(self._objects, stored.objects_of(wanted))
        faults = []
        for name, size in wanted.items():
            there = found[f"{stored.folder}/{name}"]
            if there is None:
                faults.append(f"{name} is missing")
            elif there != size:
                faults.append(f"{name} has {there} bytes instead of {size}")
        return faults

    def _checksum_faults(
        self,
        stored: _Stored,
        take: Callable[[str, int, bytes], object] = do_nothing,
    ) -> list[str]:
        """Read all files; those that fail their checksum a second time."""
        wanted = as_sizes(stored.files)
        for _ in range(READS):
            digests = read_files(self._objects, stored.objects_of(wanted), take, stored.piece_bytes)
            wanted = {
                name: size
                for name, size in wanted.items()
                if digests[f"{stored.folder}/{name}"] != stored.files[name]["sha256"]
            }
        return [
            f"{name} fails its checksum: its content has changed since it was saved"
            for name in wanted
        ]

    def meta(self, name: str) -> dict[str, Any]:
        """Return what a checkpoint's ``CKPT.yaml`` says; nothing else is read.

        Raises:
            CheckpointError: there is none of this name, or it is damaged.
            ObjectStoreError: the store cannot be reached.
        """
        from ddpkit.base import load_plain_yaml

        stored = self._stored(name)
        with self._damaged_if_missing(name):
            data = self._read_text(stored.folder, META_NAME)
        if hashlib.sha256(data).hexdigest() != stored.files.get(META_NAME, {}).get("sha256"):
            raise self._damaged(name, f"{META_NAME} fails its checksum")
        meta = load_plain_yaml(data.decode())
        if not isinstance(meta, dict):
            raise self._damaged(name, f"{META_NAME} is empty")
        return meta

    def entries(self, name: str) -> dict[str, int]:
        """Return the sizes in bytes of the files of a checkpoint, as its manifest says.

        Raises:
            CheckpointError: there is none of this name, or it is damaged.
            ObjectStoreError: the store cannot be reached.
        """
        return as_sizes(self._stored(name).files)

    def read_entry(self, name: str, file: str) -> bytes:
        """Return the content of one file of a checkpoint, a small one.

        Raises:
            FileNotFoundError: it has no such file.
            CheckpointError: there is none of this name.
            ObjectStoreError: the store cannot be reached.
        """
        stored = self._stored(name)
        if file == MANIFEST_NAME:
            return stored.text
        return self._read_text(stored.folder, file)

    def verify(self, name: str, mode: VerifyMode = "full") -> list[str]:
        """Say why a checkpoint is not what was saved, as ``storage.verify`` does for a disk.

        Args:
            name: of the checkpoint.
            mode: ``"full"`` reads every byte, ``"size"`` looks at names and sizes, ``"off"`` looks
                at nothing.

        Returns:
            One reason per fault, each naming the file; empty when all is well.

        Raises:
            ConfigError: an unknown ``mode``.
            ObjectStoreError: the store cannot be reached.
        """
        if mode not in {"full", "size", "off"}:
            raise ConfigError(f"verify(mode={mode!r}): the modes are 'full', 'size' and 'off'.")
        if mode == "off":
            return []
        try:
            stored = self._stored(name)
            faults = self._size_faults(stored)
            if not faults and mode == "full":
                with self._damaged_if_missing(name):
                    faults = self._checksum_faults(stored)
        except ObjectStoreError:
            raise
        except CheckpointError as error:
            return [str(error)]
        return faults

    # ------------------------------------------------------------------------------- other files

    def put_file(self, path: Path, name: str) -> None:
        """Copy one file of this disk up, in the place of an earlier one.

        Args:
            path: of the file; what is appended while it is copied may be missing.
            name: in the folder; may have folders in it, such as ``"a/log.txt"``.

        Raises:
            OSError: the file cannot be read.
            ObjectStoreError: the store cannot be reached, or refuses.
        """
        self._objects.send(path, name)

    def get_file(self, name: str, path: Path) -> None:
        """Copy one file down, in the place of an earlier one; it is complete or not there.

        Raises:
            FileNotFoundError: the store has none of this name.
            OSError: the file cannot be written.
            ObjectStoreError: the store cannot be reached.
        """
        size = self._objects.size(name)
        if size is None:
            raise FileNotFoundError(f"{self.url} has no file {name}.")
        with replacing(path) as unfinished:
            read_files(self._objects, {name: size}, FileWriter({name: unfinished}))

    def has(self, name: str) -> bool:
        """Say whether the store has a file of this name.

        Raises:
            ObjectStoreError: the store cannot be reached.
        """
        return self._objects.size(name) is not None

    def files(self) -> dict[str, int]:
        """List the files that are no part of a checkpoint of this folder, with their sizes in
        bytes; a store may list late what was just written.

        Raises:
            ObjectStoreError: the store cannot be reached.
        """
        listed = self._objects.sizes()
        return {
            name: size
            for name, size in listed.items()
            if not name.startswith((DIRECTORY_PREFIX, "."))
        }
