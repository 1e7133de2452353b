"""Files of rows at optimizer steps: what a checkpoint knows of them, and what a resumed run cuts.

A checkpoint holds how many rows the file had, and a checksum of them. A run that goes on from it
keeps these rows, and takes out those of later steps, which it writes again. Of the checkpoint's own
step it may write some again and others not, such as those of a test. So a row that it writes there
takes the place of the one that came after the checkpoint.
"""

from __future__ import annotations

import abc
import json
import os
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from ddpkit.base import (
    POSITION,
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
    replacing,
    require_writable_file,
    writing,
)
from ddpkit.distributed import if_main_process
from ddpkit.logger import get_logger
from ddpkit.mirror import local_file
from ddpkit.reporting import move_logs_away
from ddpkit.train_logger.main_logger import MainTrainLogger
from ddpkit.train_logger.step_axis import StepAxis

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = get_logger(__name__)

STEP = "optimizer_step"

RowT = TypeVar("RowT")


class RowKind(abc.ABC, Generic[RowT]):
    """How the rows of a log stand in its file, and where they stand in the run.

    Attributes:
        word: for a row, in messages.

    Ranks: main only.
    """

    word: ClassVar[str]

    @abc.abstractmethod
    def parse(self, data: bytes) -> list[RowT]:
        """Return the rows of a file.

        Raises:
            ConfigError: the file holds something else.
        """

    @abc.abstractmethod
    def render(self, rows: Sequence[RowT], before: Sequence[RowT]) -> bytes:
        """Return the bytes of a file.

        Args:
            rows: of the file.
            before: those that it had.
        """

    @abc.abstractmethod
    def step_of(self, row: RowT) -> int | None:
        """Return the optimizer step of a row; None: it has none."""

    @abc.abstractmethod
    def names_of(self, row: RowT) -> frozenset[str]:
        """Return the names of a row's values, with their stages."""

    @abc.abstractmethod
    def identity(self, row: RowT) -> bytes:
        """Return what stays the same of a row, however the file is written anew."""

    def is_torn(self, row: RowT) -> bool:
        """Say whether a row is the beginning of one that was cut off."""
        return False

    def ends_in_a_torn_row(self, data: bytes) -> bool:
        """Say whether the last row of a file may be cut off, though nothing of it is missing."""
        return False


class StandingRows(Generic[RowT]):
    """The rows of a checkpoint's own step that came after it: a run that goes on from it may write
    them again.

    Args:
        kind: of the rows.
        rows: of the file.
        known: how many of them the checkpoint has seen.
        step: of the checkpoint.

    Ranks: main only.
    """

    def __init__(
        self,
        kind: RowKind[RowT],
        rows: Sequence[RowT],
        known: int,
        step: int,
    ) -> None:
        self._kind = kind
        self._known = known
        self._step = step
        self._numbers = Counter(
            kind.names_of(row) for row in rows[known:] if kind.step_of(row) == step
        )

    def has(self, step: int | None, names: frozenset[str]) -> bool:
        """Say whether a row of these names stands at a step."""
        return step == self._step and self._numbers[names] > 0

    def without(self, rows: Sequence[RowT], names: frozenset[str]) -> list[RowT]:
        """Return the rows of the file without the first that stands there with these names."""
        self._numbers[names] -= 1
        for number, row in enumerate(rows):
            if number >= self._known and self._stands(row, names):
                return [*rows[:number], *rows[number + 1 :]]
        return [*rows]  # somebody else has taken it out of the file

    def _stands(self, row: RowT, names: frozenset[str]) -> bool:
        return self._kind.step_of(row) == self._step and self._kind.names_of(row) == names


