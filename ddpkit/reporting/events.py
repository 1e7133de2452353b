"""The run's log: one JSON object per line says what happened, for programs to read. Only the main process writes."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ddpkit.distributed import if_main_process
from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Stats = Mapping[str, Any]


class RunLog:
    """A file with one JSON object per line: what happened in a run, for programs to read.

    Each line has ``event``, ``time`` (seconds since 1970) and the fields that were given. Floats keep their
    full precision; not-a-number and infinities are the strings ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``, which ``float()`` and JavaScript's ``Number()`` understand. Tensors and arrays become
    numbers (one element) or nested lists, other objects their text.

    Args:
        path: the file; it is appended to. Its folder is made at the first write.

    Ranks: local; only the main process writes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = RunLog(f"{folder}/metrics.jsonl")
        ...     log.write("epoch", number=1, loss=torch.tensor(0.5))
        ...     json.loads(log.path.read_text())["loss"]
        0.5
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._is_checked = False
        self._last_stats = ""
        self._reporters: list[object] = []

    def write(self, event: str, **fields: Any) -> None:
        """Append one line, in one piece.

        Args:
            event: what happened, such as ``"stats"``.
            fields: numbers, strings, tensors, arrays, paths, and lists and dicts of them.

        Raises:
            ConfigError: the file cannot be written.

        Ranks: all, or the main process alone; the others do nothing.
        """
        if not if_main_process():
            return
        record = {"event": event, "time": time.time(), **fields}
        named = json.loads(json.dumps(plain(record)), parse_constant=str)  # NaN and Infinity, no JSON
        line = json.dumps(named, ensure_ascii=False) + "\n"
        with written(f"the run's log {str(self.path)!r}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append(self.path, line if self._is_checked or _ends_with_newline(self.path) else "\n" + line)
        self._is_checked = True

    def write_stats(self, stats: Mapping[str, Any], reporter: object) -> None:
        """Write a "stats" event, once also when several loggers are given the same statistics.

        Args:
            stats: plain values by stage.
            reporter: the logger that was given them.

        Ranks: as :meth:`write`.
        """
        if repr(stats) != self._last_stats or reporter in self._reporters:
            self.write("stats", **stats)
            self._last_stats, self._reporters = repr(stats), []
        self._reporters.append(reporter)


class Current:
    """The log of the present run, and what its Brain has logged in the current stage.

    Ranks: local.
    """

    log: RunLog | None = None
    logged: Callable[[], Mapping[str, Stats]] = dict


def set_run_log(path: str | os.PathLike[str] | None) -> RunLog | None:
    """Say where the events of this run go from now on.

    Args:
        path: the file, usually ``metrics.jsonl`` in the experiment's folder; ``None`` for nowhere.

    Returns:
        The log, or None.

    Ranks: local; call it on every rank.

    Example:
        >>> set_run_log(None) is None
        True
    """
    Current.log = None if path is None else RunLog(path)
    return Current.log


def run_log() -> RunLog | None:
    """Return the log of the present run, or None.

    Ranks: local.

    Example:
        >>> run_log() is None
        True
    """
    return Current.log


def run_event(event: str, **fields: Any) -> None:
    """Write an event to the run's log; does nothing where no log is set.

    Args:
        event: what happened.
        fields: as in :meth:`RunLog.write`.

    Raises:
        ConfigError: the file cannot be written.

    Ranks: all, or the main process alone; the others do nothing.

    Example:
        >>> run_event("checkpoint", path="CKPT+1")  # no log is set
    """
    if Current.log is not None:
        Current.log.write(event, **fields)


def set_logged_values(logged: Callable[[], Mapping[str, Stats]]) -> Callable[[], Mapping[str, Stats]]:
    """Say where train loggers find what was logged with ``Brain.log``. For loops; the Brain's say it.

    Args:
        logged: returns values by stage (``"train"``, ``"valid"``, ``"test"``) and name.

    Returns:
        The function that was there before.

    Ranks: local.

    State: this process's.

    Example:
        >>> before = set_logged_values(lambda: {"train": {"accuracy": 0.5}})
        >>> _ = set_logged_values(before)
    """
    before, Current.logged = Current.logged, logged
    return before


def plain(value: Any) -> Any:
    """Turn a value into None, booleans, numbers, strings, lists, and dicts with string keys.

    Ranks: local.
    """
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.item() if value.size == 1 else value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.name
    return next((kind(value) for kind in (int, float, str) if isinstance(value, kind)), str(value))


def plain_numbers(value: Any) -> Any:
    """Turn tensors and arrays into numbers and leave everything else (pictures, tables) as it is.

    Ranks: local.
    """
    if isinstance(value, Mapping):
        return {key: plain_numbers(item) for key, item in value.items()}
    return plain(value) if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value


def _ends_with_newline(path: Path) -> bool:
    """Say whether a line can be appended as it is; not so after a line that a crash cut short."""
    if not path.exists() or path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


@contextlib.contextmanager
def written(what: str) -> Iterator[None]:
    """Name what cannot be written, and say what to do.

    Ranks: local.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be written: {error.strerror or error}. "
            "Free some space, or choose an output folder that can be written to."
        ) from error


def append(path: Path, line: str) -> None:
    """Append a line to a file, in one piece.

    Ranks: local.
    """
    data = line.encode()
    with path.open("ab", buffering=len(data) + 1) as file:  # all of it goes out at once
        file.write(data)
