"""The heartbeat of a process: it tells the other ranks where this one is, and reads how they are.

A heartbeat is one short text in the store, written before anything that may fail. An error in the
rest (reading the other heartbeats, drawing conclusions from them) is logged once, and the next
heartbeat tries again.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Protocol

from ddpkit.base import (
    PROCESS,
    FailureReport,
    Position,
    RankStatus,
    Reason,
    beat_key,
    has_ended,
    spans,
    state_and_start,
    this_place,
)
from ddpkit.logger import get_logger
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed import Store

logger = get_logger(__name__)


QUIET_SECONDS = 0.5  # for a call of the store to end, before the reason is said
BEAT_SECONDS = 1.0  # between two calls of the store
# without a step, before a heartbeat has the line, too: other ranks may wait for this one
TOLD_SECONDS = 1.0
FIRST_BEATS = 8  # that are quicker: so that the ranks soon know each other
SILENT_SECONDS = 4.0  # without a beat
# in which every rank that lives beats at least once, unless it keeps the interpreter lock
SEARCH_SECONDS = 2.2
# without a beat, while the group is made: nothing then keeps the interpreter lock for long
START_SECONDS = 30.0


class _StoreGoneError(RuntimeError):
    """The store has just failed to answer, and is not asked again."""


class Watch(Protocol):
    """What a heartbeat asks of the watchdog of its process."""

    report: FailureReport
    position: Position
    hang_timeout: float
    group_has_ended: Callable[[], bool]

    def seconds_here(self) -> float:
        """Return the seconds since this rank's last step."""
        ...

    def is_in_trouble(self) -> bool:
        """Return whether a limit of time is near, so that the heartbeats of all ranks are read."""
        ...


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
        >>> from ddpkit.control import Watchdog
        >>> store = HashStore()
        >>> Watchdog(FailureReport(store, rank=0, world_size=1), []).heartbeat.beat(store)
        >>> RankStatus.read(store.get("ddpkit/beat/0")).beats
        1
    """

    def __init__(self, watch: Watch, neighbours: Iterable[int]) -> None:
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
        while not over.wait(pause) and not self._ends_with_group():
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

    def _ends_with_group(self) -> bool:
        if not self.watch.group_has_ended():
            return False
        self.report.depart()
        return True

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

    def disappearance(self, rank: int, how: str) -> Reason:
        """Describe that a rank has disappeared.

        Args:
            rank: its number.
            how: what is known of its end, such as ``"was killed"``.
        """
        status = self.latest.get(rank) or RankStatus(rank)
        here = self.position.own_status(self.rank, 0.0, look=False)
        # In training all ranks are at the same step, and this one knows its own to the moment.
        place = (here if here.stage == Stage.TRAIN.name and not here.doing else status).place()
        text = f"disappeared{' ' if place else ''}{place}: it {how}."
        return Reason(
            rank,
            text,
            status.host,
            status.pid,
            session=status.session,
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
        report.tell(self.disappearance(rank, how))
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
        else:  # a process that still runs may only hold the interpreter lock; others are lost
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

    def _store_status(self, status: RankStatus) -> None:
        """Store a rank's status; without beats it has sent none yet."""
        now = time.monotonic()
        known = self.latest.get(status.rank)
        # if this process was stopped meanwhile, the other one need not have been silent
        since = min(now - self._read_at.get(status.rank, now), SILENT_SECONDS)
        self._read_at[status.rank] = now
        is_new = status.beats != (0 if known is None else known.beats)
        self.silence[status.rank] = 0.0 if is_new else self.silence.get(status.rank, 0.0) + since
        if status.beats:
            self.latest[status.rank] = status
