"""A checkpoint that each machine has to have before its ranks read it."""

from __future__ import annotations

import socket
from pathlib import Path

from ddpkit.checkpointing.remote import NO_REMOTE, REMOTES
from ddpkit.distributed import get_rank, run_once_per_node
from ddpkit.errors import CheckpointError


def fetch_on_each_machine(
    path: Path,
    load_mode: str = "all",
) -> None:
    """Have a checkpoint in the folder of each machine; of a folder that is no mirror, do nothing.

    Args:
        path: of the checkpoint.
        load_mode: with ``"broadcast"`` only rank 0 needs it, which has it.

    Raises:
        CheckpointError: it cannot be copied; the words name the rank and its machine.
        RankFailedError: likewise, on the other ranks of that machine.

    Ranks: all, or the main process alone.
    """
    if load_mode == "broadcast" or REMOTES.of(path.parent) is NO_REMOTE:
        return
    run_once_per_node(_fetch, args=[path])


def fetch_what_is_named(path: Path) -> None:
    """Have what a path in a mirror names on this machine, if it is in the store: a checkpoint, with
    all files in it, or one file; of a path elsewhere, do nothing.

    Raises:
        CheckpointError: it cannot be copied.

    Ranks: main only.
    """
    for part in (path, *path.parents):
        remote = REMOTES.of(part.parent)
        if remote is NO_REMOTE:
            break
        named = remote.behind_link(part)
        if remote.has(named.name):
            remote.fetch(named)
            return
    REMOTES.of(path.parent).fetch_file(path)


def _fetch(path: Path) -> None:
    try:
        fetch_what_is_named(path)
    except CheckpointError as error:
        raise CheckpointError(f"rank {get_rank()} on {socket.gethostname()}: {error}") from error
