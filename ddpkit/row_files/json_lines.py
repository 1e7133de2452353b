"""Rows as lines of JSON."""

from __future__ import annotations

import contextlib
import json
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ddpkit.base import kind_of
from ddpkit.errors import BatchError
from ddpkit.row_files.chunk import INDEX, READ_BYTES, Chunk, fields_of
from ddpkit.row_files.synced import synced_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ddpkit.row_files.columns import Columns

_START = f'{{"{INDEX}": '.encode()  # of each line with an index


class JsonLines:
    """Rows as lines of JSON: the index first, then the output or its entries by name.

    Tensors and arrays become lists. Numbers that are not finite stand as ``NaN`` and ``Infinity``,
    as Python writes and reads them.

    Args:
        has_index: whether each row has its sample's index.

    Example:
        >>> import torch
        >>> [line] = JsonLines().encode([4], [{"scores": torch.tensor([1.5, 2.0])}]).rows
        >>> line.strip()
        b'{"index": 4, "scores": [1.5, 2.0]}'
    """

    def __init__(self, *, has_index: bool = True) -> None:
        self.has_index = has_index

    def encode(self, indices: Sequence[int], outputs: Sequence[Any]) -> Chunk:
        """Make lines of outputs."""
        lines = [self._line(*row) for row in zip(indices, outputs, strict=True)]
        return Chunk(np.array(indices, dtype=np.int64), lines, sum(map(len, lines)))

    def _line(self, index: int, output: Any) -> bytes:
        fields = fields_of(output, has_index=self.has_index)
        row = {INDEX: index, **fields} if self.has_index else fields
        try:
            text = json.dumps(row, default=_plain, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise BatchError(
                f"predict_batch returned {kind_of(output)} that cannot be written as JSON: {error}."
                " Return numbers, texts, tensors, arrays, and lists and dicts of these.",
                hook="predict_batch",
            ) from error
        # half of a surrogate pair, which UTF-8 does not have, stands as JSON's own escape
        return text.encode("utf-8", "backslashreplace") + b"\n"

    @contextlib.contextmanager
    def sink(self, path: Path) -> Iterator[_Lines]:
        """Return a context that writes a file."""
        with synced_file(path) as file:
            yield _Lines(file)

    def read(self, path: Path) -> Iterator[Chunk]:
        """Yield the lines of a file, about a megabyte at a time."""
        before = 0
        with path.open("rb") as file:
            while lines := file.readlines(READ_BYTES):
                found = (
                    map(_index_of, lines) if self.has_index else range(before, before + len(lines))
                )
                indices = np.fromiter(found, dtype=np.int64, count=len(lines))
                before += len(lines)
                yield Chunk(indices, lines, sum(map(len, lines)))

    def joined(self, chunks: Sequence[Chunk]) -> Chunk:
        """Return the lines of several chunks as one."""
        indices = np.concatenate([chunk.indices for chunk in chunks])
        lines = [line for chunk in chunks for line in chunk.rows]
        return Chunk(indices, lines, sum(chunk.size for chunk in chunks))

    def taken(self, chunk: Chunk, places: NDArray[np.int64]) -> Chunk:
        """Return some lines of a chunk."""
        lines = [chunk.rows[place] for place in places.tolist()]
        return Chunk(chunk.indices[places], lines, sum(map(len, lines)))

    def columns(self) -> None:
        """Return nothing: lines need not be alike."""

    def adopt(self, columns: Columns) -> None:
        """Do nothing: lines need not be alike."""

    def layout(self) -> Any:
        """Return nothing: any file takes any line."""


class _Lines:
    """Takes the lines of one file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, chunk: Chunk) -> None:
        """Write some lines."""
        self._file.writelines(chunk.rows)


def _index_of(line: bytes) -> int:
    start = len(_START)
    end = line.find(b",", start)
    return int(line[start : end if end >= 0 else line.index(b"}", start)])


def _plain(value: Any) -> Any:
    """Return what JSON has for a value that it does not know."""
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{kind_of(value)} is none of its values")
