"""The start of a process group's watchdog, and what happens if a rank fails in that time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ddpkit.base import POSITION, FailureReport, Reason, is_second_hand
from ddpkit.comm.group_end import DEPARTURE_SECONDS
from ddpkit.control import Watchdog
from ddpkit.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpkit.launch import LaunchInfo


def start_watchdog(
    report: FailureReport,
    info: LaunchInfo,
    neighbours: Iterable[int],
    store_place: str,
    hang_timeout: float,
) -> Watchdog:
    """Watch over this process from now on: a rank may fail before it has joined the group that the
    others wait in.

    Args:
        report: of the process group, in the store of this attempt.
        info: what the environment tells of this process.
        neighbours: the ranks of this machine.
        store_place: host and port of the store.
        hang_timeout: seconds; 0: never.
    """
    watchdog = Watchdog(report, neighbours, _process_to_end_with(info), store_place)
    watchdog.hang_timeout = hang_timeout
    # without connections yet only silence shows that a rank is lost
    watchdog.heartbeat.is_starting = report.rank == 0
    watchdog.start()
    return watchdog


def _process_to_end_with(info: LaunchInfo) -> int | None:
    """Return the process whose end leaves this one without a launcher; None: it is not known."""
    parent = multiprocessing.parent_process()
    started_by_parent = parent is not None and parent.pid == os.getppid()  # no server between them
    return os.getppid() if info.launcher == "torchrun" or started_by_parent else None


@contextlib.contextmanager
def watched_start(report: FailureReport, watchdog: Watchdog, *, hosts: bool) -> Iterator[None]:
    """Return a context for what the ranks do at the start of their group: if one fails there, the
    others end, and name it.

    Args:
        report: of the process group.
        watchdog: that has begun.
        hosts: whether this process keeps the store.

    Raises:
        RankFailedError: another rank has failed; the message says which.

    Ranks: collective.
    """
    try:
        with POSITION.inside(SimpleNamespace(epoch=0, step=0, optimizer_step=0)):
            yield
            watchdog.heartbeat.is_starting = False
    except BaseException as error:  # told here: nobody can go on, whatever becomes of the exception
        reason = _tell_or_ask(report, error)
        report.depart()
        if hosts:
            report.await_departures(DEPARTURE_SECONDS)  # until they have read why
        watchdog.stop()
        if reason is not None:
            raise RankFailedError(reason.summary()) from None
        raise


def _tell_or_ask(report: FailureReport, error: BaseException) -> Reason | None:
    """Report this rank's error to the others; if it is only a lost connection, look up the failure
    behind it.
    """
    if is_second_hand(error):
        return report.find_reason(None)
    report.tell(Reason.of(report.rank, error, is_final=True))
    return None
