"""A collective that runs into its limit of time: which rank has not come, and where that rank is.

The error of torch is raised by the ranks that have waited, and says nothing of the rank that has
not come. So the first rank that has waited looks at where the others are. It waits for one more
heartbeat of each: a rank that sends none may have died, and then that is the reason. Nothing here
runs before such an error.

Waits without a limit of time are reported by :mod:`ddpkit.comm.late_ranks`, and a run in which no
rank makes a step by :mod:`ddpkit.control.watchdog`.

Source: the words of gloo (``unbound_buffer.cc``), NCCL and torch's ``Work::wait`` (torch 2.13).
"""

from __future__ import annotations

import contextlib
import re
import time
import traceback
from typing import TYPE_CHECKING

from ddpkit.base import (
    POSITION,
    WAITED,
    RankStatus,
    failure_behind,
    frames_of,
    latest_statuses,
    line_of,
    spans,
    waits_for_ranks,
)
from ddpkit.errors import RankFailedError

if TYPE_CHECKING:
    from ddpkit.base import FailureReport, Reason

FRESH_SECONDS = 3.0  # for one more heartbeat of each rank that lives
NAP_SECONDS = 0.05
SHOWN_RANKS = 4

TIME_OUT = re.compile(
    r"Timed out waiting (?P<gloo>\d+)ms for|Timeout\(ms\)=(?P<nccl>\d+)\)|Application timeout "
    r"caused pair closure|Operation timed out!"
)
ADVICE = (
    "What one process does alone belongs into run_on_main(func), for which the others wait "
    "without this limit. For work of all ranks that takes longer, give "
    "--distributed_timeout_minutes=M a larger M."
)
NOBODY_LATE = (
    "All ranks wait for others: they are in different calls, or the network is too slow. Do all "
    "ranks run the same epochs and collectives?"
)


def is_time_out(error: BaseException) -> bool:
    """Say whether a collective has run into its limit of time.

    Example:
        >>> is_time_out(RuntimeError("Timed out waiting 3000ms for send operation to complete"))
        True
        >>> is_time_out(RankFailedError("rank 1: Timed out waiting 3000ms for send operation"))
        False
    """
    is_own = isinstance(error, RuntimeError) and not isinstance(error, RankFailedError)
    return is_own and TIME_OUT.search(str(error)) is not None


@waits_for_ranks
def explained_time_out(error: BaseException, report: FailureReport) -> RankFailedError:
    """Turn the time-out of a collective into its cause: a rank that failed, or has not come.

    Args:
        error: of the collective.
        report: of the process group.

    Returns:
        The failure of another rank where there is one. Else what names the ranks that have not
        come, with ``error`` as its cause; to the other ranks it counts as this one's own failure.

    Ranks: local; asks the process group's store, and waits a little for the others' heartbeats.

    Example:
        >>> from torch.distributed import HashStore
        >>> error = RuntimeError("Timed out waiting 3000ms for send operation to complete")
        >>> print(
        ...     explained_time_out(error, FailureReport(HashStore(), rank=1, world_size=2))
        ... )  # doctest: +SKIP
        rank 1 waited 3 s for rank 0, which has not said where it is. What one process does ...
    """
    statuses: list[RankStatus] = []

    def find() -> Reason | None:
        before = _statuses(report)
        fresh, all_live = _await_fresh(report, before)
        statuses.extend(_at_time_out(then, now) for then, now in zip(before, fresh, strict=True))
        return None if all_live else report.find_reason(None)

    news = failure_behind(report, find)
    if news is not None:
        return news
    news = RankFailedError(_words(error, report, statuses))
    news.__cause__ = error
    vars(news)[WAITED] = True
    return news


def _statuses(report: FailureReport) -> list[RankStatus]:
    """Return where the ranks were last; where the store has gone, which is looked into later,
    nothing is known.
    """
    if not report.store_is_lost:
        with contextlib.suppress(RuntimeError):
            return latest_statuses(report)
    nowhere = [RankStatus(rank) for rank in range(report.world_size)]
    nowhere[report.rank] = POSITION.own_status(report.rank, 0.0, look=False)
    return nowhere


@waits_for_ranks
def _await_fresh(report: FailureReport, before: list[RankStatus]) -> tuple[list[RankStatus], bool]:
    """Wait briefly for a new heartbeat of each other rank.

    Returns:
        Where the ranks are, and whether there is one of each.
    """
    end = time.monotonic() + FRESH_SECONDS
    while True:
        now = _statuses(report)
        pairs = zip(before, now, strict=True)
        if all(new.beats != old.beats for old, new in pairs if new.rank != report.rank):
            return now, True
        is_over = report.first_failure() is not None or report.store_is_lost
        if is_over or time.monotonic() >= end:
            return now, False
        time.sleep(NAP_SECONDS)


def _at_time_out(then: RankStatus, now: RankStatus) -> RankStatus:
    """Choose the status that says best where a rank was when the time ran out.

    Args:
        then: read at the time-out. It may be older than the request for the rank's line.
        now: read a moment later, when the rank may have come to the collective.
    """
    has_come_since = bool(then.where) and now.waits
    return then if then.waits or has_come_since else now


def _words(error: BaseException, report: FailureReport, statuses: list[RankStatus]) -> str:
    own = statuses[report.rank]
    others = [status for status in statuses if status.rank != report.rank]
    # An error that was caught in fit knows the lines from fit to its cause. The lines of the script
    # before fit are on the present stack.
    place = own.place()
    line = line_of([*traceback.extract_stack(), *frames_of(error)])
    here = f" {place}{line and ','}" if place else ""
    here += f" at {line}," if line else ""
    late = [other for other in others if not other.waits]
    begin = f"{own.name()} waited{_limit(error, report)}{here}"
    if not late:
        return f"{begin} for {_named(others)}. {NOBODY_LATE}"
    return f"{begin} for {_named(late)}. {ADVICE}"


def _limit(error: BaseException, report: FailureReport) -> str:
    """Return how long was waited, and which option says so, as far as that is known."""
    found = TIME_OUT.search(str(error))
    given = found and (found["gloo"] or found["nccl"])
    if not given:
        return " for the limit of a collective"
    seconds = int(given) / 1000
    option = report.limits.get(int(given), "")
    return f" {seconds:g} s{option and f' ({option})'}"


def _named(ranks: list[RankStatus]) -> str:
    """Name the ranks that have not come, and say where each is."""
    words = [_where(rank) for rank in ranks[:SHOWN_RANKS]]
    more = [rank.rank for rank in ranks[SHOWN_RANKS:]]
    if more:
        words.append(f"rank {spans(more)}")
    return "; for ".join(words)


def _where(status: RankStatus) -> str:
    if not status.pid:
        return f"{status.name()}, which has not said where it is"
    where = status.where and f", at {status.where}"
    return f"{status.name()}, which is {status.place() or 'outside of fit and evaluate'}{where}"
