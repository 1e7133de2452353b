"""What ``python -m ddpkit lr-find`` was asked for, looked at before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpkit.errors import ConfigError
from ddpkit.launch import count_processes, find_launch
from ddpkit.see.lr_find.curve import LEAST_POINTS
from ddpkit.see.scale.cells import Cell
from ddpkit.see.scale.request import device_of, require_outputs, require_recipe
from ddpkit.see.scale.slice_process import MeasuredCommand

UNDER_A_LAUNCHER = (
    "lr-find starts the processes of this machine itself, and it was started by {}. Start it alone "
    "and say how many: python -m ddpkit lr-find train.py hparams.yaml --nproc 2"
)


@dataclass(frozen=True)
class LrFindRequest:
    """What to try, and what to write.

    Args:
        words: script and arguments of the recipe.
        nproc: number of processes.
        first: the first learning rate.
        last: the last one.
        steps: number of rates, one for each optimizer step.
        max_seconds: from the first step on; then the curve ends.
        plot: file for the plot, or None.
        json: file for the curve, or None.
    """

    words: Sequence[str]
    nproc: int = 1
    first: float = 1e-6
    last: float = 10.0
    steps: int = 100
    max_seconds: float = 600.0
    plot: Path | None = None
    json: Path | None = None

    @property
    def recipe(self) -> MeasuredCommand:
        """The command that is run."""
        return MeasuredCommand(tuple(self.words))

    @property
    def cell(self) -> Cell:
        """The recipe's own way to run, on so many processes."""
        return Cell("", self.nproc)

    def check(self) -> None:
        """Refuse what cannot work, before anything runs.

        Raises:
            ConfigError: rates, files or processes cannot be used.
            MissingExtraError: a plot is asked for, and there is no matplotlib.
            MissingFileError: there is no such script.
        """
        info = find_launch()
        if info.is_distributed:
            raise ConfigError(UNDER_A_LAUNCHER.format(info.launcher))
        if not (0.0 < self.first < self.last < math.inf):
            raise ConfigError(
                f"--from={self.first!r} --to={self.last!r}: learning rates rise from the first to "
                "the last. Give numbers above 0, the larger one to --to."
            )
        if self.steps < LEAST_POINTS:
            raise ConfigError(
                f"--steps={self.steps!r}: a curve of fewer than {LEAST_POINTS} steps shows no "
                "learning rate. Give more."
            )
        require_recipe(self.words)
        require_outputs(self.plot, self.json)
        if self.nproc > 1:
            count_processes(self.nproc, device_of(self.words))
