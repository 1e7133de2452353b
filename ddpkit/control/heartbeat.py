"""The heartbeat of a process: about once a second it tells the other ranks where it is, and learns how they are.

A heartbeat is one short text in the store, written before anything that may fail. An error in the rest (reading the
other heartbeats, drawing conclusions from them) is logged once, and the next heartbeat tries again: a fault of this
package on one rank must neither make that rank look dead nor end a run that is sound.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpkit.base import (
    POSITION,
    PROCESS,
    FailureReport,
    Position,
    RankStatus,
    Reason,
    has_ended,
    host_name,
    state_and_start,
    this_place,
)
from ddpkit.logger import get_logger
from ddpkit.types import Stage

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from torch.distributed import Store

logger = get_logger(__name__)

BEAT_SECONDS = 1.0  # between two calls of the store
FIRST_BEATS = 8  # that are quicker: so that the ranks soon know each other
SILENT_SECONDS = 4.0  # without a beat
SEARCH_SECONDS = 2.2  # in which every rank that lives beats at least once, unless it keeps the interpreter lock
START_SECONDS = 30.0  # without a beat, while the group is made: nothing then keeps the interpreter lock for long
MOST_NAMED = 16  # of the ranks of a machine that is gone
GONE = "DistNetworkError"  # of torch.distributed: no answer will come any more


def beat_key(rank: int) -> str:
    """Return the key under which a rank tells where it is.

    Ranks: local.

    Example:
        >>> beat_key(3)
        'ddpkit/beat/3'
    """
    return f"ddpkit/beat/{rank}"


class Heartbeat:
    """Tells the other ranks where this one is, and learns who has failed, or disappeared, or fallen silent.

    Args:
        report: of the process group.
        neighbours: the ranks on this machine.
        still_for: tells for how many seconds this rank has been where it is.
        is_in_trouble: tells whether that is long.
        limit: tells for how many seconds a rank that this one waits for may be silent; 0: for ever.
        position: where this process is.

    Attributes:
        latest: the last heartbeat of each rank.
        silence: seconds since a rank's last new heartbeat. Time in which the store did not answer, or this process
            was stopped, is not counted.
        neighbours: the other ranks of this machine, as the launcher counts; not those that are known to have ended.
        failure: the failed rank, if this rank must react.
        is_searching: whether silent ranks are looked for on all machines, because a connection was lost.
        is_starting: whether this rank looks for ranks that fall silent, or never beat, while the group is made.
        store_lost: why the store cannot be used any more; None: it can.
        answered: when the store last answered, on the monotonic clock.

    Ranks: local; it exchanges heartbeats with the others through the store.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> Heartbeat(FailureReport(store, rank=0, world_size=1), []).beat(store)
        >>> RankStatus.read(store.get("ddpkit/beat/0")).beats
        1
    """

    def __init__(
        self,
        report: FailureReport,
        neighbours: Iterable[int],
        still_for: Callable[[], float] = float,
        is_in_trouble: Callable[[], bool] = bool,
        limit: Callable[[], float] = float,
        *,
        position: Position = POSITION,
    ) -> None:
        self.report = report
        self.rank, self.world_size = report.rank, report.world_size
        self.neighbours = [rank for rank in sorted(neighbours) if rank != self.rank]
        self.still_for, self.is_in_trouble, self.limit, self.position = still_for, is_in_trouble, limit, position
        self.latest: dict[int, RankStatus] = {}
        self.silence: dict[int, float] = {}
        self.failure: Reason | None = None
        self.is_searching = self.is_starting = False
        self.store_lost: str | None = None
        self.answered = time.monotonic()
        self.beats = 0
        self._read_at: dict[int, float] = {}
        self._logged: set[tuple[str, str]] = set()
        pid = os.getpid()
        machine = "/".join(this_place())
        self._here = RankStatus(self.rank, host_name(), pid, started=state_and_start(pid)[1], machine=machine)

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
            try:
                # A process that has failed says no more: of a store that is gone torch logs at length.
                if PROCESS.failed is None and not self.report.store_is_lost:
                    store = self._own_connection() if store is None else store
                    self.beat(store)
                self.answered = time.monotonic()
            except RuntimeError as error:  # torch.distributed.DistError derives from it
                if not over.is_set():
                    self.store_lost = (str(error).splitlines() or [""])[0][:200]
                return
            except Exception as error:  # noqa: BLE001 -- not the store's fault: the next beat may be better
                self.log_once("beat", error)
                self.answered = time.monotonic()

    def _own_connection(self) -> Store:
        """Return a connection of its own to the store: a wait on the shared one blocks all other calls."""
        clone = getattr(self.report.store, "clone", None)
        return self.report.store if clone is None else clone()

    def beat(self, store: Store) -> None:
        """Tell where this rank is, then read how the others are.

        Args:
            store: a connection of this thread's own.

        Raises:
            RuntimeError: the store does not answer.
        """
        self.beats += 1
        store.set(beat_key(self.rank), self._told())
        for work in (self._read_neighbours, self._learn_failure, self._read_others):
            try:
                work(store)
            except Exception as error:
                if type(error).__name__ == GONE:
                    raise
                store.check([beat_key(self.rank)])  # raises if, after all, the store was it
                self.log_once(work.__name__.strip("_").replace("_", " "), error)

    def log_once(self, what: str, error: Exception) -> None:
        """Log an error of the watchdog itself, once: it is not a reason to end anything."""
        kind = type(error).__name__
        if (what, kind) not in self._logged:  # not the text, which may have a number in it
            self._logged.add((what, kind))
            text = "The watchdog of rank %d cannot %s, which ends nothing and is tried again: %s: %s"
            logger.warning(text, self.rank, what, kind, error, main_process_only=False)

    def silent(self) -> dict[int, float]:
        """Return, by rank, the seconds since the last heartbeat, for the ranks that are overdue."""
        return {rank: gap for rank, gap in list(self.silence.items()) if gap > SILENT_SECONDS and rank in self.latest}

    def leads(self) -> bool:
        """Return whether this is the lowest rank that still sends heartbeats."""
        silent = self.silent()
        return all(rank in silent for rank in range(self.rank))

    def concerns(self, reason: Reason) -> bool:
        """Say whether this process cannot go on after another rank's failure."""
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
        text = f"disappeared{' ' if place else ''}{place}: it {how.rstrip('.')}."
        return Reason(rank, text, one.host, one.pid, session=one.session, is_final=True)

    def _told(self) -> str:
        try:
            seconds = self.still_for()
            is_away = self.position.has_no_limit() and seconds >= SILENT_SECONDS
            here = self.position.own_status(self.rank, seconds, look=is_away or self.is_in_trouble())
            here.beats, here.started, here.machine = self.beats, self._here.started, self._here.machine
            here.ends = not self.position.has_no_limit() and 0 < self.limit() <= seconds + 2 * BEAT_SECONDS
            text = here.to_json()
        except Exception as error:  # noqa: BLE001 -- that it lives matters more than where it is
            self.log_once("say where it is", error)
            here = replace(self._here, beats=self.beats)
            text = here.to_json()
        self._here = here
        self._take(here)
        return text

    def _read_neighbours(self, store: Store) -> None:
        """Read where the neighbours are, as far as they have told."""
        self._read([one for one in self.neighbours if one in self.latest or store.check([beat_key(one)])], store)

    def _learn_failure(self, store: Store) -> None:
        """Learn whether a rank has failed, or a neighbour has disappeared."""
        if self.failure is not None and self.failure.is_final:
            return
        report = FailureReport(store, self.rank, self.world_size)
        if self.position.progress is None and self.position.has_returned():
            report.depart()
        self._note_gone_neighbours(report)
        reason = report.first_failure()
        if report.store_is_lost:
            store.check([beat_key(self.rank)])  # raises
        if reason is not None and self.concerns(reason):
            self.failure = reason

    def _note_gone_neighbours(self, report: FailureReport) -> None:
        for rank in list(self.neighbours):
            known = self.latest.get(rank)
            if known is not None and self._is_here(known) and has_ended(known.pid, known.started):
                if not report.has_departed(rank):
                    ended = f"has ended itself after {self.limit():.0f} s without a step (--hang_timeout)"
                    crashed = "was killed, or has crashed (out of memory? a signal?)"
                    self._tell_gone(report, rank, ended if self.latest[rank].ends else crashed)
                self.neighbours.remove(rank)

    def _tell_gone(self, report: FailureReport, rank: int, how: str) -> None:
        """Report that a rank has disappeared: as the first failure, unless there is one, and as departed."""
        report.tell(self.gone(rank, how))
        report.depart(rank)

    def _read_others(self, store: Store) -> None:
        """Read where ranks are that this one may be waiting for: an awaited rank; in trouble, all."""
        awaited = self.report.awaited
        if self.is_searching or self.is_starting:
            self._search(store)
        elif awaited is not None:
            self._read_if_there(store, awaited)
            self._miss(store, awaited)
        if not self.is_in_trouble():
            return
        for rank in range(self.rank):  # the first rank that still tells reads all
            self._read_if_there(store, rank)
            if rank not in self.silent():
                return
        for rank in range(self.rank + 1, self.world_size):
            self._read_if_there(store, rank)

    def _search(self, store: Store) -> None:
        """Tell of the ranks that are silent; only the first rank that asks looks for them, and tells the others."""
        report = FailureReport(store, self.rank, self.world_size)
        for rank in range(self.world_size):
            if rank != self.rank and not report.has_departed(rank):
                self._read_if_there(store, rank)
        if self.is_starting:
            long = [rank for rank, silence in self.silence.items() if silence >= START_SECONDS]
        else:  # one that is seen to run may keep the interpreter lock: another one is lost
            quiet = [rank for rank in self.latest if self.silence[rank] >= SEARCH_SECONDS]
            long = [rank for rank in quiet if not self._is_at_work(rank)]
        silent = [rank for rank in long if not report.has_departed(rank)]
        if silent:
            first, *others = sorted(silent)
            names = ", ".join(self.latest.get(rank, RankStatus(rank)).name() for rank in others[:MOST_NAMED])
            more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
            likewise = f". So have {names}{more}" if names else ""
            how = f"has told nothing for {self.silence[first]:.0f} s: it was killed, or its machine is gone, or the"
            self._tell_gone(report, first, f"{how} network to it is cut{likewise}")

    def _miss(self, store: Store, rank: int) -> None:
        """Report an awaited rank as gone once it has been silent for the limit, unless its process is seen to run."""
        limit, silence = self.limit(), self.silence.get(rank, 0.0)
        if 0 < limit <= silence and not self._is_at_work(rank):
            how = f"has told nothing for {silence:.0f} s (--hang_timeout={limit:.0f}): it was killed or stopped, or its"
            cause = "machine is gone, or the network to it is cut, or a call of its code keeps the interpreter lock"
            self._tell_gone(FailureReport(store, self.rank, self.world_size), rank, f"{how} {cause}")

    def _is_here(self, one: RankStatus) -> bool:
        """Say whether a rank's process number means its process here, too: launchers may start containers."""
        return one.machine == self._here.machine

    def _is_at_work(self, rank: int) -> bool:
        """Say whether a rank's process is on this machine, and neither gone nor stopped."""
        known = self.latest.get(rank)
        if known is None or not self._is_here(known):
            return False
        state, started = state_and_start(known.pid)
        return started == known.started and state in {"R", "S", "D"}

    def _read_if_there(self, store: Store, rank: int) -> None:
        if store.check([beat_key(rank)]):
            self._read([rank], store)
        else:
            self._take(RankStatus(rank))

    def _read(self, ranks: list[int], store: Store) -> None:
        keys = [beat_key(rank) for rank in ranks]
        can_at_once = getattr(store, "has_extended_api", bool)
        texts = store.multi_get(keys) if len(keys) > 1 and can_at_once() else [store.get(key) for key in keys]
        for text in texts:
            self._take(RankStatus.read(text))

    def _take(self, one: RankStatus) -> None:
        """Note what a rank has told; one without beats has told nothing yet."""
        now, known = time.monotonic(), self.latest.get(one.rank)
        since = min(now - self._read_at.get(one.rank, now), SILENT_SECONDS)
        self._read_at[one.rank] = now
        is_new = one.beats != (0 if known is None else known.beats)
        self.silence[one.rank] = 0.0 if is_new else self.silence.get(one.rank, 0.0) + since
        if one.beats:
            self.latest[one.rank] = one
