"""The watchdog of a process: it sends heartbeats, learns of other ranks' failures, and ends a process that would hang.

It has two threads and uses the launcher's store. The heartbeat thread (:mod:`ddpkit.control.heartbeat`) calls the store
about once a second, and may block there if the network is cut. The watchdog thread never blocks: it checks the clock,
the parent process, and the results of the heartbeat thread. Collectives are not used, because after a failure they may
never end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import threading
import time
from typing import TYPE_CHECKING

from ddpkit.base import (
    POSITION,
    PROCESS,
    FailureReport,
    Position,
    Reason,
    host_name,
    kill_later,
    table,
    temporarily,
)
from ddpkit.control.failure import record_for_launcher
from ddpkit.control.heartbeat import SILENT_SECONDS, Heartbeat
from ddpkit.control.loader_workers import kill_workers, show_workers
from ddpkit.errors import LaunchError, RankFailedError
from ddpkit.launch import find_launch
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

logger = get_logger(__name__)

LOOK_SECONDS = 0.25  # between two looks at the clock
GRACE_SECONDS = 1.5  # for the main thread to end by itself, once another rank has failed
EXIT_SECONDS = 3.0  # for a process to end by itself, once it has failed
LAUNCHER_SECONDS = 5.0  # for torchrun's agent to end, once its processes have
HOLD_SECONDS = 25.0  # for a save that the end of the process waits for; launchers kill after 30
REASON_SECONDS = 4.0  # for the reason of a lost connection to become known
JOIN_SECONDS = 2.0


class ExitDelay:
    """Delays the end of this process while a checkpoint is being saved, for a limited time.

    Ranks: local.

    Example:
        >>> with EXIT_DELAY.held():
        ...     EXIT_DELAY.is_held
        True
    """

    def __init__(self) -> None:
        self._since: float | None = None

    @property
    def is_held(self) -> bool:
        """Say whether the end has to wait: not for ever."""
        return self._since is not None and time.monotonic() - self._since < HOLD_SECONDS

    def held(self) -> AbstractContextManager[None]:
        """Return a context during which the watchdog does not end the process."""
        return temporarily(self, _since=self._since or time.monotonic())


EXIT_DELAY = ExitDelay()


class Watchdog:
    """Watches over this process and those it works with, from when its group is made until it departs.

    Args:
        report: of the process group.
        neighbours: the ranks on this machine.
        parent: process id of the launcher; this process ends with it. None: no launcher to watch.
        position: where this process is.

    Attributes:
        heartbeat: the thread that uses the store.
        hang_warning: seconds without a step after which it is said where the ranks are; 0: never.
        hang_timeout: seconds without a step after which the process ends; 0: never.

    Ranks: local; it exchanges heartbeats with the others through the store.

    Example:
        >>> from torch.distributed import HashStore
        >>> watch = Watchdog(FailureReport(HashStore(), rank=0, world_size=1), range(1))
        >>> watch.start(); watch.stop()
    """

    def __init__(
        self,
        report: FailureReport,
        neighbours: Iterable[int],
        parent: int | None = None,
        *,
        position: Position = POSITION,
    ) -> None:
        self.report, self.rank = report, report.rank
        self.parent, self.position = parent, position
        self.hang_warning = self.hang_timeout = 0.0
        self.heartbeat = Heartbeat(
            report, neighbours, self._seconds_here, self._is_in_trouble, lambda: self.hang_timeout, position=position
        )
        self._moved = self._changed = self._looked = time.monotonic()
        self._mark = position.mark()
        self._failure_since = self._failing_since = 0.0
        self._next_warning = 0.0
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to watch."""
        self.report.find_reason = self.await_reason
        beat = functools.partial(self.heartbeat.beat_until, self._over)
        for work, name in ((beat, "ddpkit-heartbeat"), (self._look, "ddpkit-watch")):
            thread = threading.Thread(target=work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End the watchdog; the store may go afterwards."""
        self._over.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_SECONDS)

    def limited(self, warning: float, timeout: float) -> AbstractContextManager[None]:
        """Return a context with other limits of time without a step.

        Args:
            warning: seconds after which it is said where the ranks are; 0: never.
            timeout: seconds after which the process ends; 0: never.
        """
        return temporarily(self, hang_warning=warning, hang_timeout=timeout)

    @property
    def still_for(self) -> float:
        """Seconds since this rank last made progress."""
        return time.monotonic() - self._moved

    def await_reason(self) -> Reason | None:
        """Wait briefly for a report of which rank failed or disappeared."""
        heartbeat, end = self.heartbeat, time.monotonic() + REASON_SECONDS
        heartbeat.is_searching = self.report.is_first_to(f"search/{self.position.sessions}")
        if self.report.store_is_lost:  # a call outside of the heartbeat has found that
            heartbeat.store_lost = heartbeat.store_lost or "the connection broke"
        reason: Reason | None = None
        while reason is None and time.monotonic() < end and not self._over.is_set():
            reason = heartbeat.failure or self.report.first_failure()
            if reason is None and heartbeat.store_lost is not None:
                reason = self._lost_store_reason(heartbeat.store_lost)
            if reason is None:
                time.sleep(0.05)
        heartbeat.is_searching = False
        return reason

    # ------------------------------------------------------------------ the thread that looks

    def _look(self) -> None:
        looks = (
            self._notice_steps,
            self._check_launcher,
            self._check_failure,
            self._check_store,
            self._check_clock,
        )
        while not self._over.wait(LOOK_SECONDS):
            for look in looks:
                try:
                    look()
                except Exception as error:  # noqa: BLE001 -- who watches must go on
                    self._moved = time.monotonic()  # an error here must not count as a hang
                    self.heartbeat.log_once(look.__name__.strip("_").replace("_", " "), error)

    def _notice_steps(self) -> None:
        mark, now = self.position.mark(), time.monotonic()
        gap, self._looked = now - self._looked, now
        if gap > SILENT_SECONDS:  # all of this process was stopped
            self._moved = min(self._moved + gap, now)
            self.heartbeat.answered = min(self.heartbeat.answered + gap, now)
        if mark != self._mark:
            self._changed = now
        if mark != self._mark or self.position.has_no_limit():
            self._mark, self._moved = mark, now
            self._next_warning = self.hang_warning

    def _seconds_here(self) -> float:
        """Return the seconds since this rank's last step, or since it has left ``fit`` or ``evaluate``."""
        return time.monotonic() - self._changed

    def _is_in_trouble(self) -> bool:
        limits = [limit for limit in (self.hang_warning, self.hang_timeout) if limit > 0]
        return bool(limits) and self.still_for >= min(limits) / 2

    def _check_launcher(self) -> None:
        if self.parent is not None and os.getppid() != self.parent:
            self._end(f"the launcher (pid {self.parent}) that started rank {self.rank} is gone: the process ends.")

    def _check_failure(self) -> None:
        now = time.monotonic()
        if PROCESS.failed is not None and self.position.progress is None:
            self._failing_since = self._failing_since or now
            if now - self._failing_since > EXIT_SECONDS and not EXIT_DELAY.is_held:
                self._end(None)
            return
        reason = self.heartbeat.failure
        if reason is None or not self.heartbeat.concerns(reason):
            self.heartbeat.failure, self._failure_since = None, 0.0
            return
        if not reason.is_final and not self.position.is_waiting():
            self._failure_since = 0.0  # all ranks may be about to raise, and to catch, the same
            return
        self._failure_since = self._failure_since or now
        if now - self._failure_since > GRACE_SECONDS and not EXIT_DELAY.is_held:
            self._end(f"rank {self.rank} ends: {reason.summary()}")

    def _check_store(self) -> None:
        inside, lost = self.position.progress is not None, self.heartbeat.store_lost
        if lost is not None and inside and PROCESS.failed is None:
            self.heartbeat.failure = self.heartbeat.failure or self._lost_store_reason(lost)
            return
        silent = time.monotonic() - self.heartbeat.answered
        if inside and 0 < self.hang_timeout < silent and not self._works_alone():
            self._leave_launcher()
            self._dump_stacks()
            self._end(
                f"rank {self.rank} ({host_name()}): no answer for {silent:.0f} s from the store on {_store_place()}"
                f"{self._store_keeper()} is silent, or the network to it is cut."
            )

    def _store_keeper(self) -> str:
        """Say whose store it is, at the end of a clause: where no launcher keeps it, the first rank does."""
        if _launcher_keeps_store():
            return ": that machine"
        known = self.heartbeat.latest.get(0)
        return f": {'rank 0' if known is None else known.name()}, which keeps it,"

    def _works_alone(self) -> bool:
        """Say whether this process does main-only work, for which the others wait at the store."""
        return bool(self.position.excused) and not self.position.is_waiting()

    def _leave_launcher(self) -> None:
        """See to it that torchrun's agent ends too, unless it may start this rank again.

        An agent that meets the others at a c10d rendezvous asks the store once a second who else is there. If the
        network is cut it waits for the answer as long as TCP tries, a quarter of an hour, and hears no signal.
        """
        most, used = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
        if self.parent is not None and most is not None and most == used:
            kill_later(self.parent, LAUNCHER_SECONDS)

    def _lost_store_reason(self, how: str) -> Reason:
        cut = f"or the network to it is cut ({how})"
        if _launcher_keeps_store():
            text = f"the store on {_store_place()} is gone with the process that held it, {cut}."
            return Reason(0, f"lost its launcher: {text}", is_final=True)
        return self.heartbeat.gone(0, f"was lost with the store on {_store_place()}, which it held, {cut}")

    def _check_clock(self) -> None:
        still = self.still_for
        failure = self.heartbeat.failure
        if self.position.progress is None or PROCESS.failed is not None or (failure is not None and failure.is_final):
            return
        if 0 < self.hang_timeout <= still:
            self._end_hang(still)
        elif 0 < self.hang_warning <= still and still >= self._next_warning:
            self._next_warning = 2 * max(self._next_warning, self.hang_warning)
            if self.heartbeat.leads():
                end = f" After {self.hang_timeout:.0f} s the run ends (--hang_timeout)." if self.hang_timeout else ""
                words = "No step for %.0f s.%s Where the ranks are:\n%s"
                logger.warning(words, still, end, self._all_ranks(), main_process_only=False)
            self._show_workers()

    def _all_ranks(self) -> str:
        latest = sorted([*self.heartbeat.latest.values()], key=lambda one: one.rank)
        return table(latest, self.heartbeat.silent())

    def _end_hang(self, still: float) -> None:
        text = f"rank {self.rank} has made no step for {still:.0f} s (--hang_timeout={self.hang_timeout:.0f})."
        here = self.heartbeat.latest.get(self.rank)
        if self.heartbeat.leads():
            text = f"{text} Where the ranks are:\n{self._all_ranks()}"
        elif here is not None:
            text = f"{text} Where it is, and the first rank tells where all are:\n{table([here])}"
        self._dump_stacks()
        self._end(text)

    def _dump_stacks(self) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"\nrank {self.rank}: where all threads are:\n".encode())
            faulthandler.dump_traceback(file=2, all_threads=True)
        self._show_workers()

    def _show_workers(self) -> None:
        if self.position.is_at_loader():
            show_workers()

    def _end(self, text: str | None) -> None:
        """End the process, whatever its main thread is doing; say why last, if there is something to say."""
        if text is not None:
            record_for_launcher(RankFailedError(text))
            _write(text)
        kill_workers()
        os._exit(1)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"\n[ddpkit] {text}\n".encode())


def _launcher_keeps_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store_place() -> str:
    """Return the machine that keeps the store, and the port if there is one that was told."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    with contextlib.suppress(LaunchError):
        host = host or find_launch().address
    return f"{host}:{port}" if host and port else host or "another machine"
