"""Where the outputs of a prediction are written: one joined file, or a file of each process."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.base import require_writable, require_writable_file
from ddpkit.errors import ConfigError
from ddpkit.mirror import local_file
from ddpkit.row_files import JsonLines, ParquetRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpkit.row_files import RowFormat

FORMS: dict[str, Callable[..., RowFormat]] = {".jsonl": JsonLines, ".parquet": ParquetRows}
EACH = "*"  # stands for the number of the process


class PredictionPath:
    """The files that the outputs of a prediction are written to.

    Args:
        given: a path that ends in ``.jsonl`` or ``.parquet``. With a ``*`` in the name of the file,
            each process has a file of its own.

    Attributes:
        path: as it was given.
        is_joined: whether there is one file of all outputs.
        scratch: the folder in which files stand until they are complete.

    Raises:
        ConfigError: it has another ending, a ``*`` in a folder, or cannot be written.
        MissingExtraError: a package is missing.

    Example:
        >>> path = PredictionPath("scores/part-*.jsonl")
        >>> path.is_joined, path.of_rank(1, 2).name
        (False, 'part-00001-of-00002.jsonl')
    """

    def __init__(self, given: Any) -> None:
        self.words = f"output={str(given)!r}"
        if not isinstance(given, (str, os.PathLike)):
            raise ConfigError(f"output={given!r} is no path. Give one, {_EXAMPLES}.")
        self.path = Path(local_file("output", given))
        name = self.path.name
        self.is_joined = EACH not in name
        is_clear = name.count(EACH) <= 1 and EACH not in str(self.path.parent)
        if self.path.suffix not in FORMS or not is_clear:
            raise ConfigError(
                f"{self.words} does not say how to write: it must end in .jsonl or .parquet, with "
                f"at most one * in the name of the file, {_EXAMPLES}."
            )
        self.scratch = self.path.with_name(f".{name.replace(EACH, 'each')}.tmp")
        self.form(has_index=True)  # refuses what its package is missing for
        if self.is_joined:
            require_writable_file(self.words, self.path)
        else:
            require_writable(self.words, self.path.parent)

    def form(self, *, has_index: bool) -> RowFormat:
        """Return the form of the files.

        Args:
            has_index: whether each row has the index of its sample.
        """
        return FORMS[self.path.suffix](has_index=has_index)

    def of_rank(self, rank: int, world_size: int) -> Path:
        """Return the file of one process."""
        return self.path.with_name(self.path.name.replace(EACH, f"{rank:05d}-of-{world_size:05d}"))

    def others(self, world_size: int) -> list[Path]:
        """Return the files of an earlier prediction by another number of processes."""
        before, _, after = self.path.name.partition(EACH)
        pattern = re.compile(rf"{re.escape(before)}\d{{5}}-of-(\d{{5}}){re.escape(after)}")
        found = [
            (path, pattern.fullmatch(path.name)) for path in sorted(self.path.parent.iterdir())
        ]
        return [path for path, match in found if match and int(match[1]) != world_size]


_EXAMPLES = "such as 'predictions.jsonl', or 'predictions/*.parquet' for a file of each process"
