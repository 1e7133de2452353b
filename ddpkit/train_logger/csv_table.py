"""Logs the statistics as a table, for spreadsheets and pandas."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from typing import TYPE_CHECKING, Any

from ddpkit.base import writing
from ddpkit.errors import ConfigError
from ddpkit.reporting import append
from ddpkit.train_logger.step_axis import flat
from ddpkit.train_logger.step_file import STEP, RowKind, StepFileLogger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ddpkit.reporting import Stats

TableRow = dict[str, Any]

LONGEST = 2**31 - 1  # characters of a value; the C long of some systems has no more


class CSVTrainLogger(StepFileLogger[TableRow]):
    """Writes a table with one row per call: ``epoch,optimizer_step,train_loss,valid_loss``.

    A name that comes later gets a column of its own, which is empty in the rows before: the file is
    written anew then. Else the row is added at its end. Both are done in one piece, so the table is
    whole whenever a run is killed. A run that
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
        with writing(self._file.name):
            columns = _columns_that_go_on(self._file.path)
            if columns and row.keys() <= columns.keys():
                append(self._file.path, _lines([row], columns))
                return
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
        first = dict(zip(columns, columns, strict=True))
        return _lines([first, *rows], columns).encode("utf-8", errors="backslashreplace")

    def step_of(self, row: TableRow) -> int | None:
        number = row.get(STEP) or ""
        return int(number) if number.isdecimal() else None

    def names_of(self, row: TableRow) -> frozenset[str]:
        return _names(row)

    def identity(self, row: TableRow) -> bytes:
        # a name that comes later is an empty value in the rows before
        return repr(sorted((name, value) for name, value in row.items() if value)).encode()

    def is_torn(self, row: TableRow) -> bool:
        return None in row.values()  # it has fewer values than the first line has names

    def ends_in_a_torn_row(self, data: bytes) -> bool:
        return not data.endswith(b"\n")  # its last value may be a part of one


def _lines(rows: Iterable[TableRow], columns: Iterable[str]) -> str:
    """Return rows as they stand in the file."""
    text = io.StringIO(newline="")
    csv.DictWriter(text, [*columns], lineterminator="\n").writerows(rows)
    return text.getvalue()


def _columns_that_go_on(path: Path) -> dict[str, None]:
    """Return the columns of a table to whose end a row can be added; else none, as of a file that
    is no table, or has a name twice: a row has one value for both.
    """
    if not path.exists() or not path.stat().st_size:
        return {}
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            return {}
    try:
        with path.open(encoding="utf-8", newline="") as file, _long_values():
            names = next(csv.reader(file), [])
    except (csv.Error, UnicodeDecodeError):
        return {}
    columns = dict.fromkeys(names)
    return columns if len(columns) == len(names) else {}


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
