"""Copies the checkpoint that rank 0 has chosen to another machine: the same one, whatever is there.

The folder of that machine may hold another checkpoint of its name, from an earlier start, and the
store may not have rank 0's yet. So what counts is the digest of rank 0's manifest. The ranks of a
machine need not call together: a lock on a file has one of them copy, and a record in the file
tells the others that it is done.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddpkit.checkpointing import (
    DIRECTORY_PREFIX,
    MANIFEST_NAME,
    STAGING_PREFIX,
    file_sha256,
    verify,
)
from ddpkit.errors import CheckpointError
from ddpkit.logger import get_logger
from ddpkit.mirror.local_folder import launch_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpkit.checkpointing import ObjectFolder, VerifyMode

logger = get_logger(__name__)

RECORD = ".copies.json"  # locked while a checkpoint is copied; says which have been
WAIT_SECONDS = 1800.0  # for a checkpoint that is on its way into the store, as at the end of a run
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
NAP_SECONDS = 0.05


class MachineCopies:
    """Copies of checkpoints on a machine that is not rank 0's.

    Args:
        store: the folder of the store.
        folder: of this machine, that mirrors it.

    Ranks: any.
    """

    def __init__(
        self,
        store: ObjectFolder,
        folder: Path,
    ) -> None:
        self._store = store
        self._folder = folder

    def have(
        self,
        name: str,
        manifest: str,
        mode: VerifyMode,
    ) -> None:
        """Have a checkpoint in the folder, complete.

        Args:
            name: of the checkpoint.
            manifest: SHA-256 of its manifest.
            mode: how a copy that is here already is verified, once in a launch.

        Raises:
            CheckpointError: the store does not have it in time, or it is damaged there.
            OSError: the folder cannot be written.
        """
        own = f"{manifest} {launch_name()}"
        with self._locked() as record:
            is_here = self._digest(name) == manifest
            if is_here and record.get(name) == own:
                return
            if not is_here or verify(self._folder / name, mode):
                self._remove_old(record, name)
                self._await(name, manifest)
            record[name] = own

    def have_file(
        self,
        name: str,
        sha256: str,
    ) -> None:
        """Have a file that is no part of a checkpoint in the folder.

        Raises:
            CheckpointError: the store has another one of this name, or none.
            OSError: the folder cannot be written.
        """
        path = self._folder / name
        with self._locked():
            if path.is_file() and file_sha256(path) == sha256:
                return
            with contextlib.suppress(FileNotFoundError):
                self._store.get_file(name, path)
            if not path.is_file() or file_sha256(path) != sha256:
                raise CheckpointError(
                    f"{self._store.url} does not have the {name} that rank 0 reads. Start the run "
                    "again, once nobody writes it any more."
                )

    def _digest(self, name: str) -> str:
        try:
            return hashlib.sha256((self._folder / name / MANIFEST_NAME).read_bytes()).hexdigest()
        except OSError:
            return ""

    def _await(
        self,
        name: str,
        manifest: str,
    ) -> None:
        """Copy a checkpoint down, as soon as the store has it."""
        url = self._store.url
        end = time.monotonic() + WAIT_SECONDS
        pause = FIRST_PAUSE_SECONDS
        told = ""
        while True:
            there = self._store.manifest_now(name)
            if there is not None and hashlib.sha256(there).hexdigest() == manifest:
                logger.info("Copying %s/%s to %s", url, name, str(self._folder))
                self._store.get(name, self._folder)
                if self._digest(name) == manifest:  # else it was replaced meanwhile
                    return
            found = "has none of this name" if there is None else "has another one of this name"
            if time.monotonic() > end:
                raise CheckpointError(
                    f"the checkpoint {name} of rank 0 has not come into {url} within "
                    f"{WAIT_SECONDS:.0f} s, which {found}. Rank 0 has it on its disk, and copies "
                    "it up: look for the reason in its output, or give --ckpt_load=broadcast, so "
                    "that rank 0 sends it."
                )
            if found != told:
                told = found
                logger.warning(
                    "Waiting for %s, %.0f s at most: %s %s, and rank 0 copies it there.",
                    name,
                    end - time.monotonic(),
                    url,
                    found,
                )
            time.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, 1.5 * pause)

    def _remove_old(
        self,
        record: dict[str, str],
        wanted: str,
    ) -> None:
        """Remove what earlier launches have copied here, and what killed ones have left: a folder
        that stays would fill the disk.
        """
        now = launch_name()
        for name in [name for name, own in record.items() if own.partition(" ")[2] != now]:
            del record[name]
            if name.startswith(DIRECTORY_PREFIX) and name != wanted:
                shutil.rmtree(self._folder / name, ignore_errors=True)
        for path in self._folder.glob(f"{STAGING_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[dict[str, str]]:
        """Yield the record, which is written at the end: the manifest's digest and the launch of
        each copy, by name.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with os.fdopen(os.open(self._folder / RECORD, flags, 0o600), "r+") as file:
            _wait_for_lock(file.fileno())
            record = _read(file.read())
            yield record
            file.seek(0)
            file.truncate()
            file.write(json.dumps(record))


def _wait_for_lock(handle: int) -> None:
    """Lock a file; where a file system cannot, each rank makes its own copy."""
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(NAP_SECONDS)
            continue
        except OSError:
            return
        return


def _read(text: str) -> dict[str, str]:
    """Return a record; an empty one where a process was killed while it wrote it."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    is_record = isinstance(found, dict) and all(isinstance(one, str) for one in found.values())
    return found if is_record else {}
