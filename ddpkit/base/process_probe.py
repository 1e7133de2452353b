"""Whether a process of this machine lives, or is gone.

Source: fields and states as in https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html. Without ``/proc`` a signal
shows only whether a process exists; its state stays unknown.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

DEAD_STATES = "ZXx"


def state_and_start(pid: int) -> tuple[str, int]:
    """Return a process's state, a letter, and its start in clock ticks since boot; ``("", 0)`` if unknown.

    Args:
        pid: its number.

    Ranks: local.

    Example:
        >>> state_and_start(os.getpid())[0] in "RSD" or "no /proc"
        True
    """
    words = _stat(Path(f"/proc/{pid}/stat"))
    return (words[0], int(words[19])) if words else ("", 0)


def _stat(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def has_ended(pid: int, started: int) -> bool:
    """Say whether a process is known to have ended.

    Args:
        pid: its number, which may be another's by now.
        started: its start, of :func:`state_and_start`.

    Ranks: local.

    Example:
        >>> has_ended(os.getpid(), state_and_start(os.getpid())[1])
        False
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass  # it is there, and another user's
    state, its_start = state_and_start(pid)
    if not state:  # hidden from this user, or gone since: the next look tells
        return False
    if its_start != started:
        return True
    if state not in DEAD_STATES:
        return False
    # A killed process shows as a zombie while a thread of it still ends a write.
    threads = (_stat(task / "stat") for task in Path(f"/proc/{pid}/task").glob("*"))
    return all(words[0] in DEAD_STATES for words in threads if words)


def kill_later(pid: int, seconds: float) -> None:
    """Have a process killed that has not ended after a while, by a small process that outlives this one.

    Args:
        pid: its number.
        seconds: after which it is killed.

    Ranks: local; Linux only, elsewhere nothing happens.

    Example:
        >>> kill_later(pid=0, seconds=5.0)  # no process
    """
    # Another system, or it has ended. By its number alone another process could be hit later.
    with contextlib.suppress(OSError, AttributeError), os.fdopen(os.pidfd_open(pid)) as known:
        as_stdin = [(os.POSIX_SPAWN_DUP2, known.fileno(), 0)]
        wait = f"import select, signal; select.select([0], [], [], {seconds})[0]"
        command = [sys.executable, "-I", "-S", "-c", f"{wait} or signal.pidfd_send_signal(0, signal.SIGKILL)"]
        os.posix_spawn(sys.executable, command, os.environ, file_actions=as_stdin, setsid=True)
