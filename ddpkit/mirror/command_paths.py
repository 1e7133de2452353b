"""The folder or checkpoint that a command reads: on this machine, or a copy of one in a store."""

from __future__ import annotations

import os
from pathlib import Path

from ddpkit.object_store import is_url


def copied_down(given: str | os.PathLike[str]) -> Path:
    """Return where what was given to a command stands on this machine.

    Args:
        given: a path, or a URL: of a checkpoint, which is copied down; of a folder of checkpoints,
            which are all copied; or of a run, whose other files are copied.

    Raises:
        CheckpointError: it cannot be copied.

    State: a temporary folder until the process ends.
    """
    text = os.fspath(given)
    if not is_url(text):
        return Path(text)
    from ddpkit.checkpointing import REMOTES, fetch_what_is_named
    from ddpkit.mirror.mirrors import mirror_holding, mirror_of  # loads fsspec

    folder, name = named_in_store(text)
    if name:
        path = mirror_of(folder) / name
        fetch_what_is_named(path)
        return path
    place = mirror_of(text)
    mirror = mirror_holding(place)
    if mirror is not None:
        mirror.read_all()
    remote = REMOTES.of(place)
    for checkpoint in remote.others((), lambda *_: None):
        remote.fetch(checkpoint.path)
    return place


def named_in_store(url: str) -> tuple[str, str]:
    """Return the folder that a URL names, and the checkpoint in it; empty: all that it holds.

    Args:
        url: of a folder or of a checkpoint; ``latest`` and ``best`` are followed.

    Raises:
        CheckpointError: the store cannot be asked.
    """
    from ddpkit.checkpointing import DIRECTORY_PREFIX, REMOTES
    from ddpkit.mirror.mirrors import mirror_of  # loads fsspec

    folder, _, name = url.rstrip("/").rpartition("/")
    if name in {"latest", "best"}:
        place = mirror_of(folder)
        return folder, REMOTES.of(place).behind_link(place / name).name
    return (folder, name) if name.startswith(f"{DIRECTORY_PREFIX}+") else (url, "")
