"""Files that appear when they are complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Return a context for writing a file so that its name stands for the old content or the new, never for a part.

    Args:
        path: of the file.

    Yields:
        The path to write to, beside it and with its suffix. At the end it takes the file's place; after an error it is
        removed.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "notes.txt")
        >>> with replacing(path) as unfinished:
        ...     number = unfinished.write_text("all of it")
        >>> path.read_text(), len(list(path.parent.iterdir()))
        ('all of it', 1)
    """
    unfinished = path.with_name(f"{path.stem}.{os.getpid()}.unfinished{path.suffix}")  # torch.save takes no leading dot
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
