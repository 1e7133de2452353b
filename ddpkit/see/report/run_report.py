"""All that the page says of one run, read from its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddpkit.see.report.attempts import FAILED, FINISHED, STOPPED
from ddpkit.see.report.checkpoint_rows import CheckpointRow, checkpoint_rows
from ddpkit.see.report.columns import STEP, Numbers
from ddpkit.see.report.goodput import Goodput, goodput_of
from ddpkit.see.report.history import META, RunHistory
from ddpkit.see.report.records import Unread, read_records
from ddpkit.see.report.run_files import RunFiles
from ddpkit.see.report.settings import (
    command_of,
    environment_lines,
    environment_of,
    hyperparameters_of,
    log_tails,
    options_of,
    packages_of,
)

GOING_ON = "going on"
STARTED = "only started"
ENDED = "ended or killed"


@dataclass(frozen=True)
class RunReport:
    """A run as it is on its disk.

    Attributes:
        files: where it is.
        history: what its log says.
        goodput: what its wall time went into.
        steps: what was logged per step, without the steps that were done again.
        speed: the measured seconds of training, likewise.
        unread: what of the log could not be read.
        is_running: whether a process on this machine holds its folder.
        options: that differ from their defaults.
        hyperparameters: of its YAML file.
        environment: what it ran on.
        packages: installed ones, with versions.
        checkpoints: the newest first.
    """

    files: RunFiles
    history: RunHistory
    goodput: Goodput
    steps: Mapping[str, Numbers]
    speed: Mapping[str, Numbers]
    unread: Unread
    is_running: bool
    options: Mapping[str, str]
    hyperparameters: Mapping[str, str]
    environment: Mapping[str, str]
    packages: Mapping[str, str]
    checkpoints: Sequence[CheckpointRow]

    @property
    def label(self) -> str:
        """A short name."""
        return self.files.label

    @property
    def state(self) -> str:
        """What became of it, in one or two words."""
        if self.is_running:
            return GOING_ON
        if not self.history.attempts or not self.has_worked:
            outcome = self.history.now.outcome if self.history.attempts else ""
            return outcome if outcome == FAILED else STARTED
        outcome = self.history.now.outcome
        return outcome if outcome in {STOPPED, FAILED, FINISHED} else ENDED

    @property
    def has_worked(self) -> bool:
        """Whether it has trained or evaluated at all."""
        return bool(self.history.epochs or self.speed or self.steps)

    @property
    def command(self) -> str:
        """The command line of its last start."""
        return command_of(self.history)

    @property
    def environment_lines(self) -> list[str]:
        """What its ``env.log`` says besides packages."""
        return environment_lines(self.files)

    @property
    def log_tails(self) -> dict[str, list[str]]:
        """The last lines of its logs."""
        return log_tails(self.files)

    @property
    def optimizer_steps(self) -> float:
        """How far it came."""
        return max((attempt.reached for attempt in self.history.attempts), default=0.0)

    def median(self, column: str) -> float | None:
        """Return the median of a column of the measured seconds; None without one."""
        values = self.speed.get(column)
        finite = values[np.isfinite(values)] if values is not None else None
        return float(np.median(finite)) if finite is not None and len(finite) else None

    def results(self) -> dict[str, float]:
        """Return the last value of everything that was logged by epoch, such as ``valid loss``."""
        found = {}
        for (name, stage), values in self.history.epochs.items():
            label = name if stage == META else f"{stage} {name}"
            found[label] = values[max(values)]
        return found


def read_run(files: RunFiles) -> RunReport:
    """Read all that the page says of a run.

    Raises:
        ConfigError: its log cannot be read, or is none.
    """
    is_running = files.is_running()
    history = RunHistory()
    unread = Unread()
    for record in read_records(files.metrics, unread):
        history.add(record)
    goodput = goodput_of(history)
    return RunReport(
        files=files,
        history=history,
        goodput=goodput,
        steps=_ordered(history.steps.counted(goodput.limits)),
        speed=_ordered(history.speed.counted(goodput.limits)),
        unread=unread,
        is_running=is_running,
        options=options_of(history),
        hyperparameters=hyperparameters_of(files),
        environment=environment_of(history),
        packages=packages_of(files),
        checkpoints=checkpoint_rows(files, history),
    )


def _ordered(columns: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Return columns by ascending optimizer steps; a log of several calls of ``fit`` may go
    back.
    """
    if STEP not in columns:
        return dict(columns)
    order = np.argsort(columns[STEP], kind="stable")
    return {name: column[order] for name, column in columns.items()}
