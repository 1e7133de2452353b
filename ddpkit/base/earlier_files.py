"""Files of an earlier run, moved out of the way of a run that starts from scratch in the same
folder.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from pathlib import Path

EARLIER = (
    "earlier-"  # begins the name of a folder with what a run does not continue; the time follows
)
TIME = "%Y-%m-%d+%H-%M-%S"


def earlier_folder(parent: Path, names: Iterable[str], other_than: Path | None = None) -> Path:
    """Return the folder that takes what a run does not continue; it is made where it is not there
    yet.

    It is ``earlier-<time>``. Where something of a name was moved there within the same second, it
    is ``earlier-<time>-2``, ``-3`` and so on.

    Args:
        parent: where the files are.
        names: of what will be moved.
        other_than: a folder that is not to take them; None: there is none.

    Raises:
        OSError: it cannot be made.

    Ranks: main only.
    """
    wanted = list(names)
    name = f"{EARLIER}{time.strftime(TIME)}"
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            is_taken = any((folder / name).exists() for name in wanted)
            if is_taken or folder == other_than or not folder.is_dir():
                continue
        break
    return folder


def earlier_folders(parent: Path) -> list[Path]:
    """Return the folders that have taken what runs do not continue, the latest first.

    Args:
        parent: where they are.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> parent = Path(tempfile.mkdtemp())
        >>> for number in ("", "-2", "-10"):
        ...     (parent / f"earlier-2026-01-31+12-00-00{number}").mkdir()
        >>> [folder.name[-3:] for folder in earlier_folders(parent)]
        ['-10', '0-2', '-00']
    """
    found = (path for path in parent.glob(f"{EARLIER}*") if path.is_dir())
    return sorted(found, key=_age, reverse=True)


def _age(folder: Path) -> tuple[str, int]:
    """Return what sorts folders by time, and those of one second by their numbers."""
    length = len(EARLIER) + len(time.strftime(TIME))
    number = folder.name[length + 1 :]
    return folder.name[:length], int(number) if number.isdigit() else 1


def move_to_earlier(
    files: Iterable[Path],
    known: Path | None = None,
    known_since: int = 0,
) -> Path | None:
    """Move files of one folder to ``earlier-<time>`` in it.

    Args:
        files: all in the same folder; a file that does not exist is left out.
        known: a folder that has got others of the same run; it takes these, too, if it is in the
            same folder and has none of their names. None: there is none.
        known_since: when it was made, by the clock of the file system, in nanoseconds: a file that
            has changed since is of a later run.

    Returns:
        The folder; None where there was nothing to move.

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
    parent = present[0].parent
    names = [path.name for path in present]
    is_older = all(path.stat().st_mtime_ns < known_since for path in present)
    is_fit = known is not None and is_older and known.parent == parent and known.is_dir()
    if known is not None and is_fit and not any((known / name).exists() for name in names):
        folder = known
    else:
        folder = earlier_folder(parent, names, other_than=known)
    for path in present:
        path.rename(folder / path.name)
    return folder
