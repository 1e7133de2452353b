"""Rows in Parquet files, by the package ``pyarrow``."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ddpkit.errors import BatchError, MissingExtraError
from ddpkit.row_files.chunk import INDEX, READ_BYTES, Chunk, fields_of
from ddpkit.row_files.columns import Columns, as_schema, as_type, joined_type
from ddpkit.row_files.synced import synced_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

GROUP_BYTES = 4 << 20  # of a row group, which is written, and read, at once


class ParquetRows:
    """Rows in Parquet: a column for the index, and one for the output or for each of its entries.

    A tensor or an array of any length becomes a list of its own type, one of several dimensions a
    list of lists. All rows decide about the types of the columns, the first one about their order.

    Args:
        has_index: whether each row has its sample's index.

    Raises:
        MissingExtraError: ``pyarrow`` is not installed.
    """

    def __init__(self, *, has_index: bool = True) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            raise MissingExtraError(
                "Parquet files need the package pyarrow, which is not installed: run "
                "`pip install pyarrow`, or write .jsonl."
            )
        self.has_index = has_index
        self._columns: Columns | None = None

    def encode(self, indices: Sequence[int], outputs: Sequence[Any]) -> Chunk:
        """Make a table of outputs."""
        import pyarrow as pa

        rows = [fields_of(output, has_index=self.has_index) for output in outputs]
        try:
            columns, table = self._table(indices, rows)
            self._columns = columns if self._columns is None else self._columns.joined(columns)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise _refused(error) from error
        return Chunk(np.array(indices, dtype=np.int64), table, table.nbytes)

    def _table(
        self,
        indices: Sequence[int],
        rows: list[dict[str, Any]],
    ) -> tuple[Columns, Any]:
        import pyarrow as pa

        if any(row.keys() != rows[0].keys() for row in rows):
            raise ValueError("its samples have different keys")
        columns = {name: _named_column(name, [row[name] for row in rows]) for name in rows[0]}
        # without an index rows stand as they come, rank by rank
        place = int(np.argmin(indices)) if self.has_index else 0
        first = int(indices[place]) if self.has_index else 0
        order = [(name, _column([value]).type) for name, value in rows[place].items()]
        types = [(name, column.type) for name, column in columns.items()]
        if self.has_index:
            columns = {INDEX: pa.array(indices, pa.int64()), **columns}
        return Columns(first, pa.schema(order), pa.schema(types)), pa.table(columns)

    def columns(self) -> Columns | None:
        """Return what the rows so far need; None without any."""
        return self._columns

    def adopt(self, columns: Columns) -> None:
        """Write what the rows of all processes need, from now on."""
        self._columns = columns

    def layout(self) -> Any:
        """Return the schema of a file that is begun now."""
        import pyarrow as pa

        index = [pa.field(INDEX, pa.int64())] if self.has_index else []
        # without columns no process has had any sample
        return pa.schema([*index, *(() if self._columns is None else self._columns.schema)])

    @contextlib.contextmanager
    def sink(self, path: Path) -> Iterator[_RowGroups]:
        """Return a context that writes a file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = self.layout()
        with synced_file(path) as file:
            # one of the numbers in lists, such as scores, would take a megabyte and save nothing
            dictionaries = [one.name for one in schema if not pa.types.is_list(one.type)]
            try:
                writer = pq.ParquetWriter(file, schema, use_dictionary=dictionaries)
            except pa.ArrowNotImplementedError as error:  # dicts that are all empty
                raise _refused(error) from error
            groups = _RowGroups(writer, schema)
            try:
                yield groups
                groups.flush()
            except BaseException:
                # as the file's own end: on a full disk it would hide the error
                with contextlib.suppress(OSError, pa.ArrowException):
                    writer.close()
                raise
            writer.close()

    def read(self, path: Path) -> Iterator[Chunk]:
        """Yield the rows of a file, about a megabyte at a time."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        before = 0
        # Else all that has been read stays in memory until the end.
        with pq.ParquetFile(path, pre_buffer=False) as file:
            facts = file.metadata
            size = sum(facts.row_group(n).total_byte_size for n in range(facts.num_row_groups))
            number = max(1, READ_BYTES * facts.num_rows // max(size, 1))
            for batch in file.iter_batches(batch_size=number):
                table = pa.Table.from_batches([batch])
                rows = table.num_rows
                found = np.arange(before, before + rows, dtype=np.int64)
                indices = table[INDEX].to_numpy() if self.has_index else found
                before += rows
                yield Chunk(indices, table, table.nbytes)

    def joined(self, chunks: Sequence[Chunk]) -> Chunk:
        """Return the rows of several chunks as one."""
        import pyarrow as pa

        indices = np.concatenate([chunk.indices for chunk in chunks])
        schema = self.layout()
        table = pa.concat_tables([as_schema(chunk.rows, schema) for chunk in chunks])
        return Chunk(indices, table, sum(chunk.size for chunk in chunks))

    def taken(self, chunk: Chunk, places: NDArray[np.int64]) -> Chunk:
        """Return some rows of a chunk."""
        start = int(places[0]) if len(places) else 0
        if np.array_equal(places, np.arange(start, start + len(places))):
            table = chunk.rows.slice(start, len(places))
        else:
            table = chunk.rows.take(places)
        return Chunk(chunk.indices[places], table, table.nbytes)


class _RowGroups:
    """Takes the rows of one file; a row group has some megabytes."""

    def __init__(self, writer: Any, schema: Any) -> None:
        self._writer = writer
        self._schema = schema
        self._waiting: list[Any] = []
        self._size = 0

    def write(self, chunk: Chunk) -> None:
        """Write some rows, once there are enough of them."""
        self._waiting.append(as_schema(chunk.rows, self._schema))
        self._size += chunk.size
        if self._size >= GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the rows that wait."""
        import pyarrow as pa

        if self._waiting:
            table = pa.concat_tables(self._waiting)
            rows = max(1, table.num_rows * GROUP_BYTES // max(self._size, 1))
            self._writer.write_table(table, row_group_size=rows)
        self._waiting = []
        self._size = 0


def _refused(error: Exception) -> BatchError:
    why = str(error).rstrip(".")
    return BatchError(
        f"predict_batch returned outputs that cannot be written as Parquet: {why}. All samples "
        "need the same entries, of types that go together.",
        hook="predict_batch",
    )


def _named_column(name: str, values: list[Any]) -> Any:
    import pyarrow as pa

    try:
        return _column(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"entry {name!r}: {error}") from error


def _column(values: list[Any]) -> Any:
    """Return the values of one column as an array of Arrow.

    Its type is that which the values, each by itself, fit to: not one that depends on the batch.
    """
    import pyarrow as pa

    arrays = [_array(value) for value in values]
    kinds = {(array.dtype, array.ndim) for array in arrays if array is not None}
    others = [n for n, array in enumerate(arrays) if array is None and values[n] is not None]
    if not kinds and len({type(values[n]) for n in others}) <= 1:
        return pa.array([_plain(value) for value in values])
    if len(kinds) > 1 or others:
        parts = [_column([value]) for value in values]
        kind = functools.reduce(joined_type, [part.type for part in parts])
        return pa.concat_arrays([as_type(part, kind) for part in parts])
    present = [array for array in arrays if array is not None]
    column = _nested(present)
    if len(present) == len(arrays):
        return column
    is_present = np.array([array is not None for array in arrays])
    return column.take(pa.array(np.cumsum(is_present) - 1, mask=~is_present))


def _array(value: Any) -> NDArray[Any] | None:
    if isinstance(value, Tensor):
        value = value.detach()
        found: NDArray[Any] = (value.float() if value.dtype is torch.bfloat16 else value).numpy()
        return found
    return value if isinstance(value, np.ndarray) else None


def _nested(arrays: list[NDArray[Any]]) -> Any:
    """Return arrays of one type, whose lengths may differ, as lists of lists."""
    import pyarrow as pa

    column = pa.array(np.concatenate([array.reshape(-1) for array in arrays]))
    # from the innermost dimension outwards: in each, how long each of its lists is
    for dimension in reversed(range(arrays[0].ndim)):
        lengths = [
            np.full(int(np.prod(array.shape[:dimension])), array.shape[dimension])
            for array in arrays
        ]
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        column = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), column)
    return column


def _plain(value: Any) -> Any:
    """Return a value with lists in place of tensors, arrays and tuples."""
    array = _array(value)
    if array is not None:
        return array.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (set, frozenset)):
        raise TypeError("a set has no order")
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