class StepFile(Generic[RowT]):
    """A file of rows at optimizer steps.

    Rows are replaced in one piece, and are on the disk before the file has its name. What a
    checkpoint counts is on the disk, too.

    Args:
        path: the file; it need not exist.
        kind: of its rows.

    Attributes:
        name: of the file in messages.

    Ranks: main only.
    """

    def __init__(self, path: str | os.PathLike[str], kind: RowKind[RowT]) -> None:
        self.path = Path(path)
        self.name = f"save_file={os.fspath(path)!r}"
        self._kind = kind
        self._saved: dict[str, int] | None = None
        self._standing: StandingRows[RowT] | None = None
        # how many rows the checkpoint has seen, and its step, until later rows are taken out
        self._later: tuple[int, int] | None = None

    def require_writable(self) -> None:
        """Refuse a file that cannot be written, or that holds something else."""
        require_writable_file(self.name, self.path)
        self.rows()

    def rows(self) -> list[RowT]:
        """Return the rows; none where there is no file."""
        return self._kind.parse(self._read())

    def replace(self, rows: Sequence[RowT], before: Sequence[RowT]) -> None:
        """Write the file anew, with other rows.

        Args:
            rows: to write.
            before: those that it has.
        """
        data = self._kind.render(rows, before)
        with writing(self.name):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as unfinished, unfinished.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

    def state(self) -> dict[str, int]:
        """Return what a checkpoint holds of the file, whose rows are on the disk then."""
        if self.path.exists():
            with writing(self.name), self.path.open("rb") as file:
                os.fsync(file.fileno())
        return self._state_of(self.rows())

    def recovered(self, state: dict[str, int]) -> None:
        """Note the state of the checkpoint that training goes on from."""
        self._saved = state

    def go_on(self, optimizer_step: int) -> None:
        """Note where a run goes on, and take out rows that a crash has torn.

        Args:
            optimizer_step: where it goes on; 0: it begins, and no row is taken out.
        """
        data = self._read()
        rows = self._kind.parse(data)
        known = self._known(rows, self._saved)
        self._saved = None
        self._standing = None
        self._later = None
        if not optimizer_step or not rows:
            return
        self._later = (known or 0, optimizer_step)
        if known is not None:
            later = rows[known:-1] if self._kind.ends_in_a_torn_row(data) else rows[known:]
            kept = [*rows[:known], *(row for row in later if not self._kind.is_torn(row))]
            self._standing = StandingRows(self._kind, kept, known, optimizer_step)
            if len(kept) < len(rows):
                self.replace(kept, rows)

    def take_out_later(self) -> None:
        """Take out the rows of later steps than that which the run goes on from, once it writes
        some itself: one that has nothing left to train leaves those of another Brain.
        """
        if self._later is None:
            return
        known, optimizer_step = self._later
        self._later = None
        rows = self.rows()
        kept = rows[:known]
        kept += [row for row in rows[known:] if (self._kind.step_of(row) or 0) <= optimizer_step]
        if len(kept) == len(rows):
            return
        self.replace(kept, rows)
        logger.info(
            "%s: %d %s(s) after optimizer step %d were taken out; the run writes them again.",
            self.path,
            len(rows) - len(kept),
            self._kind.word,
            optimizer_step,
        )

    def make_room(self, step: int | None, names: frozenset[str]) -> None:
        """Take out the row that stands in the place of a new one, where there is one.

        Args:
            step: of the new row.
            names: of its values.
        """
        if self._standing is None or not self._standing.has(step, names):
            return
        rows = self.rows()
        self.replace(self._standing.without(rows, names), rows)

    def _read(self) -> bytes:
        with writing(self.name):
            return self.path.read_bytes() if self.path.exists() else b""

    def _known(self, rows: list[RowT], saved: dict[str, int] | None) -> int | None:
        """Return how many rows the checkpoint has seen; None: it has seen another file."""
        if saved is None:
            return None
        known = saved["rows"]
        return known if self._state_of(rows[:known]) == saved else None

    def _state_of(self, rows: list[RowT]) -> dict[str, int]:
        checksum = 0
        for row in rows:
            checksum = zlib.crc32(self._kind.identity(row), checksum)
        return {"rows": len(rows), "checksum": checksum}


@register_checkpoint_hooks
class StepFileLogger(MainTrainLogger, Generic[RowT]):
    """The base of loggers whose statistics are rows of a file.

    Args:
        save_file: the file.
        kind: of its rows.

    Attributes:
        save_file: the file.

    Ranks: all, or the main process alone; only it writes.

    State: saves how many rows the file has, and a checksum of them. The Brain gives the logger to
    the checkpointer, unless the recipe does.
    """

    save_file: str
    needs_own_file = True

    def __init__(self, save_file: str | os.PathLike[str], kind: RowKind[RowT]) -> None:
        self.save_file = local_file("save_file", save_file)
        self._file = StepFile(self.save_file, kind)
        self._axis = StepAxis()
        self._has_written = False
        self._progress: Any = None  # of the Brain that goes on; None: of none

    def require_writable(self) -> None:
        """Refuse a file that cannot be written or holds something else, before the first epoch.

        Raises:
            ConfigError: so it is with :attr:`save_file`.

        Ranks: the main process alone.
        """
        self._file.require_writable()

    def begin_fit(self, optimizer_step: int) -> None:
        """Note where the run goes on: rows of later steps are taken out before it writes its first.

        Args:
            optimizer_step: 0: the run begins, and rows are left as they are.

        Raises:
            ConfigError: as :meth:`require_writable`.

        Ranks: the main process alone.
        """
        self._file.go_on(optimizer_step)
        self._progress = POSITION.progress

    def begin_anew(self) -> None:
        """Move the file to ``earlier-<time>``.

        Raises:
            ConfigError: as :meth:`TrainLogger.begin_anew`.

        Ranks: the main process alone.
        """
        if not self._has_written:
            move_logs_away([self._file.path])

    def _begin_to_write(self) -> None:
        """Take out what the run is going to write again; not for a row of an evaluation, nor for
        one after the call of ``fit``.
        """
        is_here = POSITION.progress is self._progress
        if is_here and (self._progress is None or self._progress.is_fitting):
            self._file.take_out_later()

    def _step_now(self) -> dict[str, Any]:
        """Return the optimizer step for a row, by its name; nothing where there is none."""
        step = self._axis.step_of({})
        return {} if step is None else {STEP: step}

    @mark_as_saver
    def _save(self, path: str | os.PathLike[str]) -> None:
        self._begin_to_write()
        Path(path).write_text(json.dumps(self._file.state()), encoding="utf-8")

    @mark_as_loader
    def _recover(self, path: str | os.PathLike[str], end_of_epoch: bool) -> None:
        # what is recovered for an evaluation is not gone on from
        is_fitting = POSITION.progress is not None and POSITION.progress.is_fitting
        if is_fitting and if_main_process():
            self._file.recovered(json.loads(Path(path).read_text(encoding="utf-8")))
