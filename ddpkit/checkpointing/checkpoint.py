"""One saved checkpoint: where it is, what it says of itself, and when it was saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddpkit.checkpointing.places import PLACES, StorePlace

DIRECTORY_PREFIX = "CKPT"
SUFFIX = ".ckpt"

# The keys that the meta of each checkpoint has, in its CKPT.yaml.
SAVED_AT = "unixtime"
END_OF_EPOCH = "end-of-epoch"
#: Both: what else is in the meta is of the caller.
OWN_META = frozenset({SAVED_AT, END_OF_EPOCH})


class Checkpoint(NamedTuple):
    """One saved checkpoint; two are equal when they have one path and were saved at one time.

    A checkpoint may be deleted, and another saved under its name. Where its folder is a mirror of a
    store, what other ranks are sent of it has the paths of their machines.

    Attributes:
        path: its directory.
        meta: what ``CKPT.yaml`` holds: ``unixtime`` (seconds), ``end-of-epoch`` and what the caller
            added.
        paramfiles: the file of each recoverable, by name.

    Ranks: local.

    Example:
        >>> path = Path("CKPT+a")
        >>> one, same, other = (
        ...     Checkpoint(path, {"unixtime": time}, {}) for time in (1.0, 1.0, 2.0)
        ... )
        >>> one == same, one == other
        (True, False)
    """

    path: Path
    meta: dict[str, Any]
    paramfiles: dict[str, Path]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint) or self.path != other.path:
            return False
        return as_number(self.meta.get(SAVED_AT)) == as_number(other.meta.get(SAVED_AT))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        files = {name: PLACES.sent(path) for name, path in self.paramfiles.items()}
        return _arrived, (PLACES.sent(self.path), self.meta, files)


def _arrived(
    path: Path | StorePlace,
    meta: dict[str, Any],
    files: Mapping[str, Path | StorePlace],
) -> Checkpoint:
    """Return a checkpoint that another rank has sent, with the paths of this machine."""
    here = {name: PLACES.arrived(file) for name, file in files.items()}
    return Checkpoint(PLACES.arrived(path), meta, here)


def ckpt_recency(ckpt: Checkpoint) -> float:
    """Return when a checkpoint was saved, in seconds since 1970: the importance key for "the
    newest".

    Args:
        ckpt: the checkpoint.

    Returns:
        Its ``unixtime``.

    Ranks: local.

    Example:
        >>> ckpt_recency(Checkpoint(Path("CKPT+a"), {"unixtime": 5.0}, {}))
        5.0
    """
    return float(ckpt.meta[SAVED_AT])


def ends_epoch(meta: Mapping[str, Any]) -> bool:
    """Say whether a checkpoint is from the end of an epoch; one that does not tell is.

    Args:
        meta: of the checkpoint.

    Ranks: local.

    Example:
        >>> ends_epoch({"end-of-epoch": False}), ends_epoch({})
        (False, True)
    """
    return bool(meta.get(END_OF_EPOCH, True))


def as_number(value: Any) -> float | None:
    """Return a metric as a number, or None for what cannot be compared: NaN, text, more than one
    number.

    Args:
        value: of any type.

    Example:
        >>> as_number(torch.tensor(2)), as_number("2")
        (2.0, None)
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    try:
        return (
            float(value)
            if isinstance(value, (bool, int, float)) and not math.isnan(value)
            else None
        )
    except OverflowError:  # a whole number beyond all measure
        return None
