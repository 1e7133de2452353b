"""A run that is asked to stop: the time limit, the exit code, and the file that says what happened.

torchrun turns every exit code into 1, so a script that decides whether to start the run again looks at the file.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.base import signal_named
from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

MARKER = "stopped.json"
TIME_LIMIT = "time limit"
#: What can ask a run to stop; if several do at once, the first of these counts on all ranks.
CAUSES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", TIME_LIMIT)
TIME_LIMIT_CODE = 75  # EX_TEMPFAIL: try again later
_STARTED = time.monotonic()

_CLOCK = re.compile(r"(?:(?P<d>\d+)-)?(?P<h>\d+):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[smhd]?)")


def parse_duration(text: str) -> float:
    """Read a length of time.

    Args:
        text: ``"11:50:00"``, ``"1-06:00:00"`` (days first), ``"90m"``, ``"20h"``, or a number of seconds, which is also
            what YAML makes of ``11:50:00``.

    Returns:
        Seconds.

    Raises:
        ConfigError: it is none, or not above 0.

    Ranks: local.

    Example:
        >>> parse_duration("11:50:00"), parse_duration("1-00:00:10"), parse_duration("90m"), parse_duration("42600")
        (42600.0, 86410.0, 5400.0, 42600.0)
    """
    word = str(text).strip().lower()
    clock, number = _CLOCK.fullmatch(word), _NUMBER.fullmatch(word)
    seconds = 0.0
    if clock is not None:
        seconds = sum(int(clock[unit] or 0) * _UNITS[unit] for unit in "dhms")
    elif number is not None:
        seconds = float(number["number"]) * _UNITS[number["unit"] or "s"]
    if seconds <= 0:
        raise ConfigError(
            f"time_limit expects a length of time > 0, got {text!r}. Give H:MM:SS such as 11:50:00, "
            "with days 1-06:00:00, or 90m, 20h, or seconds."
        )
    return seconds


def seconds_since_start() -> float:
    """Return for how many seconds this process has been running.

    Ranks: local.

    Source: field 22 of ``/proc/self/stat``, https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html ; elsewhere the
    time since this module was imported.

    Example:
        >>> seconds_since_start() > 0
        True
    """
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8")
        began = int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError, ValueError):
        return time.monotonic() - _STARTED


def exit_code(cause: str) -> int:
    """Return what a process exits with that was stopped: 128 plus the signal's number, or 75 at the time limit.

    Ranks: local.

    Example:
        >>> exit_code("SIGTERM"), exit_code(TIME_LIMIT)
        (143, 75)
    """
    return TIME_LIMIT_CODE if cause == TIME_LIMIT else 128 + int(signal_named(cause))


def require_stop_signals(names: list[str]) -> None:
    """Check that signals can be told from each other when they stop a run.

    Raises:
        ConfigError: a name is unknown, or of a signal that is not made for it.

    Ranks: local.

    Example:
        >>> require_stop_signals(["SIGTERM", "usr1"])
    """
    for name in names:
        if signal_named(name).name not in CAUSES:
            raise ConfigError(
                f"stop_signals names {name!r}. A run can be stopped by {', '.join(CAUSES[:-1])}; name some of those."
            )


def write_marker(folder: Path, facts: Mapping[str, Any]) -> None:
    """Leave word in a folder of why and where a run has stopped.

    Args:
        folder: of the run; made if it is not there.
        facts: plain values.

    Raises:
        OSError: it cannot be written.

    Ranks: main only.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_marker(folder, {"reason": "SIGTERM", "exit_code": 143})
        >>> json.loads((folder / MARKER).read_text())["exit_code"]
        143
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{MARKER}.{os.getpid()}"
    temporary.write_text(json.dumps(dict(facts), indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / MARKER)


def remove_marker(folder: Path) -> None:
    """Take away what an earlier run has left: this one is running.

    Ranks: main only.

    Example:
        >>> remove_marker(Path("/nowhere"))
    """
    if (folder / MARKER).exists():  # a read-only file system refuses to delete even what is not there
        (folder / MARKER).unlink(missing_ok=True)
