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

from ddpkit.base.signals import REPEAT_SECONDS
from ddpkit.launch.variables import LOOPBACK, SPAWNED_BY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

KILL_SECONDS = 30.0  # as with torchrun; a rank may be saving, and the watch of one that waits ends it long before
STOP_SECONDS = 30.0
AGAIN_SECONDS = 2.0  # for a rank to end by itself, once the parent has been told twice to end
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_ENDING = (signal.SIGTERM, signal.SIGINT)

_PR_SET_PDEATHSIG = 1
_FIRST_SIGNAL_CODE = 128


class Child(NamedTuple):
    """A process that was started as a rank.

    Args:
        rank: its rank.
        pid: its process id, which is that of its process group too.
        poll: returns its exit code (negative: minus the signal that ended it), or None while it runs.

    Ranks: local.

    Example:
        >>> Child(0, 4711, lambda: None).poll() is None
        True
    """

    rank: int
    pid: int
    poll: Callable[[], int | None]


class Ending(NamedTuple):
    """How a process ended that did not end well.

    Args:
        rank: its rank.
        pid: its process id.
        code: its exit code, 128 + n where signal n ended it.

    Ranks: local.

    Example:
        >>> Ending(1, 4711, 137).words
        'was killed by SIGKILL'
        >>> Ending(1, 4711, 3).words
        'ended with exit code 3'
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

    They get SIGTERM at once and SIGKILL thirty seconds later: one of them may be saving. After a signal that was passed
    on, a rank that ends by it has not failed: the others have thirty seconds more to end by themselves. A second SIGINT
    or SIGTERM, more than a second after the first, is passed on too, and what it does not end is killed.

    Args:
        children: the processes.
        pause: waits a moment, such as 50 ms, or until something has happened.

    Attributes:
        failure: the first ending that was not good.
        forwarded: the signals that have come and were passed on.

    Ranks: local; the process that has started the others.

    Example:
        >>> import subprocess
        >>> done = subprocess.Popen(["false"], start_new_session=True)
        >>> Supervisor([Child(0, done.pid, done.poll)], lambda: time.sleep(0.01)).run().words
        'ended with exit code 1'
    """

    def __init__(self, children: Sequence[Child], pause: Callable[[], object]) -> None:
        self.failure: Ending | None = None
        self.forwarded: list[int] = []
        self._alive = list(children)
        self._pause = pause
        self._waiting_signals: list[int] = []
        self._asked_at = float("inf")
        self._end_at = self._kill_at = float("inf")

    def run(self) -> Ending | None:
        """Wait until all have ended.

        Returns:
            The first that failed, or None.

        State: the handlers of the signals that are passed on, put back at the end.
        """
        try:
            with self._hearing():
                while self._alive:
                    self._pause()
                    self._pass_on()
                    self._look()
                    self._end_when_due()
        finally:
            self.end_all()
        return self.failure

    def end_all(self) -> None:
        """End what is still there, first by SIGTERM."""
        self._end_at = time.monotonic()
        while self._alive:
            self._end_when_due()
            time.sleep(0.02)
            self._look()

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        """Collect signals instead of ending by them; one that is ignored stays ignored (``nohup``)."""
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in FORWARDED if hasattr(signal, name)]
            before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) not in {signal.SIG_IGN, None}}
        for number in before:
            signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, _frame: object) -> None:
        self._waiting_signals.append(number)

    def _pass_on(self) -> None:
        while self._waiting_signals:
            number = self._waiting_signals.pop(0)
            self.forwarded.append(number)
            for child in self._alive:
                _send(child.pid, number)
            if number in _ENDING:
                self._mind_repetition(time.monotonic())

    def _mind_repetition(self, now: float) -> None:
        self._asked_at = min(self._asked_at, now)
        if now - self._asked_at > REPEAT_SECONDS:
            self._kill_at = min(self._kill_at, now + AGAIN_SECONDS)

    def _look(self) -> None:
        """Take note of those that have ended; of several at once a killed one counts as the first."""
        codes = [(child, child.poll()) for child in self._alive]
        self._alive = [child for child, code in codes if code is None]
        ended = [
            Ending(child.rank, child.pid, _FIRST_SIGNAL_CODE - code if code < 0 else code)
            for child, code in codes
            if code
        ]
        for ending in sorted(ended, key=lambda one: (one.code <= _FIRST_SIGNAL_CODE, one.rank)):
            _send_group(ending.pid, signal.SIGKILL)  # workers of its loaders, which nobody else would end now
            stopped = ending.code - _FIRST_SIGNAL_CODE in self.forwarded
            if self.failure is None:
                self.failure = ending
            self._end_at = min(self._end_at, time.monotonic() + (STOP_SECONDS if stopped else 0.0))

    def _end_when_due(self) -> None:
        now = time.monotonic()
        if now >= self._end_at and self._kill_at == float("inf"):
            self._kill_at = now + KILL_SECONDS
            for child in self._alive:
                _send(child.pid, signal.SIGTERM)
        elif now >= self._kill_at:
            for child in self._alive:
                _send_group(child.pid, signal.SIGKILL)
                _send(child.pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _send_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


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


def rank_environment(rank: int, processes: int, address: str = LOOPBACK, port: int | None = None) -> dict[str, str]:
    """Make the variables of one rank, those of torchrun, for processes on this machine.

    Args:
        rank: of the process.
        processes: how many there are.
        address: where the store is; this process keeps it.
        port: its port; None if the rank is told later.

    Returns:
        The variables to add to the environment. ``OMP_NUM_THREADS`` is among them unless it is set already.

    Ranks: local.

    Example:
        >>> rank_environment(1, 2, port=4000)["MASTER_PORT"]
        '4000'
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": address,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        SPAWNED_BY: str(os.getpid()),
    }
    if port is not None:
        variables["MASTER_PORT"] = str(port)
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
