"""Whether a process of this machine lives, is about to end, or is gone.

Source: the fields and states are those of https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html. Where there is no
``/proc``, processes can be asked for by a signal alone, and nothing is known of what they do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

__all__ = ["has_ended", "is_ending", "state_and_start", "this_place"]

DEAD_STATES = "ZXx"
PF_EXITING = 0x4  # among the flags of /proc/PID/stat, see include/linux/sched.h


def this_place() -> tuple[str, str, str]:
    """Return where a process number means one process.

    Returns:
        Host, boot, and namespace of processes; the last two are empty where they cannot be known.

    Ranks: local.

    Example:
        >>> len(this_place())
        3
    """
    boot_id = namespace = ""
    with contextlib.suppress(OSError):
        if Path("/proc/self").readlink() == Path(str(os.getpid())):  # else /proc shows another namespace
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            namespace = str(Path("/proc/self/ns/pid").readlink())
    return socket.gethostname(), boot_id, namespace


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


def is_ending(pid: int) -> bool:
    """Say whether nothing can keep a process: it is on its way out, or SIGKILL waits for it to leave the kernel.

    Args:
        pid: its number.

    Ranks: local.

    Example:
        >>> is_ending(os.getpid())
        False
    """
    words = _stat(Path(f"/proc/{pid}/stat"))
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        status = ""
    if not words:  # hidden from this user, or gone since: the next look tells
        return False
    return words[0] in DEAD_STATES or bool(int(words[6]) & PF_EXITING) or is_killed(status)


def is_killed(status: str) -> bool:
    """Say whether SIGKILL is pending.

    Args:
        status: what ``/proc/PID/status`` says.

    Ranks: local.

    Example:
        >>> is_killed("ShdPnd: 0000000000000100")
        True
    """
    pending = (line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:")))
    return any(int(signals, 16) >> (signal.SIGKILL - 1) & 1 for signals in pending)
