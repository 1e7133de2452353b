"""Where weights for a new run come from: a checkpoint, the newest of a folder, or one file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ddpkit.checkpointing.checkpoint import DIRECTORY_PREFIX, ckpt_recency
from ddpkit.checkpointing.links import behind_link
from ddpkit.checkpointing.reading import DamageLog, read_checkpoint
from ddpkit.checkpointing.storage import META_NAME
from ddpkit.errors import CheckpointError, CheckpointUsageError, MissingFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpkit.checkpointing.checkpoint import Checkpoint
    from ddpkit.checkpointing.storage import VerifyMode

ACCEPTED = (
    f"Give a checkpoint ({DIRECTORY_PREFIX}+...), a folder of checkpoints, or a file of weights of "
    "torch or safetensors"
)


@dataclass(frozen=True)
class WeightSource:
    """Files with weights.

    Attributes:
        path: of the checkpoint, or of the one file.
        files: of a checkpoint, by the name of the recoverable; of one file, none.

    Ranks: local.
    """

    path: Path
    files: Mapping[str, Path] = field(default_factory=dict)


def find_weights(given: str, verify: VerifyMode = "full") -> WeightSource:
    """Find the files that a path means; a checkpoint is verified.

    Args:
        given: path of a checkpoint, of a folder of checkpoints, whose newest that is whole counts,
            or of one file.
        verify: how a checkpoint is verified.

    Raises:
        MissingFileError: there is nothing.
        CheckpointUsageError: it is a folder without checkpoints.
        CheckpointError: what is there is damaged.

    Ranks: main only.

    Example:
        >>> find_weights("/nowhere/net.pt")
        Traceback (most recent call last):
        ddpkit.errors.MissingFileError: init_from='/nowhere/net.pt': there is no such file or ...
    """
    path = behind_link(Path(given).expanduser().absolute())
    if path.is_file():
        return WeightSource(path)
    if not path.is_dir():
        raise MissingFileError(f"init_from={given!r}: there is no such file or folder. {ACCEPTED}.")
    log = DamageLog()
    is_checkpoint = (path / META_NAME).exists()
    found = [_read(path)] if is_checkpoint else log.scan(path, verify)
    for checkpoint in sorted(found, key=ckpt_recency, reverse=True):
        if log.is_whole(checkpoint, verify):
            return WeightSource(checkpoint.path, checkpoint.paramfiles)
    if log.reasons:
        reasons = "; ".join(f"{name.name}: {reason}" for name, reason in log.reasons.items())
        raise CheckpointError(f"init_from={given!r}: no checkpoint there is whole: {reasons}.")
    raise CheckpointUsageError(f"init_from={given!r} is a folder without checkpoints. {ACCEPTED}.")


def _read(path: Path) -> Checkpoint:
    try:
        return read_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(f"init_from={str(path)!r} is damaged: {error}.") from error
