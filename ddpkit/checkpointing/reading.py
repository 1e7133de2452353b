"""Reads the checkpoints of a folder. Damaged ones are passed over, and reported once."""

from __future__ import annotations

import math
import os
from pathlib import Path

from ddpkit.checkpointing.checkpoint import (
    DIRECTORY_PREFIX,
    SAVED_AT,
    SUFFIX,
    Checkpoint,
    as_number,
    ckpt_recency,
)
from ddpkit.checkpointing.remote import NO_REMOTE, Remote
from ddpkit.checkpointing.storage import MANIFEST_NAME, META_NAME, VerifyMode, read_text, verify
from ddpkit.errors import CheckpointError, ObjectStoreError
from ddpkit.logger import get_logger

logger = get_logger(__name__)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read what a checkpoint directory says of itself; its files are not looked into.

    Args:
        path: the directory.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: its ``CKPT.yaml`` cannot be read; the message does not repeat the path.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> _ = (path / "CKPT.yaml").write_text("unixtime: 1.5")
        >>> read_checkpoint(path).meta
        {'unixtime': 1.5}
    """
    from ddpkit.base import load_plain_yaml

    try:
        meta = load_plain_yaml(read_text(path / META_NAME))
        files = {
            file.name.removesuffix(SUFFIX): file
            for file in sorted(path.iterdir())
            if file.suffix == SUFFIX
        }
    except CheckpointError as error:
        raise CheckpointError(f"{META_NAME}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{META_NAME} cannot be read: {error}") from error
    if not isinstance(meta, dict) or as_number(meta.get(SAVED_AT)) is None:
        raise CheckpointError(
            f"{META_NAME} is empty or does not say when the checkpoint was saved ({SAVED_AT})"
        )
    for file in files.values():
        if not (file.is_file() or file.is_dir()):  # opening a pipe or a device may never end
            raise CheckpointError(f"{file.name} is neither a file nor a directory")
    return Checkpoint(path, meta, files)


def _checkpoint_in(path: Path, mode: VerifyMode) -> Checkpoint | None:
    """Read a checkpoint, whole or with files missing; return None for other folders."""
    try:
        names = [entry.name for entry in path.iterdir()]
    except NotADirectoryError:
        return None
    if not any(name in {META_NAME, MANIFEST_NAME} or name.endswith(SUFFIX) for name in names):
        return None
    checkpoint = read_checkpoint(path)
    faults = verify(path, mode, only=META_NAME)
    if faults:
        raise CheckpointError("; ".join(faults))
    return checkpoint


def _paths_in(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.name.startswith(DIRECTORY_PREFIX))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"the checkpoint folder {folder} cannot be read: {error}") from error


class DamageLog:
    """Finds the checkpoints of a folder, and remembers which are damaged so that each is reported
    once.

    Attributes:
        reasons: for each damaged checkpoint, by path: what is damaged.
        latest: the greatest ``unixtime`` of all checkpoints seen, in seconds since 1970.
        used: names that checkpoints have had which may be gone. No new one is called so by itself.
        remote: where checkpoints of the folder are besides.

    State: its attributes.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "CKPT+a").mkdir()
        >>> _ = (folder / "CKPT+a" / "CKPT.yaml").write_text("")
        >>> damage_log = DamageLog()
        >>> damage_log.scan(folder), [path.name for path in damage_log.reasons]
        ([], ['CKPT+a'])
    """

    def __init__(self) -> None:
        self.reasons: dict[Path, str] = {}
        self.latest = 0.0
        self.used: set[str] = set()
        self.remote: Remote = NO_REMOTE

    def note_time(self, checkpoint: Checkpoint) -> None:
        """Update :attr:`latest` with a checkpoint's time; later checkpoints get a later time."""
        time = ckpt_recency(checkpoint)
        if math.isfinite(time):
            self.latest = max(self.latest, time)

    def scan(self, folder: Path, mode: VerifyMode = "off") -> list[Checkpoint]:
        """Read the checkpoints in a folder; log and skip damaged ones.

        Args:
            folder: where they are.
            mode: how closely to look at ``CKPT.yaml``, by which they are ranked; see
                :func:`verify`.

        Raises:
            CheckpointError: the folder itself cannot be read.
        """
        found = []
        paths = _paths_in(folder)
        others = self._others(paths)
        for path in paths:
            try:
                checkpoint = _checkpoint_in(path, mode)
            except (CheckpointError, OSError) as error:
                if os.path.lexists(path):  # else another process has deleted it meanwhile
                    self.report(path, str(error))
                continue
            if checkpoint is not None:
                found.append(checkpoint)
                self.note_time(checkpoint)
        return [*found, *others]

    def _others(self, paths: list[Path]) -> list[Checkpoint]:
        """Return the checkpoints that are elsewhere alone, and forget reasons of what is gone."""
        damaged: dict[Path, str] = {}
        others = self.remote.others({path.name for path in paths}, damaged.__setitem__)
        known = {*paths, *(other.path for other in others), *damaged}
        self.reasons = {path: reason for path, reason in self.reasons.items() if path in known}
        for path, reason in damaged.items():
            self.report(path, reason)
        for checkpoint in others:
            self.note_time(checkpoint)
        return others

    def is_usable(self, checkpoint: Checkpoint, mode: VerifyMode) -> bool:
        """Have a checkpoint in the folder, copied there where it is elsewhere, and verify it.

        Raises:
            ObjectStoreError: it cannot be copied.
        """
        try:
            self.remote.fetch(checkpoint.path)
        except ObjectStoreError:  # which says nothing of the checkpoint
            raise
        except CheckpointError as error:
            self.report(checkpoint.path, str(error))
            return False
        return self.is_whole(checkpoint, mode)

    def is_whole(self, checkpoint: Checkpoint, mode: VerifyMode) -> bool:
        """Verify a checkpoint; report damage, or forget an earlier report."""
        faults = self.remote.faults(checkpoint.path, mode)
        if faults:
            self.report(checkpoint.path, "; ".join(faults))
        else:
            self.reasons.pop(checkpoint.path, None)
        return not faults

    def report(self, path: Path, reason: str) -> None:
        """Say, once for each reason, that a checkpoint is damaged."""
        if self.reasons.get(path) != reason:
            logger.warning("The checkpoint %s is damaged and passed over: %s", path, reason)
        self.reasons[path] = reason
