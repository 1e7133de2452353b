"""A table of the statistics, for spreadsheets and pandas."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError
from ddpkit.train_logger.step_axis import flat
from ddpkit.train_logger.step_file import STEP, RowKind, StepFileLogger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ddpkit.reporting import Stats

TableRow = dict[str, Any]

LONGEST = 2**31 - 1  # characters of a value; the C long of some systems has no more


class CSVTrainLogger(StepFileLogger[TableRow]):
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

    State: saves how many rows the table has, and a checksum of them.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = CSVTrainLogger(f"{folder}/log.csv")
        ...     table.log_stats({"epoch": 1}, {"loss": 0.5})
        ...     table.log_stats({"epoch": 2}, {"loss": 0.25}, {"loss": 0.75})
        ...     Path(table.save_file).read_text().split()
        ['epoch,train_loss,valid_loss', '1,0.5,', '2,0.25,0.75']
    """

    def __init__(self, save_file: str | os.PathLike[str]) -> None:
        super().__init__(save_file, _TableRows(f"save_file={os.fspath(save_file)!r}"))

    def _log(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        self._begin_to_write()
        self._has_written = True
        row = flat({**meta, **self._step_now()}, stages, "_")
        self._file.make_room(row.get(STEP), _names(row))
        rows = self._file.rows()
        self._file.replace([*rows, row], rows)


class _TableRows(RowKind[TableRow]):
    """Rows of a table: values by column."""

    word = "row"

    def __init__(self, file_name: str) -> None:
        self._file_name = file_name

    def parse(self, data: bytes) -> list[TableRow]:
        try:
            text = io.StringIO(data.decode("utf-8"), newline="")
            with _long_values():
                rows: list[TableRow] = [*csv.DictReader(text)]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self._file_name} cannot be read as a table: {error}. Move it away."
            ) from error
        if any(None in row for row in rows):
            raise ConfigError(
                f"{self._file_name} has a row with more values than its first line has names, so "
                "it is not a table of this logger. Move it away."
            )
        return rows

    def render(self, rows: Sequence[TableRow], before: Sequence[TableRow]) -> bytes:
        # a table without rows keeps its first line
        columns = dict.fromkeys(name for row in (rows or before) for name in row)
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, [*columns], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        return text.getvalue().encode("utf-8", errors="backslashreplace")

    def step_of(self, row: TableRow) -> int | None:
        number = row.get(STEP) or ""
        return int(number) if number.isdecimal() else None

    def names_of(self, row: TableRow) -> frozenset[str]:
        return _names(row)

    def identity(self, row: TableRow) -> bytes:
        # a name that comes later is an empty value in the rows before
        return repr(sorted((name, value) for name, value in row.items() if value)).encode()


@contextlib.contextmanager
def _long_values() -> Iterator[None]:
    """Return a context in which values are read that have more than 131,072 characters, such as a
    matrix.
    """
    usual = csv.field_size_limit(LONGEST)
    try:
        yield
    finally:
        csv.field_size_limit(usual)


def _names(row: TableRow) -> frozenset[str]:
    """Return the names of a row's values; an empty one may be of a column of other rows."""
    return frozenset(name for name, value in row.items() if value is not None and value != "")
