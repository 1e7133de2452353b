"""Whether a process of this machine lives, is about to end, or is gone.

Source: the fields and states are those of https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html. Where there is no
``/proc``, processes can be asked for by a signal alone, and nothing is known of what they do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

__all__ = ["end_when_deserted", "has_ended", "is_ending", "leave_a_guard", "state_and_start", "this_place"]

DEAD_STATES = "ZXx"
NAP_SECONDS = 0.1
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


def end_when_deserted(pid: int, started: int, seconds: float) -> bool:
    """Wait until a process has ended; kill it if it has not after a while in which no other ran under it.

    Args:
        pid: its number.
        started: its start, of :func:`state_and_start`.
        seconds: without a living child, after which it is killed.

    Returns:
        Whether it had to be killed.

    Ranks: local; of a process that is left behind for it, see :func:`leave_a_guard`.

    Example:
        >>> end_when_deserted(os.getpid(), started=0, seconds=5.0)  # another process had that number
        False
    """
    deserted = time.monotonic()
    while not has_ended(pid, started):
        if _has_children(pid):
            deserted = time.monotonic()
        if time.monotonic() - deserted > seconds:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            return True
        time.sleep(NAP_SECONDS)
    return False


def _has_children(pid: int) -> bool:
    """Say whether a process has a child that lives."""
    every = (_stat(path) for path in Path("/proc").glob("[0-9]*/stat"))
    return any(words[1] == str(pid) and words[0] not in DEAD_STATES for words in every if words)


def leave_a_guard(pid: int, seconds: float) -> None:
    """Leave a process behind that calls :func:`end_when_deserted` after this one has ended.

    It is a small one, in a session of its own, and ends with the process that it guards.

    Args:
        pid: number of the process to be guarded.
        seconds: without a living child, after which that one is killed.

    Ranks: local; Linux only, elsewhere nothing happens.

    Example:
        >>> leave_a_guard(pid=0, seconds=5.0)  # no process
    """
    started = state_and_start(pid)[1]
    if not started or not hasattr(os, "posix_spawn"):
        return
    root = str(Path(__file__).resolve().parents[1])
    code = (
        f"import sys; sys.path.insert(0, {root!r}); from ddpkit.liveness import end_when_deserted; "
        f"end_when_deserted({pid}, {started}, {seconds})"
    )
    with contextlib.suppress(OSError):
        os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", code], os.environ, setsid=True)
