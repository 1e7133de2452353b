"""What ``python -m ddpkit ckpt ls`` and ``show`` tell of checkpoints in a store.

Their small files are read, and the sizes of the others asked. Weights are not copied down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ddpkit.checkpointing import MANIFEST_NAME, ObjectFolder
from ddpkit.cli.checkpoint_entry import Entry, made_by, newest_first, said_of_loop
from ddpkit.errors import CheckpointError, ObjectStoreError
from ddpkit.mirror import named_in_store
from ddpkit.object_store import shown_url
from ddpkit.run import BRAIN_FILE

SMALL_BYTES = 1 << 20
AT_ONCE = 8  # checkpoints; of each some small objects are asked for, one after the other


def find_in_store(url: str) -> list[Entry]:
    """Look at a checkpoint in a store, or at every one of a folder there, the newest first.

    Raises:
        CheckpointError: there is none, or the store cannot be asked.
    """
    folder, name = named_in_store(url)
    store = ObjectFolder(folder, reads_once=True)
    names = [each for each in store.names() if name in {"", each}]
    found = newest_first(_looked_at(store, names))
    if not found:
        raise CheckpointError(f"there is no checkpoint in {shown_url(url)!r}.")
    return found


def small_files(url: str, entry: Entry, into: Path) -> None:
    """Copy the small files of a checkpoint in a store into a folder.

    Args:
        url: of the checkpoint, or of the folder that holds it.
        entry: of the checkpoint.
        into: is there.

    Raises:
        CheckpointError: the store cannot be asked.
    """
    store = ObjectFolder(named_in_store(url)[0], reads_once=True)
    for name, size in entry.files.items():
        if size <= SMALL_BYTES:
            with contextlib.suppress(FileNotFoundError):  # the sizes have told it
                content = store.read_entry(entry.path.name, name)
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                (into / name).write_bytes(content)


def _looked_at(store: ObjectFolder, names: Sequence[str]) -> list[Entry]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        entries = threads.map(lambda name: _look_at(store, name), names)
        return [entry for entry in entries if entry is not None]


def _look_at(store: ObjectFolder, name: str) -> Entry | None:
    """Look at one. Whatever is wrong with it becomes a reason; None: it was deleted meanwhile."""
    meta: dict[str, Any] = {}
    files: dict[str, int] = {}
    manifest = brain = b""
    try:
        manifest = store.read_entry(name, MANIFEST_NAME)
        files = {**store.entries(name), MANIFEST_NAME: len(manifest)}
        with contextlib.suppress(FileNotFoundError):  # of a script without a Brain, or missing
            brain = store.read_entry(name, BRAIN_FILE)
        meta = store.meta(name)
        reasons = store.verify(name, "size")
    except ObjectStoreError:
        raise
    except (CheckpointError, FileNotFoundError) as error:
        if name not in store.names():
            return None
        reasons = [str(error)]
    return Entry(
        Path(name),
        meta,
        dict(sorted(files.items())),
        made_by(manifest),
        said_of_loop(brain.decode(errors="replace")),
        reasons,
    )
