"""The watchdog of a process: it reports where this rank is, reads failures of other ranks, and ends
a run that hangs.

It has two threads and uses the launcher's store. The heartbeat thread calls the store about once a
second, and may block there if the network is cut. The watchdog thread never blocks: it checks the
clock, the parent process, and the results of the heartbeat thread. Collectives are not used,
because after a failure they may never end.

A heartbeat is one short text in the store, written before anything that may fail. An error in the
rest (reading the other heartbeats, drawing conclusions from them) is logged once, and the next
heartbeat tries again.
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
    beat_key,
    has_ended,
    host_name,
    spans,
    state_and_start,
    table,
    temporarily,
    this_place,
)
from ddpkit.control.failure import record_for_launcher
from ddpkit.control.signals import kill_workers, show_workers
from ddpkit.errors import RankFailedError
from ddpkit.logger import get_logger
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from torch.distributed import Store

logger = get_logger(__name__)

LOOK_SECONDS = 0.25  # between two looks at the clock
GRACE_SECONDS = 1.5  # for the main thread to end by itself, once another rank has failed
EXIT_SECONDS = 3.0  # for a process to end by itself, once it has failed
HOLD_SECONDS = 25.0  # for a save that the end of the process waits for; launchers kill after 30
REASON_SECONDS = 4.0  # for the reason of a lost connection to become known
JOIN_SECONDS = 2.0
NOTE_SECONDS = 1.0  # for the run's log to take in why this process ends
QUIET_SECONDS = 0.5  # for a call of the store to end, before the reason is said
BEAT_SECONDS = 1.0  # between two calls of the store
# without a step, before a heartbeat tells the line, too: for those that may wait for this rank
TOLD_SECONDS = 1.0
FIRST_BEATS = 8  # that are quicker: so that the ranks soon know each other
SILENT_SECONDS = 4.0  # without a beat
# in which every rank that lives beats at least once, unless it keeps the interpreter lock
SEARCH_SECONDS = 2.2
# without a beat, while the group is made: nothing then keeps the interpreter lock for long
START_SECONDS = 30.0


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


class _StoreGoneError(RuntimeError):
    """The store has just failed to answer, and is not asked again."""


class Heartbeat:
    """Reports this rank's position to the other ranks, and reads which ranks failed, disappeared or
    fell silent.

    Args:
        watch: the watchdog of this process.
        neighbours: the ranks on this machine.

    Attributes:
        latest: the last heartbeat that was read of each rank, and this rank's own.
        silence: seconds since a rank's last new heartbeat, as far as it was asked. Time in which
            the store did not answer, or this process was stopped, is not counted.
        neighbours: the other ranks of this machine, as the launcher counts; not those that are
            known to have ended.
        failure: the failed rank, if this rank must react.
        is_searching: whether silent ranks are looked for on all machines, because a connection was
            lost.
        is_starting: whether this rank looks for ranks that fall silent, or never beat, while the
            group is made.
        store_lost: why the store cannot be used any more; None: it can.
        answered: when the store last answered, on the monotonic clock.

    Ranks: local; it exchanges heartbeats with the others through the store.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> Watchdog(FailureReport(store, rank=0, world_size=1), []).heartbeat.beat(store)
        >>> RankStatus.read(store.get("ddpkit/beat/0")).beats
        1
    """

    def __init__(self, watch: Watchdog, neighbours: Iterable[int]) -> None:
        self.watch = watch
        self.report = watch.report
        self.position = watch.position
        self.rank, self.world_size = self.report.rank, self.report.world_size
        self.neighbours = [rank for rank in sorted(neighbours) if rank != self.rank]
        self.failure: Reason | None = None
        self.is_searching = self.is_starting = False
        self.store_lost: str | None = None
        self.answered = time.monotonic()
        self.beats = 0
        self.silence: dict[int, float] = {}
        self.machine = "/".join(this_place())
        self._started = state_and_start(os.getpid())[1]
        self.latest = {self.rank: self.position.own_status(self.rank, 0.0, look=False)}
        self._read_at: dict[int, float] = {}
        self._logged: set[tuple[str, str]] = set()
        self._asking = threading.Lock()

    def beat_until(self, over: threading.Event) -> None:
        """Beat until an event is set, or the store has gone; not once this process has failed.

        Args:
            over: ends it.
        """
        pause = 0.0
        store: Store | None = None
        while not over.wait(pause):
            is_quick = self.beats < FIRST_BEATS or self.is_searching
            pause = BEAT_SECONDS / FIRST_BEATS if is_quick else BEAT_SECONDS
            with self._asking:
                try:
                    # A process that has failed says no more: of a store that is gone torch logs at
                    # length.
                    if PROCESS.failed is None and not self.report.store_is_lost:
                        store = self._own_connection() if store is None else store
                        self.beat(store)
                except Exception as error:  # noqa: BLE001 -- of the store, which is the end; or of what is tried again
                    if isinstance(error, _StoreGoneError) or not self._answers(store):
                        self.store_lost = (
                            None if over.is_set() else (str(error).splitlines() or [""])[0][:200]
                        )
                        return
                    self.log_once("exchanging heartbeats", error)
            self.answered = time.monotonic()

    def await_silence(self) -> None:
        """Wait briefly until no call of the store is under way: torch may be writing, at length,
        that it is gone.
        """
        if self._asking.acquire(timeout=QUIET_SECONDS):
            self._asking.release()

    def _own_connection(self) -> Store:
        """Return a connection of its own to the store: a wait on the shared one blocks all other
        calls.
        """
        clone = getattr(self.report.store, "clone", None)
        return self.report.store if clone is None else clone()

    def _answers(self, store: Store | None) -> bool:
        try:
            return store is not None and store.check([beat_key(self.rank)]) in {True, False}
        except RuntimeError:  # torch.distributed.DistError derives from it
            return False

    def beat(self, store: Store) -> None:
        """Post this rank's status, then read those of the others.

        Args:
            store: a connection of this thread's own.

        Raises:
            RuntimeError: the store does not answer.
        """
        self.beats += 1
        store.set(beat_key(self.rank), self._payload())
        self._learn_failure(store)
        self._read_others(store)

    def log_once(self, what: str, error: Exception) -> None:
        """Log an error of the watchdog itself, once: it is not a reason to end anything."""
        kind = type(error).__name__
        if (what, kind) not in self._logged:  # not the text, which may have a number in it
            self._logged.add((what, kind))
            text = "Watchdog of rank %d: %s failed and will be retried; training continues: %s: %s"
            logger.warning(
                text,
                self.rank,
                what,
                kind,
                error,
                main_process_only=False,
            )

    def silent(self) -> dict[int, float]:
        """Return, by rank, the seconds since the last heartbeat, for the ranks that are overdue."""
        return {
            rank: gap
            for rank, gap in list(self.silence.items())
            if gap > SILENT_SECONDS and rank in self.latest
        }

    def is_lowest_alive(self) -> bool:
        """Return whether this is the lowest rank that still sends heartbeats."""
        silent = self.silent()
        return all(rank in silent for rank in range(self.rank))

    def is_affected_by(self, reason: Reason) -> bool:
        """Return whether this process cannot go on after another rank's failure."""
        inside = self.position.progress is not None
        return inside and (reason.is_final or reason.session == self.position.session)

    def gone(self, rank: int, how: str) -> Reason:
        """Describe that a rank has disappeared.

        Args:
            rank: its number.
            how: what is known of its end, such as ``"was killed"``.
        """
        one = self.latest.get(rank) or RankStatus(rank)
        here = self.position.own_status(self.rank, 0.0, look=False)
        # In training all ranks are at the same step, and this one knows its own to the moment.
        place = (here if here.stage == Stage.TRAIN.name and not here.doing else one).place()
        text = f"disappeared{' ' if place else ''}{place}: it {how}."
        return Reason(
            rank,
            text,
            one.host,
            one.pid,
            session=one.session,
            is_final=True,
        )

    def _payload(self) -> str:
        seconds = self.watch.seconds_here()
        here = self.position.own_status(self.rank, seconds, look=seconds >= TOLD_SECONDS)
        here.beats = self.beats
        here.started = self._started
        here.machine = self.machine
        self._store_status(here)
        return here.to_json()

    def _learn_failure(self, store: Store) -> None:
        """Learn whether a rank has failed, or a neighbour has disappeared."""
        if self.failure is not None and self.failure.is_final:
            return
        report = FailureReport(store, self.rank, self.world_size)
        if self.position.progress is None and self.position.has_returned():
            report.depart()
        self._note_gone_neighbours(store, report)
        reason = report.first_failure()
        if report.store_is_lost:
            raise _StoreGoneError(report.lost_by)
        if reason is not None and self.is_affected_by(reason):
            self.failure = reason

    def _note_gone_neighbours(self, store: Store, report: FailureReport) -> None:
        for rank in list(self.neighbours):
            if rank not in self.latest:
                self._read(store, rank)
            known = self.latest.get(rank)
            if (
                known is not None
                and known.machine == self.machine
                and has_ended(known.pid, known.started)
            ):
                self._read(store, rank)  # where it was last
                if not report.has_departed(rank):
                    how = "was killed, or has crashed, or has ended itself at --hang_timeout"
                    self._report_gone(report, rank, f"{how} (out of memory? a signal?)")
                self.neighbours.remove(rank)

    def _report_gone(
        self,
        report: FailureReport,
        rank: int,
        how: str,
    ) -> None:
        """Report that a rank has disappeared: as the first failure, unless there is one, and as
        departed.
        """
        report.tell(self.gone(rank, how))
        report.depart(rank)

    def _read_others(self, store: Store) -> None:
        """Read the heartbeat of an awaited rank; near a limit, of all ranks."""
        awaited = self.report.awaited
        if self.is_searching or self.is_starting:
            self._search(store)
        elif awaited is not None:
            self._read(store, awaited)
            self._miss(store, awaited)
        if not self.watch.is_in_trouble():
            return
        for rank in range(self.rank):  # the first rank that still tells reads all
            self._read(store, rank)
            if rank not in self.silent():
                return
        for rank in range(self.rank + 1, self.world_size):
            self._read(store, rank)

    def _search(self, store: Store) -> None:
        """Report silent ranks; only the first rank that asks looks for them, and reports to the
        others.
        """
        report = FailureReport(store, self.rank, self.world_size)
        others = [
            rank
            for rank in range(self.world_size)
            if rank != self.rank and not report.has_departed(rank)
        ]
        for rank in others:
            self._read(store, rank)
        if self.is_starting:
            silent = [rank for rank in others if self.silence[rank] >= START_SECONDS]
        else:  # one that is seen to run may keep the interpreter lock: another one is lost
            quiet = [
                rank
                for rank in others
                if rank in self.latest and self.silence[rank] >= SEARCH_SECONDS
            ]
            silent = [rank for rank in quiet if not self._is_at_work(rank)]
        if silent:
            first, *more = silent
            likewise = f" (nor did rank {spans(more)})" if more else ""
            how = (
                f"sent no heartbeat for {self.silence[first]:.0f} s{likewise}: it was killed, or "
                "its machine is down"
            )
            self._report_gone(report, first, f"{how}, or the network to it is cut")

    def _miss(self, store: Store, rank: int) -> None:
        """Report an awaited rank as gone once it has been silent for the limit, unless its process
        is seen to run.
        """
        limit = self.watch.hang_timeout
        silence = self.silence[rank]
        if 0 < limit <= silence and not self._is_at_work(rank):
            how = (
                f"sent no heartbeat for {silence:.0f} s (--hang_timeout={limit:.0f}): it was "
                "killed or stopped, or"
            )
            cause = (
                "its machine is down, or the network to it is cut, or a call of its code keeps "
                "the interpreter lock"
            )
            self._report_gone(
                FailureReport(store, self.rank, self.world_size),
                rank,
                f"{how} {cause}",
            )

    def _is_at_work(self, rank: int) -> bool:
        """Return whether a rank's process is on this machine and running, not stopped."""
        known = self.latest.get(rank)
        if known is None or known.machine != self.machine:  # there its number means another process
            return False
        state, started = state_and_start(known.pid)
        return started == known.started and state in {"R", "S", "D"}

    def _read(self, store: Store, rank: int) -> None:
        key = beat_key(rank)
        self._store_status(
            RankStatus.read(store.get(key)) if store.check([key]) else RankStatus(rank)
        )

    def _store_status(self, one: RankStatus) -> None:
        """Store a rank's status; without beats it has sent none yet."""
        now = time.monotonic()
        known = self.latest.get(one.rank)
        since = min(now - self._read_at.get(one.rank, now), SILENT_SECONDS)
        self._read_at[one.rank] = now
        is_new = one.beats != (0 if known is None else known.beats)
        self.silence[one.rank] = 0.0 if is_new else self.silence.get(one.rank, 0.0) + since
        if one.beats:
            self.latest[one.rank] = one


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
        self.heartbeat = Heartbeat(self, neighbours)
        self._moved = self._changed = self._looked = time.monotonic()
        self._mark = position.mark()
        self._failure_since = self._failing_since = 0.0
        self._next_warning = 0.0
        self._over = threading.Event()
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
            reason = heartbeat.gone(
                lost,
                f"{how}, or its machine is down, or the network to it is cut",
            )
        return reason

    # ------------------------------------------------------------------ the thread that looks

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
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
            text = f"the store on {self.store_place} is gone with the process that held it, {cut}."
            return Reason(0, f"lost its launcher: {text}", is_final=True)
        return self.heartbeat.gone(
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
        os._exit(1)


def _note_end(text: str) -> None:
    """Write why this process ends into the run's log, and do not wait long: its disk may be why
    nothing moves.
    """
    if PROCESS.note_end is None:
        return
    noting = threading.Thread(
        target=PROCESS.note_end,
        args=(text,),
        name="ddpkit notes the end",
        daemon=True,
    )
    noting.start()
    noting.join(NOTE_SECONDS)


def _launcher_keeps_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
