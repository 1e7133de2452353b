"""A few rows of a file with the indices of their samples, and what a format can do with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ddpkit.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from ddpkit.row_files.columns import Columns

INDEX = "index"  # the name under which a row has its sample's index
OUTPUT = "output"  # the name of an output that is no dict
READ_BYTES = 1 << 20  # that are read of a file at a time, about


@dataclass
class Chunk:
    """A few rows, with the indices of their samples.

    Attributes:
        indices: of the samples, shape ``(rows,)``.
        rows: in the form of the format.
        size: bytes in memory, about.
    """

    indices: NDArray[np.int64]
    rows: Any
    size: int


class Sink(Protocol):
    """Takes the rows of one file."""

    def write(self, chunk: Chunk) -> None:
        """Write some rows."""


class RowFormat(Protocol):
    """How rows stand in a file.

    Attributes:
        has_index: whether each row has its sample's index in the file.
    """

    has_index: bool

    def encode(self, indices: Sequence[int], outputs: Sequence[Any]) -> Chunk:
        """Make rows of outputs.

        Args:
            indices: of the samples.
            outputs: one for each.
        """

    def sink(self, path: Path) -> AbstractContextManager[Sink]:
        """Return a context that writes a file, whose bytes are on the disk at its end."""

    def read(self, path: Path) -> Iterator[Chunk]:
        """Yield the rows of a file in their order, about a megabyte at a time."""

    def joined(self, chunks: Sequence[Chunk]) -> Chunk:
        """Return the rows of several chunks as one."""

    def taken(self, chunk: Chunk, places: NDArray[np.int64]) -> Chunk:
        """Return some rows of a chunk, in the order of their places."""

    def columns(self) -> Columns | None:
        """Return what the rows so far need; None where rows need not be alike, or for no rows."""

    def adopt(self, columns: Columns) -> None:
        """Write what the rows of all processes need, from now on."""

    def layout(self) -> Any:
        """Return what is equal as long as rows can be written into the same file."""


def fields_of(output: Any, *, has_index: bool) -> dict[str, Any]:
    """Return the output of one sample by the names of columns.

    Args:
        output: of ``predict_batch``, for one sample.
        has_index: whether the index of the sample stands beside it.

    Raises:
        BatchError: a key is no text, or is the name of the index.
    """
    if not isinstance(output, dict):
        return {OUTPUT: output}
    for key in output:
        if not isinstance(key, str) or (has_index and key == INDEX):
            raise BatchError(
                f"predict_batch returned a dict with the key {key!r}, which cannot name a column"
                f"{': the index of the sample has this name' if key == INDEX else ''}. Use other "
                "names, of text.",
                hook="predict_batch",
            )
    return output
