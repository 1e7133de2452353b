"""The run's log, ``metrics.jsonl``: what happened in a run, for programs to read.

Only the main process writes it. Calls from other ranks return at once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ddpkit.base import move_to_earlier, writing
from ddpkit.distributed import if_main_process
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = get_logger(__name__)

Stats = Mapping[str, Any]

NO_VALUES = (
    "log_stats: %s[%r] is a tensor on the meta device, which has a shape and no values. Its shape "
    "is written. Give a number, or a tensor on another device."
)


class RunLog:
    """A file with one JSON object per line: what happened in a run, for programs to read.

    Each line has ``event``, ``time`` (seconds since 1970) and the fields that were given. Floats
    keep their full precision; not-a-number and infinities are the strings ``"NaN"``, ``"Infinity"``
    and ``"-Infinity"``, which ``float()`` and JavaScript's ``Number()`` understand. Tensors and
    arrays become numbers (one element) or nested lists, other objects their text. The reference
    lists what ddpkit writes.

    Args:
        path: the file; it is appended to. Its folder is made at the first write.
        name: of the file in messages; None: it is the run's log.

    Ranks: local; only the main process writes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = RunLog(f"{folder}/metrics.jsonl")
        ...     log.write("epoch", number=1, loss=torch.tensor(0.5))
        ...     json.loads(log.path.read_text())["loss"]
        0.5
    """

    def __init__(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        self.path = Path(path)
        self._name = name or f"the run's log {str(self.path)!r}"
        self._last_stats = ""

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
        # NaN and Infinity, no JSON
        named = json.loads(json.dumps(plain(record)), parse_constant=str)
        line = json.dumps(named, ensure_ascii=False) + "\n"
        with writing(self._name):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append(self.path, line)

    def write_stats(self, stats: Mapping[str, Any]) -> None:
        """Write a "stats" event, once also when several loggers are given the same statistics.

        Args:
            stats: plain values by stage.

        Ranks: as :meth:`write`.
        """
        if repr(stats) != self._last_stats:
            self.write("stats", **stats)
            self._last_stats = repr(stats)


def no_step() -> int | None:
    """Return None: no stage runs, so there is no optimizer step to write at."""
    return None


class Current:
    """The log of the present run, what its Brain has logged in the current stage, by stage and
    name, the optimizer steps of the weights, None outside of a stage; the name of the set that is
    tested, empty where it has none; the folder that logs of an earlier run were moved to, since
    when it is there (nanoseconds, by the file system), and whether it has not been named yet.

    Ranks: local.
    """

    log: RunLog | None = None
    logged: Callable[[], Mapping[str, Stats]] = dict
    optimizer_step: Callable[[], int | None] = no_step
    test_set: str = ""
    earlier_folder: Path | None = None
    earlier_since: int = 0
    is_untold = False


def set_run_log(path: str | os.PathLike[str] | None) -> RunLog | None:
    """Set the file that the events of this run are written to.

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


def has_run_log() -> bool:
    """Say whether the events of this run are written to a file.

    Ranks: local.

    Example:
        >>> _ = set_run_log(None)
        >>> has_run_log()
        False
    """
    return Current.log is not None


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


def plain(value: Any) -> Any:
    """Turn a value into None, booleans, numbers, strings, lists, and dicts with string keys.

    Ranks: local.
    """
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.item() if value.size == 1 else value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return next(
        (kind(value) for kind in (int, float, str) if isinstance(value, kind)),
        str(value),
    )


def _plain_tensor(value: torch.Tensor) -> Any:
    if value.is_meta:
        return f"a tensor of shape {tuple(value.shape)} without values"
    if value.layout is not torch.strided:
        value = value.detach().to_dense()
    found = value.item() if value.numel() == 1 else value.tolist()
    return plain(found) if value.is_complex() else found


def warn_of_no_values(stats: Stats, what: str) -> None:
    """Name tensors on the meta device, which have no values to report.

    Args:
        stats: by name.
        what: they are, such as ``"train_stats"``.

    Ranks: local.

    Example:
        >>> warn_of_no_values({"loss": torch.tensor(0.5)}, "train_stats")
    """
    for name, value in stats.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            logger.warning_once(NO_VALUES, what, name)


def plain_numbers(value: Any) -> Any:
    """Turn tensors and arrays into numbers and leave everything else (pictures, tables) as it is.

    Ranks: local.
    """
    if isinstance(value, Mapping):
        return {key: plain_numbers(item) for key, item in value.items()}
    return plain(value) if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value


def move_logs_away(files: Iterable[Path], *, tells: bool = True) -> None:
    """Move logs of an earlier run to ``earlier-<time>`` in their folder, and name that folder once.

    Args:
        files: all of one folder; those that do not exist are left out.
        tells: whether the folder is named now; else by :func:`tell_of_moved_logs`.

    Raises:
        ConfigError: a file cannot be moved.

    Ranks: main only.
    """
    known = list(files)
    with writing("the folder of an earlier run's logs"):
        folder = move_to_earlier(known, Current.earlier_folder, Current.earlier_since)
        if folder is not None and folder != Current.earlier_folder:
            Current.earlier_folder = folder
            Current.earlier_since = folder.stat().st_mtime_ns
            Current.is_untold = True
    if folder is not None and tells:
        tell_of_moved_logs()


def tell_of_moved_logs() -> None:
    """Name the folder that logs of an earlier run were moved to last, if it was not named.

    Ranks: local.
    """
    if Current.is_untold:
        Current.is_untold = False
        words = "--resume=never: logs of an earlier run were moved to %s."
        logger.announce(words, Current.earlier_folder)


def append(path: Path, line: str) -> None:
    """Append a line to a file, in one piece. What UTF-8 has no place for is escaped.

    Ranks: local.
    """
    data = line.encode(errors="backslashreplace")
    with path.open("ab", buffering=len(data) + 1) as file:  # all of it goes out at once
        file.write(data)
