"""A table of the statistics, for spreadsheets and pandas."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.base import replacing, require_writable_file, writing
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.reporting import Stats, move_logs_away
from ddpkit.train_logger.main_logger import MainTrainLogger
from ddpkit.train_logger.step_axis import StepAxis, flat

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = get_logger(__name__)

STEP = "optimizer_step"


class CSVTrainLogger(MainTrainLogger):
    """Writes a table with one row per call: ``epoch,optimizer_step,train_loss,valid_loss``.

    A name that comes later gets a column of its own, which is empty in the rows before. The file
    is written anew in one piece at each call, so it is whole whenever a run is killed. A run that
    goes on from a checkpoint takes out the rows of later steps: it writes them again.

    Args:
        save_file: the table; rows are added to the rows that are there. A run with
            ``--resume=never`` moves an earlier table away.

    Raises:
        ConfigError: the file cannot be written, or is no such table.

    Ranks: all, or the main process alone; only it writes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = CSVTrainLogger(f"{folder}/log.csv")
        ...     table.log_stats({"epoch": 1}, {"loss": 0.5})
        ...     table.log_stats({"epoch": 2}, {"loss": 0.25}, {"loss": 0.75})
        ...     Path(table.save_file).read_text().split()
        ['epoch,train_loss,valid_loss', '1,0.5,', '2,0.25,0.75']
    """

    save_file: str

    def __init__(self, save_file: str | os.PathLike[str]) -> None:
        self.save_file = os.fspath(save_file)
        self._axis = StepAxis()
        self._has_written = False

    def require_writable(self) -> None:
        """Refuse a file that cannot be written or is no table, before the first epoch.

        Raises:
            ConfigError: so it is with :attr:`save_file`.

        Ranks: the main process alone.
        """
        require_writable_file(self._name(), self.save_file)
        self._rows()

    def begin_fit(self, optimizer_step: int) -> None:
        """Take out the rows of later steps than that which the run goes on from.

        Args:
            optimizer_step: 0: the run begins, and rows are left as they are.

        Raises:
            ConfigError: as :meth:`require_writable`.

        Ranks: the main process alone.
        """
        rows = self._rows()
        kept = [row for row in rows if not _is_later(row, optimizer_step)]
        if optimizer_step and len(kept) < len(rows):
            self._write(kept)
            logger.info(
                "%s: %d row(s) after optimizer step %d were taken out; the run writes them again.",
                self.save_file,
                len(rows) - len(kept),
                optimizer_step,
            )

    def begin_anew(self) -> None:
        """Move the table to ``earlier-<time>``.

        Raises:
            ConfigError: as :meth:`TrainLogger.begin_anew`.

        Ranks: the main process alone.
        """
        if not self._has_written:
            move_logs_away([Path(self.save_file)])

    def _log(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        self._has_written = True
        step = self._axis.step_of({})
        at = {} if step is None else {STEP: step}
        self._write([*self._rows(), flat({**meta, **at}, stages, "_")])

    def _write(self, rows: list[dict[str, Any]]) -> None:
        path = Path(self.save_file)
        columns = dict.fromkeys(name for row in rows for name in row)
        with writing(self._name()):
            path.parent.mkdir(parents=True, exist_ok=True)
            with (
                replacing(path) as unfinished,
                unfinished.open("w", newline="", encoding="utf-8") as file,
            ):
                table = csv.DictWriter(file, [*columns], lineterminator="\n")
                table.writeheader()
                table.writerows(rows)

    def _rows(self) -> list[dict[str, Any]]:
        path = Path(self.save_file)
        if not path.exists():
            return []
        try:
            with path.open(newline="", encoding="utf-8") as file:
                rows: list[dict[str, Any]] = [*csv.DictReader(file)]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self._name()} cannot be read as a table: {error}. Move it away."
            ) from error
        if any(None in row for row in rows):
            raise ConfigError(
                f"{self._name()} has a row with more values than its first line has names, so it "
                "is not a table of this logger. Move it away."
            )
        return rows

    def _name(self) -> str:
        return f"save_file={self.save_file!r}"


def _is_later(row: Mapping[str, str], optimizer_step: int) -> bool:
    number = row.get(STEP) or ""
    return number.isdecimal() and int(number) > optimizer_step
