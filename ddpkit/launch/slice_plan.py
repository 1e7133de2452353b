"""A measured slice of a run: what ``python -m ddpkit scale``, ``lr-find``, ``estimate`` and
``diff --replay`` ask of the processes that they start.

The plan is in the environment of each of them. Such a process runs the recipe's own script up to
its first call of ``fit``, measures a few steps there and ends. It writes nothing of the user's: no
output folder, checkpoint or log.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Name of the variable that holds the plan, as JSON.
SLICE = "DDPKIT_SLICE"


@dataclass(frozen=True)
class SlicePlan:
    """What a slice measures, and where it may write.

    Args:
        scratch: folder in which all that the recipe writes may go; removed by whoever has made the
            plan.
        result: file that the main process writes; it is complete when it is there.
        seconds: to measure.
        warmup_seconds: before that, at least.
        min_windows: optimizer steps to measure, at least.
        warmup_windows: optimizer steps before these, at least.
        max_seconds: from the first step on. Then the slice ends with what it has, if that is one
            step.
        options: run options that win over those of the recipe.
        loader_workers: numbers of workers with which the loader alone is measured before; none: it
            is not.
        loader_seconds: to measure it with each of them.
        learning_rates: to be tried, one in each optimizer step; then nothing else is measured.
        estimated_on: numbers of processes for which the memory is estimated; then nothing else is
            measured.
        assumed: run options of the run that is estimated, where they differ from those of the
            slice.
        replayed_to: optimizer step up to which a run makes its steps again, from the checkpoint in
            the scratch folder; then nothing is measured. 0: it does not.

    Ranks: local; equal on all ranks.

    Example:
        >>> plan = SlicePlan("/tmp/scratch", "/tmp/scratch/result.json")
        >>> find_slice({SLICE: plan.text()}) == plan
        True
    """

    scratch: str
    result: str
    seconds: float = 2.0
    warmup_seconds: float = 0.5
    min_windows: int = 10
    warmup_windows: int = 5
    max_seconds: float = 120.0
    options: Mapping[str, Any] = field(default_factory=dict)
    loader_workers: list[int] = field(default_factory=list)
    loader_seconds: float = 1.5
    learning_rates: list[float] = field(default_factory=list)
    estimated_on: list[int] = field(default_factory=list)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    replayed_to: int = 0

    def text(self) -> str:
        """Return the plan as the value of an environment variable."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def output_folder(self) -> Path:
        """The folder that stands in for the recipe's output folder."""
        return Path(self.scratch, "output")

    @property
    def checkpoints_folder(self) -> Path:
        """The folder that stands in for the recipe's folder of checkpoints."""
        return Path(self.scratch, "checkpoints")

    @property
    def replayed_log(self) -> Path:
        """The log in which a replay leaves its records."""
        return Path(self.scratch, "metrics.jsonl")

    def holds(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a path is in the scratch folder."""
        return Path(path).absolute().is_relative_to(Path(self.scratch).absolute())


def find_slice(environ: Mapping[str, str] | None = None) -> SlicePlan | None:
    """Return the plan of this process; None where it is no slice.

    Args:
        environ: the environment to read; None reads ``os.environ`` at the time of the call.

    Example:
        >>> find_slice({}) is None
        True
    """
    text = (os.environ if environ is None else environ).get(SLICE)
    return SlicePlan(**json.loads(text)) if text else None


def options_of_slice(always: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return the run options that the plan of this process decides; none where it is no slice.

    Args:
        always: of every slice.
        known: the names of all run options.

    Example:
        >>> options_of_slice({"debug": False}, known={"debug"})
        {}
    """
    plan = find_slice()
    if plan is None:
        return {}
    return {name: value for name, value in {**always, **plan.options}.items() if name in known}
