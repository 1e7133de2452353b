"""Errors of this rank that only follow another rank's failure, turned into that failure.

A rank that fails takes the others with it: their next collective ends in "Connection closed by
peer", which says nothing. So the rank that fails says so in the store of the group, and the others
turn the lost connection into a :class:`~ddpkit.errors.RankFailedError` that names the rank and the
reason.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpkit.base.failure_reason import WAITED, Reason
from ddpkit.base.failure_report import PROCESS, FailureReport
from ddpkit.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable


# How gloo, NCCL and torch's store say that the other side has gone.
LOST_CONNECTION = re.compile(
    "Connection (closed by|reset by|refused|timed out|was likely closed)|No route to host|is "
    "unreachable|Broken pipe|Socket closed|remote process exiting|failed to recv"
)


def is_second_hand(error: BaseException) -> bool:
    """Return whether an exception only reports another rank's failure.

    Example:
        >>> is_second_hand(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:9"))
        True
        >>> is_second_hand(RuntimeError("shapes do not fit"))
        False
    """
    is_lost = (
        isinstance(error, (RuntimeError, ConnectionError))
        and LOST_CONNECTION.search(str(error)) is not None
    )
    return (isinstance(error, RankFailedError) and WAITED not in vars(error)) or is_lost


def explained(error: BaseException, lost: int | None = None) -> BaseException:
    """Turn a lost connection into the failure of the lost rank; return other errors unchanged.

    Args:
        error: the exception on this rank.
        lost: the rank at the other end of the connection, where that is known.

    Returns:
        A :class:`~ddpkit.errors.RankFailedError`, or ``error`` itself. ``error`` becomes its
        cause only if the reason is unknown; otherwise its traceback would mislead.

    Ranks: local; asks the process group's store.

    Example:
        >>> explained(ValueError("own fault"))
        ValueError('own fault')
    """
    if isinstance(error, RankFailedError) or not is_second_hand(error):
        return error
    report = PROCESS.report
    known = None if report is None else failure_behind(report, lambda: report.find_reason(lost))
    if known is not None:
        return known
    news = RankFailedError(
        "the connection to another rank or to the store was lost, and no rank has left a reason: "
        "a process has ended early, or was killed (out of memory? a signal?). Look at the output "
        "and the exit codes of the other processes."
    )
    news.__cause__ = error
    return news


def failure_behind(
    report: FailureReport,
    find: Callable[[], Reason | None],
) -> RankFailedError | None:
    """Return the failure of another rank, or that it has come to its end; None where no rank is
    known to be the cause.

    Args:
        report: of the process group.
        find: looks for a rank that has told nothing, if no rank has; may wait a little.

    Ranks: local; asks the process group's store.

    Example:
        >>> from torch.distributed import HashStore
        >>> report = FailureReport(HashStore(), rank=0, world_size=3)
        >>> failure_behind(report, lambda: None) is None
        True
        >>> report.depart(2)
        >>> str(failure_behind(report, lambda: None))
        'rank 2 came to the end of its script or function, while this one still waits for it: ...'
    """
    reason = report.first_failure()
    departed = [] if reason is not None else report.departed()
    if reason is None and not departed:
        reason = find()
    if reason is not None:
        return RankFailedError(reason.summary())
    if not departed:
        return None
    return RankFailedError(
        f"rank {', '.join(map(str, departed))} came to the end of its script or function, while "
        "this one still waits for it: they took different paths. Do all ranks run the same epochs "
        "and collectives?"
    )
