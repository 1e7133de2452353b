"""Logs a JSON object per call to a file of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpkit.base import writing
from ddpkit.reporting import RunLog, close_torn_line
from ddpkit.train_logger.step_file import STEP, RowKind, StepFileLogger

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from ddpkit.reporting import Stats


class JSONLTrainLogger(StepFileLogger[bytes]):
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

    State: saves how many lines the file has, and a checksum of them.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     JSONLTrainLogger(f"{folder}/log.jsonl").log_stats({"epoch": 1}, {"loss": 0.5})
        ...     json.loads(Path(f"{folder}/log.jsonl").read_text())["train"]
        {'loss': 0.5}
    """

    def __init__(self, save_file: str | os.PathLike[str]) -> None:
        super().__init__(save_file, _Lines())
        self._lines = RunLog(self.save_file, self._file.name)

    def begin_fit(self, optimizer_step: int) -> None:
        """Note where the run goes on, as :meth:`StepFileLogger.begin_fit`; end a line that a crash
        has cut off.

        Args:
            optimizer_step: 0: the run begins, and lines are left as they are.

        Raises:
            ConfigError: as :meth:`require_writable`.

        Ranks: the main process alone.
        """
        super().begin_fit(optimizer_step)
        with writing(self._file.name):
            close_torn_line(self._file.path)

    def log_step(self, values: Mapping[str, float], step: int) -> None:
        """Write an event "step"; arguments as in :meth:`TrainLogger.log_step`.

        Ranks: the main process alone.
        """
        self._append("step", {STEP: step, "values": values})

    def _log(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        self._append("stats", {**self._step_now(), "meta": meta, **stages})

    def _append(self, event: str, fields: Mapping[str, Any]) -> None:
        self._begin_to_write()
        if not self._has_written:
            with writing(self._file.name):
                close_torn_line(self._file.path)
        self._has_written = True
        self._file.make_room(fields.get(STEP), _names({"event": event, **fields}))
        self._lines.write(event, **fields)


class _Lines(RowKind[bytes]):
    """Lines as they stand in the file, with their ends."""

    word = "line"

    def parse(self, data: bytes) -> list[bytes]:
        return data.splitlines(keepends=True)

    def render(self, rows: Sequence[bytes], before: Sequence[bytes]) -> bytes:
        return b"".join(rows)

    def step_of(self, row: bytes) -> int | None:
        step = _record(row).get(STEP)
        return step if isinstance(step, int) else None

    def names_of(self, row: bytes) -> frozenset[str]:
        return _names(_record(row))

    def identity(self, row: bytes) -> bytes:
        return row

    def is_torn(self, row: bytes) -> bool:
        return not row.endswith(b"\n")


def _record(line: bytes) -> dict[str, Any]:
    """Return the values of a line; none of a torn line, or one of another program."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _names(record: Mapping[str, Any]) -> frozenset[str]:
    """Return the event of a line, and the names of its values with their stages."""
    stages = {str(stage): values for stage, values in record.items() if isinstance(values, Mapping)}
    return frozenset(
        [
            str(record.get("event")),
            *(f"{stage}/{name}" for stage, values in stages.items() for name in values),
        ]
    )
