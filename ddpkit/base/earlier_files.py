"""Files of an earlier run, moved out of the way of a run that starts from scratch in the same folder."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

EARLIER = (
    "earlier-"  # begins the name of a folder with what a run does not continue; the time follows
)


def new_earlier_folder(parent: Path) -> Path:
    """Make the folder that takes what a run does not continue.

    Args:
        parent: where the files are.

    Raises:
        OSError: it cannot be made.

    Ranks: main only.
    """
    folder = parent / f"{EARLIER}{time.strftime('%Y-%m-%d+%H-%M-%S')}"
    folder.mkdir(exist_ok=True)
    return folder


def move_to_earlier(files: Iterable[Path]) -> Path | None:
    """Move files of one folder to ``earlier-<time>`` in it.

    Args:
        files: all in the same folder; a file that does not exist is left out.

    Returns:
        The new folder; None where there was nothing to move.

    Raises:
        OSError: a file cannot be moved.

    Ranks: main only.

    Example:
        >>> import tempfile
        >>> parent = Path(tempfile.mkdtemp())
        >>> (parent / "log.txt").touch()
        >>> folder = move_to_earlier([parent / "log.txt", parent / "no.txt"])
        >>> [path.name for path in folder.iterdir()], (parent / "log.txt").exists()
        (['log.txt'], False)
    """
    present = [path for path in files if path.is_file()]
    if not present:
        return None
    folder = new_earlier_folder(present[0].parent)
    for path in present:
        target = folder / path.name
        number = 1
        while target.exists():  # a start within the same second
            target = folder / f"{path.stem}.{number}{path.suffix}"
            number += 1
        path.rename(target)
    return folder
