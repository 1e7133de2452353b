"""Where weights for a new run come from: a checkpoint, the newest of a folder, or one file."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.base import earlier_folders
from ddpkit.checkpointing.checkpoint import DIRECTORY_PREFIX, ckpt_recency
from ddpkit.checkpointing.fetching import fetch_what_is_named
from ddpkit.checkpointing.moved_paths import path_now, was_moved
from ddpkit.checkpointing.places import PLACES, StorePlace
from ddpkit.checkpointing.reading import DamageLog, read_checkpoint
from ddpkit.checkpointing.remote import REMOTES
from ddpkit.checkpointing.storage import META_NAME
from ddpkit.errors import CheckpointError, CheckpointUsageError, MissingFileError
from ddpkit.logger import get_logger, shown_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpkit.checkpointing.checkpoint import Checkpoint
    from ddpkit.checkpointing.storage import VerifyMode

logger = get_logger(__name__)

MOVED = "init_from=%r: a run that has begun anew has moved it. It is read from %s."
ACCEPTED = (
    f"Give a checkpoint ({DIRECTORY_PREFIX}+...), a folder of checkpoints, or a file of weights of "
    "torch or safetensors"
)


@dataclass(frozen=True)
class WeightSource:
    """Files with weights; other ranks are sent the paths of their machines.

    Attributes:
        path: of the checkpoint, or of the one file.
        files: of a checkpoint, by the name of the recoverable; of one file, none.

    Ranks: local.
    """

    path: Path
    files: Mapping[str, Path] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        files = {name: PLACES.sent(path) for name, path in self.files.items()}
        return _arrived, (PLACES.sent(self.path), files)


def _arrived(
    path: Path | StorePlace,
    files: Mapping[str, Path | StorePlace],
) -> WeightSource:
    here = {name: PLACES.arrived(file) for name, file in files.items()}
    return WeightSource(PLACES.arrived(path), here)


def find_weights(
    given: str,
    verify: VerifyMode = "full",
    place: Path | None = None,
) -> WeightSource:
    """Find the files that a path means; a checkpoint is verified.

    What a run has moved into ``earlier-<time>``, as it has begun anew, is found there.

    Args:
        given: path of a checkpoint, of a folder of checkpoints, whose newest that is whole counts,
            or of one file.
        verify: how a checkpoint is verified.
        place: where what was given by a URL stands on this machine, once it is copied there.

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
    path = Path(given).expanduser().absolute() if place is None else place
    fetch_what_is_named(path)
    found = path_now(REMOTES.of(path.parent).behind_link(path))
    source = WeightSource(found) if found.is_file() else _newest_whole(found, given, verify)
    if was_moved(source.path, path):
        logger.info(MOVED, given, shown_path(source.path))
    return source


def source_now(source: WeightSource) -> WeightSource:
    """Return a source that was found before, and may have been moved with its checkpoint since."""
    path = path_now(source.path)
    files = {name: path / file.relative_to(source.path) for name, file in source.files.items()}
    return replace(source, path=path, files=files)


def _newest_whole(path: Path, given: str, verify: VerifyMode) -> WeightSource:
    if not path.is_dir():
        raise MissingFileError(f"init_from={given!r}: there is no such file or folder. {ACCEPTED}.")
    is_checkpoint = (path / META_NAME).exists()
    # the run may have ended between moving its checkpoints and saving the first one
    for folder in [path] if is_checkpoint else [path, *earlier_folders(path)]:
        log = DamageLog()
        log.remote = REMOTES.of(path.parent if is_checkpoint else folder)
        found = [_read(path)] if is_checkpoint else log.scan(folder, verify)
        for checkpoint in sorted(found, key=ckpt_recency, reverse=True):
            if log.is_usable(checkpoint, verify):
                return WeightSource(checkpoint.path, checkpoint.paramfiles)
        if log.reasons:
            reasons = "; ".join(f"{name.name}: {reason}" for name, reason in log.reasons.items())
            where = "there" if folder == path else f"in {folder}"
            raise CheckpointError(
                f"init_from={given!r}: no checkpoint {where} is whole: {reasons}."
            )
    raise CheckpointUsageError(f"init_from={given!r} is a folder without checkpoints. {ACCEPTED}.")


def _read(path: Path) -> Checkpoint:
    try:
        return read_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(f"init_from={str(path)!r} is damaged: {error}.") from error
