"""Watches over the processes that ddpkit has started itself: passes signals on, and ends all when one fails.

Does for them what torchrun's agent does for its workers; other than those they never outlive who started them, and keep
their exit codes.

Source: https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html .
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpkit.base import REPEAT_SECONDS
from ddpkit.launch.variables import LOOPBACK, SPAWNED_BY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

POLL_SECONDS = 0.05
KILL_SECONDS = 30.0  # as with torchrun; a rank may be saving, and the watchdog of one that waits ends it long before
STOP_SECONDS = 60.0
LINGER_SECONDS = 60.0  # for a rank to end that has done all it had to do
AGAIN_SECONDS = 2.0  # for a rank to end by itself, once the parent has been told twice to end
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_ENDING = (signal.SIGTERM, signal.SIGINT)

_PR_SET_PDEATHSIG = 1
_FIRST_SIGNAL_CODE = 128


class Ending(NamedTuple):
    """How a process ended that did not end well.

    Args:
        rank: its rank.
        pid: its process id.
        code: its exit code, 128 + n where signal n ended it.

    Ranks: local.

    Example:
        >>> Ending(1, 4711, 137).words, Ending(1, 4711, 3).words
        ('was killed by SIGKILL', 'ended with exit code 3')
    """

    rank: int
    pid: int
    code: int

    @property
    def words(self) -> str:
        """What happened, in words."""
        with contextlib.suppress(ValueError):
            if self.code > _FIRST_SIGNAL_CODE:
                return f"was killed by {signal.Signals(self.code - _FIRST_SIGNAL_CODE).name}"
        return f"ended with exit code {self.code}"


class Supervisor:
    """Waits for processes; when one fails, it ends the others.

    They get SIGTERM at once and SIGKILL thirty seconds later: one of them may be saving. A rank that ends by a
    forwarded signal has not failed: the others have a minute to end. A second SIGINT or SIGTERM, more than a second
    after the first, is forwarded too, and ranks that still run are killed.

    Args:
        processes: by rank: the process id, which is also its process group id, and a function that returns the exit
            code (negative: minus the signal that ended it), or None while the process runs.
        is_done: returns whether all ranks have finished their work; they then have a minute to end.

    Attributes:
        failure: the first ending that was not good.
        forwarded: the signals that have come and were passed on.

    Ranks: local; the process that has started the others.

    Example:
        >>> import subprocess
        >>> done = subprocess.Popen(["false"], start_new_session=True)
        >>> Supervisor([(done.pid, done.poll)]).run().words
        'ended with exit code 1'
    """

    def __init__(
        self, processes: Sequence[tuple[int, Callable[[], int | None]]], is_done: Callable[[], bool] = lambda: False
    ) -> None:
        self.failure: Ending | None = None
        self.forwarded: list[int] = []
        self._alive = dict(enumerate(processes))
        self._is_done = is_done
        self._arrived: list[int] = []
        self._is_terminating = False
        self._asked_at = self._kill_at = float("inf")

    def run(self) -> Ending | None:
        """Wait until all have ended.

        Returns:
            The first that failed, or None.

        State: the handlers of the signals that are passed on, put back at the end.
        """
        with self._hearing():
            while self._alive:
                time.sleep(POLL_SECONDS)
                self._pass_on()
                self._look()
                if self._is_done():
                    self._kill_at = min(self._kill_at, time.monotonic() + LINGER_SECONDS)
                if time.monotonic() >= self._kill_at:
                    for pid, _ in self._alive.values():
                        send(pid, signal.SIGKILL, group=True)
                        send(pid, signal.SIGKILL)
        return self.failure

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        """Collect signals instead of ending by them; one that is ignored stays ignored (``nohup``)."""
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in FORWARDED if hasattr(signal, name)]
            before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) not in {signal.SIG_IGN, None}}
        for number in before:
            signal.signal(number, lambda arrived, _frame: self._arrived.append(arrived))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self) -> None:
        while self._arrived:
            number = self._arrived.pop(0)
            self.forwarded.append(number)
            for pid, _ in self._alive.values():
                send(pid, number)
            if number in _ENDING:
                now = time.monotonic()
                self._asked_at = min(self._asked_at, now)
                if now - self._asked_at > REPEAT_SECONDS:
                    self._kill_at = min(self._kill_at, now + AGAIN_SECONDS)

    def _look(self) -> None:
        """Record ranks that have ended; of several at once a killed rank counts as the first."""
        ended = []
        for rank, (pid, poll) in list(self._alive.items()):
            code = poll()
            if code is not None:
                del self._alive[rank]
            if code:
                ended.append(Ending(rank, pid, code if code > 0 else _FIRST_SIGNAL_CODE - code))
        for ending in sorted(ended, key=lambda one: one.code <= _FIRST_SIGNAL_CODE):
            send(ending.pid, signal.SIGKILL, group=True)  # its loader workers, which would survive otherwise
            self.failure = self.failure or ending
            was_stopped = ending.code - _FIRST_SIGNAL_CODE in self.forwarded
            if not was_stopped and not self._is_terminating:
                self._is_terminating = True
                for pid, _ in self._alive.values():
                    send(pid, signal.SIGTERM)
            self._kill_at = min(self._kill_at, time.monotonic() + (STOP_SECONDS if was_stopped else KILL_SECONDS))


def send(pid: int, number: int, *, group: bool = False) -> None:
    """Send a signal to a process, or to its process group; nothing happens where that has ended.

    Args:
        pid: of the process, or of the one that leads the group.
        number: of the signal.
        group: whether all of the group get it.

    Ranks: local.

    Example:
        >>> send(os.getpid(), 0)
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, number)


def end_with_parent(parent: int) -> None:
    r"""See to it that this process is killed when the one that has started it ends, however that ends.

    Args:
        parent: its process id.

    Ranks: local; Linux only, elsewhere nothing happens.

    State: the parent-death signal of this process. Where the parent has ended already, this process does too.

    Example:
        >>> import subprocess
        >>> code = "import os; from ddpkit.launch.process_monitor import *; end_with_parent(os.getppid()); print(1)"
        >>> subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
        b'1\n'
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def rank_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """Make torchrun's environment variables of one rank, for processes on this machine.

    Args:
        rank: of the process.
        processes: how many there are.
        port: of the store, which this process keeps.

    Returns:
        The variables to add to the environment. ``OMP_NUM_THREADS`` is among them unless it is set already.

    Ranks: local.

    Example:
        >>> rank_environment(1, 2, 4000)["MASTER_PORT"]
        '4000'
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        SPAWNED_BY: str(os.getpid()),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, cores() // processes))
    return variables


def cores() -> int:
    """Count the processor cores that this process may use.

    Ranks: local.

    Example:
        >>> cores() >= 1
        True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
