"""Writes rows that come in any order into one file in which they are sorted by index."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from ddpkit.row_files.merging import merge_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Any

    from ddpkit.row_files.chunk import Chunk, RowFormat, Sink

BUFFER_BYTES = 16 << 20  # of rows that are in memory, and are sorted at once


class SortedWriter:
    """Writes rows into one file in ascending order of their indices, in a memory of some megabytes.

    Where batches come in that order, rows go straight into the file. Else they are sorted some
    megabytes at a time, into files of their own, which are merged in the end. So they are where
    later rows need other columns.

    Args:
        form: of the file.
        folder: for files until then; there, and nobody else's.
    """

    def __init__(self, form: RowFormat, folder: Path) -> None:
        self.form = form
        self.folder = folder
        self.count = 0
        self._waiting: list[Chunk] = []
        self._size = 0
        self._last = -1
        self._runs: list[Path] = []
        self._sink: Sink | None = None
        self._layout: Any = None  # of the file that is open, or was last
        self._open = contextlib.ExitStack()

    def add(self, indices: Sequence[int], outputs: Sequence[Any]) -> None:
        """Take the outputs of a batch.

        Args:
            indices: of its samples.
            outputs: one for each.
        """
        if not outputs:
            return
        chunk = self.form.encode(indices, outputs)
        self.count += len(outputs)
        self._waiting.append(chunk)
        self._size += chunk.size
        if self._size >= BUFFER_BYTES:
            self._flush()

    def finish(self) -> Path:
        """Write what is left; return the file, whose bytes are on the disk."""
        self._flush()
        if not self._runs:  # no samples
            self._begin()
        self._open.close()
        if len(self._runs) == 1 and self._layout == self.form.layout():
            return self._runs[0]
        target = self.folder / "sorted"
        merge_files(self.form, self._runs, target)
        return target

    def __enter__(self) -> SortedWriter:  # noqa: PYI034 -- nothing derives from it
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def _flush(self) -> None:
        if not self._waiting:
            return
        chunk = self.form.joined(self._waiting)
        self._waiting = []
        self._size = 0
        order = np.argsort(chunk.indices, kind="stable")
        chunk = self.form.taken(chunk, order)
        comes_before = int(chunk.indices[0]) < self._last
        if self._sink is None or comes_before or self._layout != self.form.layout():
            self._sink = self._begin()
        self._sink.write(chunk)
        self._last = int(chunk.indices[-1])

    def _begin(self) -> Sink:
        """Begin another file."""
        self._open.close()
        path = self.folder / f"run-{len(self._runs):06d}"
        self._runs.append(path)
        self._layout = self.form.layout()
        return self._open.enter_context(self.form.sink(path))
