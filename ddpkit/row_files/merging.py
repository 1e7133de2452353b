"""Merges files whose rows are sorted by index into one, a few rows of each at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ddpkit.row_files.chunk import Chunk, RowFormat

MOST_AT_ONCE = 16  # files that are read at the same time


def merge_files(
    form: RowFormat,
    sources: Sequence[Path],
    target: Path,
) -> None:
    """Merge files whose rows ascend by index; the files go as soon as they are merged.

    Rows without an index come file by file. Of each file about a megabyte is in memory.

    Args:
        form: of all files.
        sources: at least one.
        target: a new file, in a folder that the sources' names leave room in.
    """
    paths = list(sources)
    level = 0
    while len(paths) > MOST_AT_ONCE:
        groups = [
            paths[start : start + MOST_AT_ONCE] for start in range(0, len(paths), MOST_AT_ONCE)
        ]
        level += 1
        paths = []
        for number, group in enumerate(groups):
            merged = target.with_name(f"{target.name}.merged-{level}-{number}")
            _merge(form, group, merged)
            paths.append(merged)
    _merge(form, paths, target)


def _merge(form: RowFormat, sources: Sequence[Path], target: Path) -> None:
    with form.sink(target) as sink:
        for chunk in _by_index(form, sources) if form.has_index else _by_file(form, sources):
            sink.write(chunk)
    for source in sources:
        source.unlink()


def _by_file(form: RowFormat, sources: Sequence[Path]) -> Iterator[Chunk]:
    for source in sources:
        yield from form.read(source)


def _by_index(form: RowFormat, sources: Sequence[Path]) -> Iterator[Chunk]:
    heads = [_Head(form, source) for source in sources]
    while heads := [head for head in heads if head.has_rows()]:
        # all rows up to it are known: each file ascends
        bound = min(int(head.indices[-1]) for head in heads)
        taken = [head.take(bound) for head in heads]
        chunk = form.joined([rows for rows in taken if len(rows.indices)])
        yield form.taken(chunk, np.argsort(chunk.indices, kind="stable"))


class _Head:
    """The rows of one file that come next."""

    def __init__(self, form: RowFormat, path: Path) -> None:
        self._form = form
        self._chunks = form.read(path)
        self._chunk: Chunk | None = None

    @property
    def indices(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """The indices of the rows that are in memory."""
        return self._chunk.indices if self._chunk is not None else np.zeros(0, dtype=np.int64)

    def has_rows(self) -> bool:
        """Read on where nothing is left in memory; say whether the file has any further row."""
        while not len(self.indices):
            self._chunk = next(self._chunks, None)
            if self._chunk is None:
                return False
        return True

    def take(self, bound: int) -> Chunk:
        """Take the rows up to an index."""
        chunk = self._chunk
        assert chunk is not None  # noqa: S101 -- `has_rows` was asked
        number = int(np.searchsorted(chunk.indices, bound, side="right"))
        self._chunk = self._form.taken(chunk, np.arange(number, len(chunk.indices)))
        return self._form.taken(chunk, np.arange(number))
