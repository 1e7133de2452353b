"""What one save is asked to do, and the names that files can have."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpkit.base import SaveHook
from ddpkit.checkpointing.checkpoint import (
    DIRECTORY_PREFIX,
    END_OF_EPOCH,
    SAVED_AT,
    SUFFIX,
    as_number,
)
from ddpkit.checkpointing.hook_lookup import saves_on_every_rank
from ddpkit.checkpointing.save_report import SaveReport
from ddpkit.checkpointing.selection import Retention
from ddpkit.checkpointing.shard_files import shard_path
from ddpkit.checkpointing.shard_saving import ShardSaving
from ddpkit.checkpointing.storage import REPLACED_PREFIX
from ddpkit.errors import CheckpointError, ConfigError

LONGEST_FILE = 255  # bytes, on all usual file systems
LONGEST_CHECKPOINT = LONGEST_FILE - len(f"{REPLACED_PREFIX}{DIRECTORY_PREFIX}+")
MOST_RANKS = 999_999
# of its files, shards have the longest names
LONGEST_RECOVERABLE = LONGEST_FILE - len(shard_path(Path(SUFFIX), MOST_RANKS, MOST_RANKS).name)


def check_recoverable_name(name: Any) -> None:
    """Refuse a name that cannot be that of a recoverable's files.

    Args:
        name: the intended name.

    Raises:
        ConfigError: not a string, empty, too long, or a path out of the folder.

    Example:
        >>> check_recoverable_name("../model")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: the name of a recoverable, '../model' cannot become a file name:
        give a text ...
    """
    _check_file_name(name, "the name of a recoverable,", LONGEST_RECOVERABLE)


def check_checkpoint_name(name: Any) -> None:
    """Refuse a name that cannot be that of a checkpoint.

    Args:
        name: the intended name.

    Raises:
        ConfigError: not a string, empty, too long, or a path out of the folder.

    Example:
        >>> check_checkpoint_name("../best")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: the name of a checkpoint, '../best' cannot become a file name:
        give a text ...
    """
    _check_file_name(name, "the name of a checkpoint,", LONGEST_CHECKPOINT)


def _check_file_name(
    name: Any,
    what: str,
    longest: int,
) -> None:
    is_name = isinstance(name, str) and not any(part in name for part in ("/", "\\", "\0", ".."))
    if not is_name or not 0 < len(os.fsencode(name)) <= longest:
        raise ConfigError(
            f"{what} {str(name)[:40]!r} cannot become a file name: give a text of 1 to {longest} "
            "bytes without a slash, a backslash and '..'."
        )


@dataclass(frozen=True, eq=False)
class SaveRequest:
    """What one save is asked to do.

    Attributes:
        meta: what the caller adds to ``CKPT.yaml``.
        end_of_epoch: whether an epoch has ended.
        name: of the checkpoint, or None.
        verbosity: logging level of the lines that tell of it.
        objects: what is saved, by name.
        hooks: what saves each.
        retention: what to delete afterwards, or None.
        epoch: for the line that tells of it; None where it is not known.
        begun: when it was asked for, by ``time.monotonic``: training stands still from then on.
        tell: called with a :class:`SaveReport` once the checkpoint is complete, perhaps in a
            thread; or None.
        shards: what each rank writes by itself, of states that are divided over the ranks; or None.

    Ranks: local.

    Example:
        >>> import logging
        >>> SaveRequest({"loss": 0.5}, True, None, logging.INFO, {}, {}).all_meta()
        {'unixtime': ..., 'end-of-epoch': True, 'loss': 0.5}
    """

    meta: Mapping[str, Any]
    end_of_epoch: bool
    name: str | None
    verbosity: int
    objects: Mapping[str, Any]
    hooks: Mapping[str, SaveHook]
    retention: Retention | None = None
    epoch: int | None = None
    begun: float = field(default_factory=time.monotonic)
    tell: Callable[[SaveReport], object] | None = None
    shards: ShardSaving | None = None

    def hooks_where(self, *, every_rank: bool) -> dict[str, SaveHook]:
        """Return the hooks that run on every rank, or on the main process alone."""
        return {
            name: hook
            for name, hook in self.hooks.items()
            if saves_on_every_rank(hook) == every_rank
        }

    def all_meta(self, after: float = 0.0) -> dict[str, Any]:
        """Return what ``CKPT.yaml`` says; a clock that was set back makes it no older than
        ``after``.
        """
        from ddpkit.base import to_plain

        now = max(time.time(), math.nextafter(after, math.inf))
        meta: dict[str, Any] = to_plain(
            {SAVED_AT: now, END_OF_EPOCH: self.end_of_epoch, **self.meta}
        )
        if as_number(meta[SAVED_AT]) is None:
            raise CheckpointError(
                f"meta has {SAVED_AT}={meta[SAVED_AT]!r}, which must be a number of seconds."
            )
        return meta
