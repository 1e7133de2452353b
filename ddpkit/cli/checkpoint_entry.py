"""What ``python -m ddpkit ckpt`` knows of one checkpoint, of a disk or of a store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpkit.base import load_plain_yaml
from ddpkit.checkpointing import SUFFIX, Checkpoint, ckpt_recency, ends_epoch
from ddpkit.cli.shown_text import value_text
from ddpkit.errors import CheckpointError
from ddpkit.run import EPOCH, NO_METRICS, STEP, beginning

UNKNOWN = "?"


@dataclass(frozen=True)
class Entry:
    """One directory that is, or was, a checkpoint.

    Attributes:
        path: the directory; of one in a store, its name there.
        meta: of ``CKPT.yaml``; empty if it cannot be read.
        files: size in bytes of each regular file, by its relative name.
        manifest: what ``manifest.json`` says beside the files; empty if it cannot be read.
        brain: what ``brain.ckpt`` says of the loop; likewise.
        reasons: what is wrong.
    """

    path: Path
    meta: dict[str, Any]
    files: dict[str, int]
    manifest: dict[str, Any]
    brain: dict[str, Any]
    reasons: list[str]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    @property
    def checkpoint(self) -> Checkpoint:
        """The same, as searches for checkpoints know it."""
        own = [name for name in self.files if name.endswith(SUFFIX) and "/" not in name]
        return Checkpoint(
            self.path,
            self.meta,
            {name.removesuffix(SUFFIX): self.path / name for name in own},
        )

    @property
    def saved(self) -> float:
        """When it was saved; 0 if that cannot be read."""
        return ckpt_recency(self.checkpoint) if self.meta else 0.0

    @property
    def metrics(self) -> dict[str, Any]:
        """What the recipe has written into the meta."""
        return {name: value for name, value in self.meta.items() if name not in NO_METRICS}

    @property
    def epoch_text(self) -> str:
        """The epoch that the meta names, or the Brain, and the batch where it was saved in the
        middle.
        """
        epoch = value_text(self.meta.get("epoch", self.brain.get(EPOCH, UNKNOWN)), 20)
        if ends_epoch(self.meta):
            return f"end of {epoch}" if self.meta else UNKNOWN
        return f"in {epoch}, batch {value_text(self.brain.get(STEP, UNKNOWN), 20)}"

    @property
    def time_text(self) -> str:
        """When it was saved, in local time."""
        try:
            return (
                time.strftime("%Y-%m-%d %H:%M", time.localtime(self.saved))
                if self.meta
                else UNKNOWN
            )
        except (OverflowError, ValueError, OSError):
            return UNKNOWN


def newest_first(found: Iterable[Entry]) -> list[Entry]:
    """Sort by time; those of one time by name."""
    return sorted(
        found,
        key=lambda row: (row.saved, row.path.name),
        reverse=True,
    )


def made_by(manifest: str | bytes) -> dict[str, Any]:
    """Return what a manifest says beside the files; nothing where it cannot be read."""
    try:
        says = json.loads(manifest)
    except (ValueError, RecursionError):  # verifying says why
        return {}
    beside = says.items() if isinstance(says, dict) else ()
    return {name: value for name, value in beside if name not in {"files", "digest", "format"}}


def said_of_loop(brain: str) -> dict[str, Any]:
    """Return what the text of a ``brain.ckpt`` says of the loop; nothing where it is no YAML."""
    try:
        says = load_plain_yaml(beginning(brain))
    except (ValueError, CheckpointError):
        return {}
    return says if isinstance(says, dict) else {}
