"""What a run is going to write, looked at before its first epoch: files, folders, and room for its
checkpoints.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit.errors import ConfigError
from ddpkit.logger import format_order_of_magnitude, get_logger
from ddpkit.mirror import mirror_holding
from ddpkit.run.unsaved_objects import parts_of
from ddpkit.train_logger import ProgressSampleLogger, loggers_of

if TYPE_CHECKING:
    from ddpkit.checkpoints import Checkpointer
    from ddpkit.train_logger import TrainLogger

logger = get_logger(__name__)

SHARED = (
    "{} and {} both have save_file={!r}. Each would write into the other's rows: give each a file "
    "of its own."
)
NO_ROOM = (
    "the folder of checkpoints {!r} has {}B free, and a checkpoint of this run takes about {}B. "
    "Free some space, or {}. --ckpt_errors=warn goes on where a save fails."
)
ANOTHER_FOLDER = "give a folder on another disk, such as --output_folder=/path/to/results"
ANOTHER_MIRROR = (
    "set TMPDIR to a folder on another disk: it mirrors {}, and checkpoints are written there "
    "first. Or give a folder on another disk with --ckpt_local"
)
ROOM_FOR_ONE = (
    "%s has %sB free, which is room for one checkpoint of about %sB. A new one is written before "
    "an old one is deleted: the second save will fail, unless space is freed before."
)


def require_outputs(hparams: Any) -> None:
    """Refuse loggers whose files cannot be written.

    Args:
        hparams: of the Brain; its loggers are asked.

    Raises:
        ConfigError: a file or folder cannot be written.

    Ranks: main only.
    """
    loggers = loggers_of(hparams)
    _require_own_files(loggers)
    for train_logger in loggers:
        train_logger.require_writable()
    for value in vars(hparams).values():
        if isinstance(value, ProgressSampleLogger):
            value.require_writable()


def _require_own_files(loggers: list[TrainLogger]) -> None:
    """Refuse a table, or JSON lines, in a file that another logger writes, too."""
    writers: dict[str, TrainLogger] = {}
    for train_logger in loggers:
        file = train_logger.save_file
        if not file or not isinstance(file, (str, os.PathLike)):
            continue
        other = writers.setdefault(os.path.realpath(file), train_logger)
        needs_own = train_logger.needs_own_file or other.needs_own_file
        if other is not train_logger and needs_own:
            raise ConfigError(
                SHARED.format(type(other).__name__, type(train_logger).__name__, file)
            )


def require_room(
    folder: Path,
    bytes_needed: int,
    *,
    has_checkpoints: bool,
    warns: bool,
) -> None:
    """Refuse a disk that has no room for a checkpoint; warn where it has room for one and not for
    two.

    Args:
        folder: of the checkpoints.
        bytes_needed: by one checkpoint, about.
        has_checkpoints: whether there is one already, which may be deleted once the next is
            complete.
        warns: whether a save that fails only warns.

    Raises:
        ConfigError: less than one checkpoint is free.

    Ranks: main only.
    """
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    shown_free, shown_needed = (
        format_order_of_magnitude(number) for number in (free, bytes_needed)
    )
    if free < bytes_needed:
        mirror = mirror_holding(folder)
        advice = ANOTHER_FOLDER if mirror is None else ANOTHER_MIRROR.format(mirror.objects.url)
        words = NO_ROOM.format(str(folder), shown_free, shown_needed, advice)
        if not warns:
            raise ConfigError(words)
        logger.warning("%s", words)
    elif free < 2 * bytes_needed and not has_checkpoints:
        logger.warning(ROOM_FOR_ONE, folder, shown_free, shown_needed)


def checkpoint_bytes(checkpointer: Checkpointer | None) -> int:
    """Estimate the bytes of a checkpoint; 0 without a checkpointer.

    Args:
        checkpointer: with all that it saves.

    Ranks: local; no tensor is gathered or copied.

    Example:
        >>> checkpoint_bytes(None)
        0
    """
    if checkpointer is None:
        return 0
    return state_bytes(parts_of(checkpointer.recoverables), checkpointer.frozen_apart())


def folder_bytes(folder: Path) -> int:
    """Return the size of a checkpoint on the disk.

    Args:
        folder: of the checkpoint.

    Ranks: local.

    Example:
        >>> folder_bytes(Path("/nowhere"))
        0
    """
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def state_bytes(objects: Iterable[Any], left_out: Iterable[torch.Tensor] = ()) -> int:
    """Estimate the bytes of the states of modules, optimizers, and what tells them itself, whole,
    also where each rank has a part of them.

    Of an optimizer that has not stepped the state is guessed from its settings.

    Args:
        objects: modules, optimizers, and others, which count if they have ``saved_bytes``.
        left_out: tensors of modules that are not saved.

    Ranks: local; no tensor is gathered or copied.

    Example:
        >>> net = nn.Linear(9, 1)
        >>> state_bytes([net]), state_bytes([net, torch.optim.Adam(net.parameters())])
        (40, 120)
    """
    tensors: dict[int, int] = {}
    moments = 0
    told = 0
    apart = list(left_out)
    for obj in objects:
        if isinstance(obj, nn.Module):
            tensors |= {
                id(tensor): _bytes(tensor) for tensor in (*obj.parameters(), *obj.buffers())
            }
        elif isinstance(obj, torch.optim.Optimizer):
            for group in obj.param_groups:
                trained = [parameter for parameter in group["params"] if parameter.requires_grad]
                moments += _moments(group) * sum(map(_bytes, trained))
        elif hasattr(obj, "saved_bytes"):
            told += obj.saved_bytes(apart)
    for tensor in apart:
        tensors.pop(id(tensor), None)
    return sum(tensors.values()) + moments + told


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # of a sharded tensor: the size of the whole


def _moments(group: Mapping[str, Any]) -> int:
    """Return how many numbers an optimizer keeps for each number of a parameter, as far as its
    settings tell.
    """
    if "betas" in group:
        return 2 + bool(group.get("amsgrad"))
    if "alpha" in group and "centered" in group:  # RMSprop
        return 1 + bool(group["centered"]) + bool(group.get("momentum"))
    return int(bool(group.get("momentum")))
