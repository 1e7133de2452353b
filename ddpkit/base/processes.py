"""Processes of this machine: where a process number counts, and whether a process has ended.

Source: fields and states of processes as in
https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

DEAD_STATES = "ZXx"


def this_place() -> tuple[str, str, str]:
    """Return where a process number means one process.

    Returns:
        Host, boot, and namespace of processes; the last two are empty where they cannot be known.

    Example:
        >>> len(this_place())
        3
    """
    boot_id = namespace = ""
    with contextlib.suppress(OSError):
        # else /proc shows another namespace
        if Path("/proc/self").readlink() == Path(str(os.getpid())):
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            namespace = str(Path("/proc/self/ns/pid").readlink())
    return socket.gethostname(), boot_id, namespace


def state_and_start(pid: int) -> tuple[str, int]:
    """Return a process's state, a letter, and its start in clock ticks since boot; ``("", 0)`` if
    unknown.

    Args:
        pid: its number.

    Example:
        >>> state_and_start(os.getpid())[0] in "RSD" or "no /proc"
        True
    """
    words = _stat(Path(f"/proc/{pid}/stat"))
    return (words[0], int(words[19])) if words else ("", 0)


def _stat(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def has_ended(pid: int, started: int) -> bool:
    """Say whether a process is known to have ended.

    Args:
        pid: its number, which may be another's by now.
        started: its start, of :func:`state_and_start`.

    Example:
        >>> has_ended(os.getpid(), state_and_start(os.getpid())[1])
        False
    """
    if not started:  # no /proc, or that of another namespace: nothing is known
        return False
    state, its_start = state_and_start(pid)
    if its_start != started or state not in DEAD_STATES:
        return its_start != started
    # A killed process shows as a zombie while a thread of it still ends a write.
    threads = (_stat(task / "stat") for task in Path(f"/proc/{pid}/task").glob("*"))
    return all(words[0] in DEAD_STATES for words in threads if words)


def host_name() -> str:
    """Return the name of this machine."""
    return socket.gethostname()
