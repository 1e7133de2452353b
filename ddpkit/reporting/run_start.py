"""What the record of a run says of its start: what it runs on, and how the start before it has
ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ddpkit import __version__
from ddpkit.base import host_name, state_and_start
from ddpkit.errors import LaunchError
from ddpkit.launch import find_launch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

GIT_TIMEOUT_SECONDS = 5
BLOCK_BYTES = 1 << 16
LONGEST_REASON = 300
KILLED = "killed, or ended without a word"
# Events of a call of `fit` that is not over, and of the time before and after it.
_INSIDE = frozenset({"fit", "speed", "step"})
_DECIDING = frozenset({"stopped", "exception", "fit_end", "start", *_INSIDE})


# ---------------------------------------------------------------------------- what it runs on


def environment_facts(folder: Path) -> dict[str, Any]:
    """Return what this process runs on.

    Args:
        folder: of the recipe, whose git commit is noted.

    Returns:
        ``host``, ``python``, ``torch``, ``cuda`` (None without it), ``numpy``, ``ddpkit``,
        ``platform``, ``cpus``, ``launcher``, ``restart_count`` and ``git`` (:func:`git_state`).

    Ranks: local.

    Example:
        >>> environment_facts(Path())["torch"] == torch.__version__
        True
    """
    try:
        launch = find_launch()
    except LaunchError:  # raised where the launcher is needed; here it is only noted
        launch = None
    return {
        "host": host_name(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "ddpkit": __version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "launcher": None if launch is None else launch.launcher,
        "restart_count": None if launch is None else launch.restart_count,
        "git": git_state(folder),
    }


def working_directory() -> str | None:
    """Return the working directory; None where it is gone.

    Ranks: local.
    """
    try:
        return str(Path.cwd())
    except OSError:
        return None


def git_commit(folder: Path) -> str | None:
    """Return the git commit of a folder; None where it is in no checkout, or git cannot tell.

    Args:
        folder: any folder of the checkout.

    Ranks: local.
    """
    found = _git(folder, "rev-parse", "HEAD")
    return None if found is None else found.strip()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the git commit of a folder, and whether files that git knows have changed since.

    Args:
        folder: any folder of the checkout.

    Returns:
        ``commit`` and ``dirty`` (None where git takes too long to say); None in no checkout.

    Ranks: local.
    """
    commit = git_commit(folder)
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes.strip())}


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        found = subprocess.run(
            command,  # whichever git the user has
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout


def file_identity(path: str | os.PathLike[str]) -> dict[str, str | None]:
    """Return where a file is, and the SHA-256 of its content.

    Args:
        path: of the file.

    Returns:
        ``path``, absolute, and ``sha256``, None where the file cannot be read.

    Ranks: local.

    Example:
        >>> file_identity("no/such/file")["sha256"] is None
        True
    """
    where = Path(path).absolute()
    try:
        digest: str | None = hashlib.sha256(where.read_bytes()).hexdigest()
    except OSError:
        digest = None
    return {"path": str(where), "sha256": digest}


def process_start() -> float | None:
    """Return when this process was started, in seconds since 1970; None where the system does not
    say.

    Ranks: local.

    Example:
        >>> (process_start() or 0.0) <= time.time()
        True
    """
    _, ticks = state_and_start(os.getpid())
    if not ticks:
        return None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


# ---------------------------------------------------------------------------- what was before


def end_before(path: Path) -> dict[str, Any]:
    """Say how the start before this one has ended, from the run's log that it has left.

    Args:
        path: the log, ``metrics.jsonl``.

    Returns:
        ``reason``, in words, and ``last_event_time``, seconds since 1970; empty where no run was
        before.

    Ranks: main only.

    Example:
        >>> end_before(Path("no/such/file"))
        {}
    """
    latest = None
    for event in _events_backward(path):
        latest = event.get("time") if latest is None else latest
        if event.get("event") in _DECIDING:
            return {"reason": _reason(event), "last_event_time": latest}
    return {}


def _reason(event: Mapping[str, Any]) -> str:
    kind = event["event"]
    if kind == "stopped":
        return f"stopped by {event.get('reason')}"
    if kind == "exception":
        first_line = (str(event.get("message")).splitlines() or [""])[0]
        return f"{event.get('type')}: {first_line}"[:LONGEST_REASON]
    if kind == "fit_end":
        return "finished"
    return KILLED if kind in _INSIDE else "ended outside of fit"


def _events_backward(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log, the last first; lines that are no event, as a torn one, are left
    out.
    """
    for line in _lines_backward(path):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _lines_backward(path: Path) -> Iterator[bytes]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        place = file.seek(0, os.SEEK_END)
        rest = b""
        while place:
            size = min(BLOCK_BYTES, place)
            place -= size
            file.seek(place)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            yield from reversed(lines)
        yield rest


def close_torn_line(path: Path) -> None:
    r"""End a last line that a full disk or a crash has cut off, so that the next event has a line
    of its own.

    Args:
        path: the log; it need not exist.

    Raises:
        OSError: it cannot be written.

    Ranks: main only.

    Example:
        >>> import tempfile
        >>> log = Path(tempfile.mkdtemp(), "metrics.jsonl")
        >>> _ = log.write_text('{"event": "st')
        >>> close_torn_line(log); log.read_text()
        '{"event": "st\n'
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return
    if not size:
        return
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
