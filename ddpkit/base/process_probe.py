"""Whether a process of this machine lives, is about to end, or is gone.

Source: fields and states as in https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html. Without ``/proc`` a signal
shows only whether a process exists; its state stays unknown.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import select
import signal
import struct
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

DEAD_STATES = "ZXx"
WORKING_STATES = "RSD"  # neither stopped, nor halted by a debugger, nor gone
NAP_SECONDS = 0.1
LISTEN_SECONDS = 1.0  # between two looks of a guard
LATER_SECONDS = 4.0  # than its limit is a process killed: the others, with the same limit, first say where all are
DUMP_SECONDS = 0.5
PF_EXITING = 0x4  # among the flags of /proc/PID/stat, see include/linux/sched.h


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


def is_relative(pid: int) -> bool:
    """Say whether a process started this one, directly or not, or multiprocessing started both.

    Args:
        pid: its number.

    Ranks: local.

    Example:
        >>> is_relative(os.getpid())
        False
    """
    parent = os.getppid()
    if multiprocessing.parent_process() is not None and parent in {pid, _parent(pid)}:
        return True
    while parent > 1:  # not 1: it adopts every process whose parent has ended
        if parent == pid:
            return True
        parent = _parent(parent)
    return False


def _parent(pid: int) -> int:
    words = _stat(Path(f"/proc/{pid}/stat"))
    return int(words[1]) if words else 0


def end_after(pid: int, started: int, seconds: float) -> None:
    """Kill a process that has not ended after a while.

    Args:
        pid: its number.
        started: its start, of :func:`state_and_start`.
        seconds: after which it is killed.

    Ranks: local; of the process that :func:`kill_later` starts.

    Example:
        >>> end_after(os.getpid(), started=0, seconds=5.0)  # another process had that number
    """
    end = time.monotonic() + seconds
    while not has_ended(pid, started):
        if time.monotonic() > end:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(NAP_SECONDS)


def kill_later(pid: int, seconds: float) -> None:
    """Have a process killed that has not ended after a while, by a small process that outlives this one.

    Args:
        pid: its number.
        seconds: after which it is killed.

    Ranks: local; Linux only, elsewhere nothing happens.

    Example:
        >>> kill_later(pid=0, seconds=5.0)  # no process
    """
    started = state_and_start(pid)[1]
    if started:
        _start_beside(f"end_after({pid}, {started}, {seconds})")


def _start_beside(call: str, stdin: int | None = None) -> None:
    """Start a small process, in a session of its own, that makes a call of a function of this module."""
    if not hasattr(os, "posix_spawn"):
        return
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); import ddpkit.base.process_probe as here; here.{call}"
    actions = [] if stdin is None else [(os.POSIX_SPAWN_DUP2, stdin, 0)]
    words = [sys.executable, "-I", "-S", "-c", code]
    with contextlib.suppress(OSError):
        os.posix_spawn(sys.executable, words, os.environ, file_actions=actions, setsid=True)


class Guard:
    """A process beside this one that ends it where no thread of it can: a call of C may keep the interpreter lock.

    It writes first where the threads of this process are, through a handler of ``faulthandler`` for a signal that
    nothing else uses. It ends with this process.

    Args:
        who: is guarded, in words.
        limit: returns the seconds after which it ends this process unless it has heard again; 0: it does not.

    Ranks: local; Linux only, elsewhere nothing happens.

    Example:
        >>> guard = Guard("rank 0", limit=lambda: 60.0)
        >>> guard.hear()
        >>> guard.close()
    """

    def __init__(self, who: str, limit: Callable[[], float]) -> None:
        self._limit, self._pid, self._writer = limit, os.getpid(), -1
        self._lock = threading.RLock()  # a handler of a signal may tell in the middle of this
        started = state_and_start(os.getpid())[1]
        if not started:
            return
        number = int(signal.SIGRTMIN) + 6
        faulthandler.register(number, file=2, all_threads=True, chain=False)
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        _start_beside(f"end_when_silent({os.getpid()}, {started}, {who!r}, {number})", reader)
        os.close(reader)

    def hear(self) -> None:
        """Tell it that this process lives, and its limit: the last that it hears is the one that holds now."""
        if os.getpid() != self._pid:  # one that was forked, and in which the lock may be held for ever
            return
        with self._lock, contextlib.suppress(OSError):  # it is stopped, or has been killed
            if self._writer >= 0:
                os.write(self._writer, struct.pack("d", self._limit()))

    def close(self) -> None:
        """End it."""
        with self._lock:
            writer, self._writer = self._writer, -1
            if writer >= 0:
                os.close(writer)


def end_when_silent(pid: int, started: int, who: str, number: int) -> bool:
    """Listen to a process at stdin, and kill it when it has been silent for as long as it has said that it may be.

    Time in which it was stopped, or halted by a debugger, does not count, nor that in which this process was.

    Args:
        pid: its number.
        started: its start, of :func:`state_and_start`.
        who: that is, in words.
        number: of a signal that makes it write where it is.

    Returns:
        Whether it was killed.

    Ranks: local; of the process that :class:`Guard` starts.

    Example:
        >>> end_when_silent(os.getpid(), 0, "rank 0", 40)  # another process had that number
        False
    """
    silent, limit, looked = 0.0, 0.0, time.monotonic()
    while not has_ended(pid, started):
        is_heard = bool(select.select([0], [], [], LISTEN_SECONDS)[0])
        since, looked = min(time.monotonic() - looked, 2 * LISTEN_SECONDS), time.monotonic()
        if is_heard:
            text = os.read(0, 4096)
            if not text:
                return False
            silent, limit = 0.0, struct.unpack("d", text[-8:])[0]
        elif state_and_start(pid)[0] in WORKING_STATES:
            silent += since
        if 0 < limit <= silent - LATER_SECONDS:
            _write(f"\n{who}: where all threads are:\n")
            os.kill(pid, number)
            time.sleep(DUMP_SECONDS)
            reason = "a call of its code keeps Python's interpreter lock, see above"
            _write(f"\n[ddpkit] {who} was silent for {silent:.0f} s (--hang_timeout={limit:.0f}): {reason}. Killed.\n")
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
