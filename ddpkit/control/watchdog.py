"""The watchdog of a process: it ends a run that hangs, or of which another rank has failed.

It has two threads and uses the launcher's store. The heartbeat thread
(:mod:`ddpkit.control.heartbeat`) calls the store about once a second, and may block there if the
network is cut. The watchdog thread never blocks: it checks the clock, the parent process, and the
results of the heartbeat thread. Collectives are not used, because after a failure they may never
end.

Three modules report ranks that are late. This one: no rank makes a step for ``--hang_warning`` or
``--hang_timeout`` seconds. :mod:`ddpkit.comm.late_ranks`: a rank waits in a collective without a
limit of time. :mod:`ddpkit.control.time_outs`: a collective has run into its limit of time.
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
    RankStatus,
    Reason,
    host_name,
    table,
    temporarily,
)
from ddpkit.control.exit_delay import EXIT_DELAY
from ddpkit.control.failure import record_for_launcher
from ddpkit.control.heartbeat import BEAT_SECONDS, SILENT_SECONDS, Heartbeat
from ddpkit.control.loader_workers import kill_workers, show_workers
from ddpkit.errors import RankFailedError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager


logger = get_logger(__name__)


LOOK_SECONDS = 0.25  # between two looks at the clock
GRACE_SECONDS = 1.5  # for the main thread to end by itself, once another rank has failed
EXIT_SECONDS = 3.0  # for a process to end by itself, once it has failed
REASON_SECONDS = 4.0  # for the reason of a lost connection to become known
JOIN_SECONDS = 2.0
NOTE_SECONDS = 1.0  # for the run's log to take in why this process ends


class Watchdog:
    """Watches this process and the ranks of its group, from the start of the group until this rank
    departs.

    Args:
        report: of the process group.
        neighbours: the ranks on this machine.
        parent: process id of the launcher; this process ends with it. None: no launcher to watch.
        store_place: host and port of the store, for messages.
        position: where this process is.

    Attributes:
        heartbeat: the thread that uses the store.
        hang_warning: seconds without a step after which it is said where the ranks are; 0: never.
        hang_timeout: seconds without a step after which the process ends; 0: never.
        group_has_ended: says whether somebody else has ended the group, and the watch with it.

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
        store_place: str = "another machine",
        *,
        position: Position = POSITION,
    ) -> None:
        self.report = report
        self.rank = report.rank
        self.parent = parent
        self.store_place = store_place
        self.position = position
        self.hang_warning = self.hang_timeout = 0.0
        self.group_has_ended: Callable[[], bool] = lambda: False
        self.heartbeat = Heartbeat(self, neighbours)
        # The position as it was seen last, and clock times. `_changed`: when the position was seen
        # to change. `_moved`: the same, but also whenever the position has no limit of time, or all
        # of this process was stopped; limits count from here. `_looked`: the last look.
        self._mark = position.mark()
        self._moved = self._changed = self._looked = time.monotonic()
        self._failure_since = 0.0  # since when another rank's failure is known; 0: there is none
        self._failing_since = 0.0  # since when this rank has failed and not ended; 0: it has not
        self._next_warning = 0.0  # seconds without a step after which the next table is shown
        self._over = threading.Event()  # set as the watchdog ends
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to watch."""
        self.report.find_reason = self.await_reason
        self.report.await_silence = self.heartbeat.await_silence
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

    def seconds_here(self) -> float:
        """Return the seconds since this rank's last step, or since ``fit`` or ``evaluate``
        ended.
        """
        return time.monotonic() - self._changed

    def is_in_trouble(self) -> bool:
        """Return whether to read the heartbeats of all ranks: without a step for so long that a
        limit is near.
        """
        limits = [limit for limit in (self.hang_warning, self.hang_timeout) if limit > 0]
        begins = [min(limit / 2, limit - SILENT_SECONDS - 2 * BEAT_SECONDS) for limit in limits]
        return bool(limits) and time.monotonic() - self._moved >= min(begins)

    def await_reason(self, lost: int | None = None) -> Reason | None:
        """Wait briefly for a report of which rank failed or disappeared.

        Args:
            lost: the rank at the other end of a lost connection, which is taken to have disappeared
                if none reports.
        """
        heartbeat = self.heartbeat
        end = time.monotonic() + REASON_SECONDS
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
        if reason is None and lost is not None:
            how = (
                "closed its connections and left no reason: it was killed (out of memory? a "
                "signal?)"
            )
            reason = heartbeat.disappearance(
                lost,
                f"{how}, or its machine is down, or the network to it is cut",
            )
        return reason

    # ------------------------------------------------------------------ the thread that looks

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS) and not self.group_has_ended():
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 -- who watches must go on
                self._moved = time.monotonic()  # an error here must not count as a hang
                self.heartbeat.log_once("checking the clock", error)

    def look(self) -> None:
        """Look at everything once."""
        if self.parent is not None and os.getppid() != self.parent:
            self._end(
                f"the launcher (pid {self.parent}) that started rank {self.rank} is gone: the "
                "process ends."
            )
        self._check_failure()
        # after a while in which this process was stopped, before the clocks are looked at
        self._notice_steps()
        self._check_store()
        self._check_clock()

    def _notice_steps(self) -> None:
        mark = self.position.mark()
        now = time.monotonic()
        gap = now - self._looked
        self._looked = now
        if gap > SILENT_SECONDS:  # all of this process was stopped
            self._moved = min(self._moved + gap, now)
            self.heartbeat.answered = min(self.heartbeat.answered + gap, now)
        if mark != self._mark:
            self._changed = now
        if mark != self._mark or self.position.has_no_limit():
            self._mark = mark
            self._moved = now
            self._next_warning = self.hang_warning

    def _check_failure(self) -> None:
        now = time.monotonic()
        if PROCESS.failed is not None and self.position.progress is None:
            self._failing_since = self._failing_since or now
            if now - self._failing_since > EXIT_SECONDS and not EXIT_DELAY.is_held:
                self._end(None)
            return
        reason = self.heartbeat.failure
        if reason is None or not self.heartbeat.is_affected_by(reason):
            self.heartbeat.failure = None
            self._failure_since = 0.0
            return
        if not reason.is_final and not self.position.is_waiting():
            self._failure_since = 0.0  # all ranks may be about to raise, and to catch, the same
            return
        self._failure_since = self._failure_since or now
        if now - self._failure_since > GRACE_SECONDS and not EXIT_DELAY.is_held:
            self._end(f"rank {self.rank} ends: {reason.summary()}")

    def _check_store(self) -> None:
        inside = self.position.progress is not None
        lost = self.heartbeat.store_lost
        if lost is not None and inside and PROCESS.failed is None:
            self.heartbeat.failure = self.heartbeat.failure or self._lost_store_reason(lost)
            return
        silent = time.monotonic() - self.heartbeat.answered
        # While this rank works alone, the others wait at the store.
        works_alone = bool(self.position.unlimited_calls) and not self.position.is_waiting()
        if inside and 0 < self.hang_timeout < silent and not works_alone:
            keeper = (
                "the launcher"
                if _launcher_keeps_store()
                else self.heartbeat.latest.get(0, RankStatus()).name()
            )
            self._dump_stacks()
            self._end(
                f"rank {self.rank} ({host_name()}): no answer for {silent:.0f} s from the store "
                f"on {self.store_place}: {keeper}, which keeps it, is silent, or the network to "
                "it is cut."
            )

    def _lost_store_reason(self, how: str) -> Reason:
        cut = f"or the network to it is cut ({how})"
        if _launcher_keeps_store():
            text = f"the store on {self.store_place}, which the launcher kept, is gone, {cut}."
            return Reason(0, f"has ended, or its launcher has: {text}", is_final=True)
        return self.heartbeat.disappearance(
            0,
            f"was lost with the store on {self.store_place}, which it held, {cut}",
        )

    def _check_clock(self) -> None:
        still = time.monotonic() - self._moved
        failure = self.heartbeat.failure
        if (
            self.position.progress is None
            or PROCESS.failed is not None
            or (failure is not None and failure.is_final)
        ):
            return
        if 0 < self.hang_timeout <= still:
            limit = f"(--hang_timeout={self.hang_timeout:.0f})"
            text = (
                f"rank {self.rank} has made no step for {still:.0f} s {limit}. Where it "
                f"is:\n{self._table()}"
            )
            self._dump_stacks()
            self._end(text)
        elif 0 < self.hang_warning <= still and still >= self._next_warning:
            # a run that hangs over night is not to fill the disk with its tables
            self._next_warning = 2 * max(self._next_warning, self.hang_warning)
            if self.heartbeat.is_lowest_alive():
                end = (
                    f" After {self.hang_timeout:.0f} s the run ends (--hang_timeout)."
                    if self.hang_timeout
                    else ""
                )
                words = "No step for %.0f s.%s Where the ranks are:\n%s"
                logger.warning(
                    words,
                    still,
                    end,
                    self._table(),
                    main_process_only=False,
                )
            self._show_workers()

    def _table(self) -> str:
        """Say where this rank is; the first rank that still tells says where all are."""
        latest = self.heartbeat.latest
        ranks = sorted(latest) if self.heartbeat.is_lowest_alive() else [self.rank]
        return table([latest[rank] for rank in ranks], self.heartbeat.silent())

    def _dump_stacks(self) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"\nrank {self.rank}: where all threads are:\n".encode())
            faulthandler.dump_traceback(file=2, all_threads=True)
        self._show_workers()

    def _show_workers(self) -> None:
        if self.position.is_at_loader():
            show_workers()

    def _end(self, text: str | None) -> None:
        """End the process, whatever its main thread is doing; say why last, if there is something
        to say.
        """
        if text is not None:
            _note_end(text)
            record_for_launcher(RankFailedError(text))
            self.heartbeat.await_silence()
            with contextlib.suppress(OSError):
                os.write(2, f"\n[ddpkit] {text}\n".encode())
        kill_workers()
        # without hooks: the main thread may be in a collective that never ends
        os._exit(1)


def _note_end(text: str) -> None:
    """Write why this process ends into the run's log, and do not wait long: its disk may be why
    nothing moves.
    """
    calls = list(PROCESS.at_hard_end)
    if PROCESS.note_end is not None:
        calls.append(functools.partial(PROCESS.note_end, text))
    notes = [
        threading.Thread(target=call, name="ddpkit notes the end", daemon=True) for call in calls
    ]
    started = []
    for note in notes:
        # Python 3.12 starts no thread where the process is at its end already
        with contextlib.suppress(RuntimeError):
            note.start()
            started.append(note)
    end = time.monotonic() + NOTE_SECONDS
    for note in started:
        note.join(max(0.0, end - time.monotonic()))


def _launcher_keeps_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
