"""Fetches a checkpoint to each machine before the ranks there read it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ddpkit.base import POSITION, host_name, this_place
from ddpkit.checkpointing.main_work import checkpoint_work_on_main
from ddpkit.checkpointing.remote import NO_REMOTE, REMOTES
from ddpkit.checkpointing.storage import MANIFEST_NAME, VerifyMode, file_sha256
from ddpkit.distributed import get_rank
from ddpkit.errors import CheckpointError
from ddpkit.launch import find_launch


@dataclass(frozen=True)
class _Chosen:
    """What rank 0 has, and others have to have.

    Attributes:
        place: its machine.
        path: there.
        levels: how many folders above the path the checkpoint is; -1: it is no part of one.
        digest: SHA-256 of the manifest, or of the file; empty: a checkpoint without manifest.
    """

    place: tuple[str, str, str]
    path: str
    levels: int
    digest: str


def fetch_on_each_machine(
    path: Path,
    load_mode: str = "all",
    verify_mode: VerifyMode = "full",
) -> None:
    """Have a checkpoint, or one file, in the folder of each machine: what rank 0 has there, and no
    other one of its name. Of a folder that is no mirror, do nothing.

    Args:
        path: of the checkpoint on this machine.
        load_mode: with ``"broadcast"`` only rank 0 needs it, which has it.
        verify_mode: how a copy that another machine has already is verified.

    Raises:
        CheckpointError: it cannot be copied, or does not come in time; the words name the rank and
            its machine.

    Ranks: all, or the main process alone. The ranks of one machine do not wait for each other but
    for the copy, and the main process for nobody.
    """
    if load_mode == "broadcast" or REMOTES.of(path.parent) is NO_REMOTE:
        return
    chosen = checkpoint_work_on_main(_choose, path)
    if not get_rank() or (chosen.place, chosen.path) == (this_place(), str(path)):
        return
    try:
        with POSITION.no_limit():
            _have(path, chosen, verify_mode)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"rank {get_rank() or 0} on {host_name()}: {error}") from error


def _choose(path: Path) -> _Chosen:
    """Return what the main process has there, and see to it that others can get it."""
    fetch_what_is_named(path)
    checkpoint = _checkpoint_of(path)
    if checkpoint is None:
        digest = file_sha256(path) if path.is_file() else ""
        return _Chosen(this_place(), str(path), -1, digest)
    if _has_other_machines():
        REMOTES.of(checkpoint.parent).offer(checkpoint.name)
    levels = len(path.relative_to(checkpoint).parts)
    digest = hashlib.sha256((checkpoint / MANIFEST_NAME).read_bytes()).hexdigest()
    return _Chosen(this_place(), str(path), levels, digest)


def _checkpoint_of(path: Path) -> Path | None:
    """Return the checkpoint that a path is, or is in; None: it is no part of one."""
    for part in (path, *path.parents):
        if REMOTES.of(part.parent) is NO_REMOTE:
            break
        if (part / MANIFEST_NAME).is_file():
            return part
    return None


def _has_other_machines() -> bool:
    """Return whether ranks may run on other machines than this one, as far as the launcher says."""
    info = find_launch()
    return not info.is_distributed or info.world_size > info.local_world_size


def _have(
    path: Path,
    chosen: _Chosen,
    verify_mode: VerifyMode,
) -> None:
    if not chosen.digest:
        raise CheckpointError(
            f"rank 0 has no {MANIFEST_NAME} in {chosen.path}: what is not complete is not copied "
            "to other machines. Give --ckpt_load=broadcast, so that rank 0 sends it."
        )
    if chosen.levels < 0:
        REMOTES.of(path.parent).fetch_same_file(path, chosen.digest)
        return
    checkpoint = (path, *path.parents)[chosen.levels]
    REMOTES.of(checkpoint.parent).fetch_same(checkpoint, chosen.digest, verify_mode)


def fetch_what_is_named(path: Path) -> None:
    """Have what a path in a mirror names on this machine, if it is in the store: a checkpoint, with
    all files in it, or one file; of a path elsewhere, do nothing.

    Raises:
        CheckpointError: it cannot be copied.

    Ranks: main only.
    """
    if path.exists():
        return
    for part in (path, *path.parents):
        remote = REMOTES.of(part.parent)
        if remote is NO_REMOTE:
            break
        named = remote.behind_link(part)
        if remote.has(named.name):
            remote.fetch(named)
            return
    REMOTES.of(path.parent).fetch_file(path)
