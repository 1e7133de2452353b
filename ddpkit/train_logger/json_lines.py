"""A JSON object per call in a file of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ddpkit.base import replacing, require_writable_file, writing
from ddpkit.logger import get_logger
from ddpkit.reporting import RunLog, Stats, close_torn_line, move_logs_away
from ddpkit.train_logger.main_logger import MainTrainLogger
from ddpkit.train_logger.step_axis import StepAxis

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = get_logger(__name__)

STEP = "optimizer_step"


class JSONLTrainLogger(MainTrainLogger):
    """Writes one JSON object per line to a file: the statistics of each call, and curves.

    ``metrics.jsonl`` has these and more. This file has statistics alone, wherever it is wanted.
    Values are written as there (:class:`RunLog`). A run that goes on from a checkpoint takes out
    the lines of later steps: it writes them again.

    Args:
        save_file: the file; it is appended to. A run with ``--resume=never`` moves an earlier file
            away.

    Raises:
        ConfigError: the file cannot be written.

    Ranks: all, or the main process alone; only it writes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     JSONLTrainLogger(f"{folder}/log.jsonl").log_stats({"epoch": 1}, {"loss": 0.5})
        ...     json.loads(Path(f"{folder}/log.jsonl").read_text())["train"]
        {'loss': 0.5}
    """

    save_file: str

    def __init__(self, save_file: str | os.PathLike[str]) -> None:
        self.save_file = os.fspath(save_file)
        self._axis = StepAxis()
        self._file = RunLog(save_file)
        self._has_written = False

    def require_writable(self) -> None:
        """Refuse a file that cannot be written, before the first epoch.

        Raises:
            ConfigError: :attr:`save_file` cannot be written.

        Ranks: the main process alone.
        """
        require_writable_file(self._name(), self.save_file)

    def begin_fit(self, optimizer_step: int) -> None:
        """Take out the lines of later steps than that which the run goes on from.

        Args:
            optimizer_step: 0: the run begins, and lines are left as they are.

        Raises:
            ConfigError: as :meth:`require_writable`.

        Ranks: the main process alone.
        """
        path = Path(self.save_file)
        with writing(self._name()):
            close_torn_line(path)
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            kept = [line for line in lines if not _is_later(line, optimizer_step)]
            if not optimizer_step or len(kept) == len(lines):
                return
            with replacing(path) as unfinished:
                unfinished.write_bytes(b"".join(kept))
        logger.info(
            "%s: %d line(s) after optimizer step %d were taken out; the run writes them again.",
            self.save_file,
            len(lines) - len(kept),
            optimizer_step,
        )

    def begin_anew(self) -> None:
        """Move the file to ``earlier-<time>``.

        Raises:
            ConfigError: as :meth:`TrainLogger.begin_anew`.

        Ranks: the main process alone.
        """
        if not self._has_written:
            move_logs_away([Path(self.save_file)])

    def log_step(self, values: Mapping[str, float], step: int) -> None:
        """Write an event "step"; arguments as in :meth:`TrainLogger.log_step`.

        Ranks: the main process alone.
        """
        self._has_written = True
        self._file.write("step", **{STEP: step, "values": values})

    def _log(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        self._has_written = True
        step = self._axis.step_of({})
        at = {} if step is None else {STEP: step}
        self._file.write("stats", **at, meta=meta, **stages)

    def _name(self) -> str:
        return f"save_file={self.save_file!r}"


def _is_later(line: bytes, optimizer_step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:  # a torn line, or another program's: it is left
        return False
    step = record.get(STEP) if isinstance(record, dict) else None
    return isinstance(step, int) and step > optimizer_step
