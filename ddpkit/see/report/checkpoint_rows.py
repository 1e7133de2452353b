"""The checkpoints of a run: when each was saved, which are still there, and which is the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpkit.checkpointing import DIRECTORY_PREFIX, SAVED_AT, ends_epoch, read_checkpoint
from ddpkit.errors import CheckpointError
from ddpkit.run import NO_METRICS
from ddpkit.see.report.history import RunHistory
from ddpkit.see.report.records import Record, number_of, numbers_in
from ddpkit.see.report.run_files import RunFiles

DEPTH = 2  # folders below the run's in which checkpoints are looked for
MOST_ROWS = 40


@dataclass
class CheckpointRow:
    """One checkpoint.

    Attributes:
        name: of its directory.
        time: when it was saved, in seconds since 1970; None: unknown.
        epoch: as text.
        steps: optimizer steps of it; None: unknown.
        results: values of its meta.
        seconds: for which training stood still; None: unknown.
        size: in bytes; None: unknown.
        is_there: whether the directory is there now.
        is_deleted: whether the log says that it was deleted.
        fault: why it cannot be read; empty where it can.
        best_of: keys of the meta by which it is the best.
    """

    name: str
    time: float | None = None
    epoch: str = ""
    steps: float | None = None
    results: dict[str, float] | None = None
    seconds: float | None = None
    size: float | None = None
    is_there: bool = False
    is_deleted: bool = False
    fault: str = ""
    best_of: tuple[str, ...] = ()


def checkpoint_rows(run: RunFiles, history: RunHistory) -> list[CheckpointRow]:
    """List the checkpoints that a run's log tells of or its folder holds, the newest first."""
    rows = {name: _of_record(name, record) for name, record in history.checkpoints.items()}
    for path in _directories(run):
        row = rows.setdefault(path.name, CheckpointRow(path.name))
        row.is_there = True
        _add_meta(row, path)
    for name in history.deleted & rows.keys():
        rows[name].is_deleted = True
    for key, name in history.best.items():
        if name in rows:
            rows[name].best_of += (key,)
    return sorted(
        rows.values(),
        key=lambda row: (row.time or 0.0, row.name),
        reverse=True,
    )


def shown_rows(rows: list[CheckpointRow]) -> list[CheckpointRow]:
    """Return those of the rows that a page has room for: what is still there first."""
    there = [row for row in rows if row.is_there or row.best_of]
    gone = [row for row in rows if not (row.is_there or row.best_of)]
    chosen = {id(row) for row in [*there, *gone][:MOST_ROWS]}
    return [row for row in rows if id(row) in chosen]


def _of_record(name: str, record: Record) -> CheckpointRow:
    return CheckpointRow(
        name=name,
        time=number_of(record.get("time")),
        epoch=_epoch_text(record),
        steps=number_of(record.get("optimizer_step")),
        results=_results(record.get("meta")),
        seconds=number_of(record.get("seconds")),
        size=number_of(record.get("size", record.get("bytes"))),
    )


def _epoch_text(facts: Any) -> str:
    epoch = facts.get("epoch")
    if epoch is None:
        return ""
    is_end = facts.get("end_of_epoch", ends_epoch(facts))
    return f"end of {epoch}" if is_end else f"in {epoch}"


def _results(meta: Any) -> dict[str, float]:
    found = numbers_in(meta)
    return {name: value for name, value in found.items() if name not in NO_METRICS}


def _directories(run: RunFiles) -> Iterator[Path]:
    """Yield the checkpoints in the run's folder or in one below it, but not those set aside."""
    for depth in range(1, DEPTH + 1):
        for path in sorted(run.folder.glob("*/" * (depth - 1) + f"{DIRECTORY_PREFIX}+*")):
            is_aside = path.parent.name.startswith("earlier-")
            if path.is_dir() and not is_aside:
                yield path


def _add_meta(row: CheckpointRow, path: Path) -> None:
    try:
        meta = read_checkpoint(path).meta
    except CheckpointError as error:
        row.fault = str(error)
        return
    row.time = row.time or number_of(meta.get(SAVED_AT))
    row.epoch = row.epoch or _epoch_text(meta)
    row.results = row.results or _results(meta)
