"""The files of a run: where its log is, and what else its folder holds."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpkit.errors import ConfigError, MissingFileError

METRICS = "metrics.jsonl"
METRICS_OF_TESTS = "metrics.test_only.jsonl"
RUN_LOCK = ".run.lock"
PROCESSES = Path("/proc")
LOCKS = PROCESSES / "locks"  # of this machine's kernel
MOST_NAMED = 4
_LOCK = re.compile(r" (?P<pid>\d+) [0-9a-f]+:[0-9a-f]+:(?P<inode>\d+) ")
DEPTH = 3  # folders below a wrong one in which runs are looked for


@dataclass(frozen=True)
class RunFiles:
    """Where a run's files are.

    Attributes:
        metrics: its ``metrics.jsonl``, or that of ``--test_only``.
        folder: where the other files are.
        label: a short name, unlike those of the other runs on the page.
    """

    metrics: Path
    folder: Path
    label: str

    def find(self, name: str) -> Path | None:
        """Return a regular file of the folder; None where there is none."""
        path = self.folder / name
        return path if path.is_file() else None

    def earlier(self) -> list[str]:
        """Return the folders with logs of earlier runs, begun anew with ``--resume=never``."""
        found = (path.parent.name for path in self.folder.glob(f"earlier-*/{METRICS}"))
        return sorted(found)

    def is_running(self) -> bool:
        """Say whether a process on this machine holds the folder's lock. Nothing is locked to find
        out.
        """
        lock = self.find(RUN_LOCK)
        if lock is None:
            return False
        try:
            inode = str(lock.stat().st_ino)
            lines = LOCKS.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError):  # no Linux, or a container without it
            return False
        found = [_LOCK.search(line) for line in lines]
        holders = [match["pid"] for match in found if match and match["inode"] == inode]
        return any(_has_open(pid, lock) for pid in holders)


def _has_open(pid: str, file: Path) -> bool:
    """Say whether a process has a file open: a file of another disk may have the same inode."""
    path = file.resolve()
    try:
        links = list(PROCESSES.joinpath(pid, "fd").iterdir())
    except FileNotFoundError:  # it has ended
        return False
    except OSError:  # another user's process
        return True
    for link in links:
        with contextlib.suppress(OSError):  # it may be closed meanwhile
            if link.readlink() == path:
                return True
    return False


def find_runs(given: Sequence[str | os.PathLike[str]]) -> list[RunFiles]:
    """Find the files of runs.

    Args:
        given: experiment folders, or files named like ``metrics.jsonl``.

    Raises:
        MissingFileError: a path does not exist.
        ConfigError: a path is no run.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "metrics.jsonl").write_text("")
        >>> [run.metrics.name for run in find_runs([folder])]
        ['metrics.jsonl']
    """
    metrics = [_metrics_of(os.fspath(path)) for path in given]
    labels = short_labels([path.parent.resolve() for path in metrics])
    return [RunFiles(path, path.parent, label) for path, label in zip(metrics, labels, strict=True)]


def short_labels(folders: Sequence[Path]) -> list[str]:
    """Return the ends of paths, as long as they must be to tell the paths apart.

    Example:
        >>> short_labels([Path("/r/digits/1"), Path("/r/gan/1")])
        ['digits/1', 'gan/1']
        >>> short_labels([Path("/r/1"), Path("/r/1")])
        ['1', '1 (2)']
    """
    longest = max(len(folder.parts) for folder in folders)
    labels: list[str] = []
    for length in range(1, longest + 1):
        labels = ["/".join(folder.parts[-length:]) or "/" for folder in folders]
        if len(set(labels)) == len(set(folders)):
            break
    seen: dict[str, int] = {}
    unlike = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        unlike.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return unlike


def _metrics_of(given: str) -> Path:
    """Return the log of a run, from its folder or its own path."""
    path = Path(given)
    if path.is_file():
        return path
    if not path.exists():
        raise MissingFileError(
            f"RUN={given!r} does not exist. Give the folder of an experiment, or its {METRICS}. "
            f"The current folder is {str(Path.cwd())!r}."
        )
    for name in (METRICS, METRICS_OF_TESTS):
        if (path / name).is_file():
            return path / name
    raise ConfigError(
        f"RUN={given!r} is no folder of a run: it has no {METRICS} and no {METRICS_OF_TESTS}. "
        f"create_experiment_directory begins these files. {_hint(path)}"
    )


def _hint(folder: Path) -> str:
    """Name runs that are below a folder, or above it."""
    if folder.is_dir():
        for depth in range(1, DEPTH + 1):
            below = sorted(folder.glob("*/" * depth + METRICS))
            if below:
                return f"Runs below it: {_named(path.parent for path in below)}."
        above = [parent for parent in folder.resolve().parents[:2] if (parent / METRICS).is_file()]
        if above:
            return f"The run is perhaps {str(above[0])!r}."
    return "Give the folder that the recipe calls output_folder."


def _named(folders: Iterable[Path]) -> str:
    found = list(folders)
    names = ", ".join(repr(str(folder)) for folder in found[:MOST_NAMED])
    more = len(found) - MOST_NAMED
    return f"{names} and {more} more" if more > 0 else names
