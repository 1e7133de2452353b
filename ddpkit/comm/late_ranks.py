"""Wait in a collective for ranks that come late, as after work that the main process does alone.

A collective has a limit of time, and past it torch's error blames the rank that has waited. Here
the wait has no limit while the other ranks are there: a rank that ends or is killed breaks the
connection, and one that has departed is asked for. After half a minute the first rank that waits
says where all ranks are, so that the late one is named.

Collectives that run into their limit of time are explained by ``ddpkit/control/time_outs.py``,
and a run in which no rank makes a step is reported by ``ddpkit/control/watchdog.py``.

Source: ``timeout`` of the options of a single collective, which gloo obeys (torch 2.13).
"""

from __future__ import annotations

import logging
import time
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpkit.base import do_nothing, latest_statuses, line_of, table, waits_for_ranks
from ddpkit.comm.mailbox import get_runtime
from ddpkit.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)  # each message names its rank

WITHOUT_LIMIT = timedelta(days=365)
FIRST_WARNING_SECONDS = 30.0
WARNING_INTERVAL_SECONDS = 60.0
DEPARTED_SECONDS = 5.0  # between two looks at who has departed
SHORTEST_NAP_SECONDS = 0.00005
LONGEST_NAP_SECONDS = 0.02

LATE = (
    "rank %d has waited %.0f s in %s, at %s, for ranks that have not come. Where the ranks "
    "are:\n%s\n"
    "There is no time limit while they live. What the main process does alone belongs into "
    "run_on_main(func), for which the others wait by themselves."
)
GONE = (
    "rank {} waits in {}, at {}, for rank {}, which has come to its end without making this call. "
    "Look for the reason in its output, or for a path through the script that it did not take."
)


@waits_for_ranks
def start_patient_sum(
    total: torch.Tensor,
    call: str,
    group: Any,
    *,
    exchanges: bool,
    look: Callable[[], object] = do_nothing,
) -> Callable[[], object]:
    """Start to add up a tensor over the ranks, in place, without a limit of time.

    Args:
        total: contiguous, shape ``(N,)``, on the CPU; of the same dtype and size on all ranks.
        call: in which this rank waits, for messages.
        group: of all ranks, over gloo.
        exchanges: whether the two ranks exchange their tensors, and each adds them up.
        look: called every few seconds of the wait; may raise where a rank cannot come any more.

    Returns:
        What waits for the sum; to be called once.

    Raises:
        RankFailedError: by that: a rank has come to its end without making this call.

    Ranks: collective.
    """
    if not exchanges:
        reduce = dist.AllreduceOptions()  # of sums
        reduce.timeout = WITHOUT_LIMIT
        work = group.allreduce([total], reduce)
        return lambda: await_late(work, call, look)
    received = torch.empty_like(total)
    sizes = [0, 0]
    sizes[1 - dist.get_rank(group)] = len(total)
    own = total.clone()
    exchange = dist.AllToAllOptions()
    exchange.timeout = WITHOUT_LIMIT
    work = group.alltoall_base(received, own, sizes, sizes, exchange)

    def add() -> None:
        await_late(work, call, look)
        total.add_(received)

    return add


@waits_for_ranks
def await_late(work: Any, call: str, look: Callable[[], object] = do_nothing) -> None:
    """Wait for a collective that was started, and say who has not come where that takes long.

    Args:
        work: as torch returns it.
        call: in which this rank waits, for messages.
        look: as for :func:`start_patient_sum`.

    Raises:
        RankFailedError: a rank has come to its end without making this call.

    Ranks: collective.
    """
    started = time.monotonic()
    next_warning = FIRST_WARNING_SECONDS
    next_look = DEPARTED_SECONDS
    nap = SHORTEST_NAP_SECONDS
    while not work.is_completed():
        time.sleep(nap)
        nap = min(nap * 1.5, LONGEST_NAP_SECONDS)
        waited = time.monotonic() - started
        if waited >= next_look:
            next_look += DEPARTED_SECONDS
            _require_presence(work, call)
            look()
        if waited >= next_warning:
            next_warning += WARNING_INTERVAL_SECONDS
            _tell(call, waited)
    work.wait()


def _own_line() -> str:
    return line_of(traceback.extract_stack())


def _require_presence(work: Any, call: str) -> None:
    report = get_runtime().report
    departed = report.departed()
    if not departed or work.is_completed():
        return
    reason = report.first_failure()
    if reason is not None:
        raise RankFailedError(reason.summary())
    rank = ", ".join(map(str, departed))
    raise RankFailedError(GONE.format(report.rank, call, _own_line(), rank))


def _tell(call: str, waited: float) -> None:
    """Say where all ranks are, if no rank below this one waits and says so."""
    report = get_runtime().report
    known = latest_statuses(report)
    if any(status.waits for status in known if status.rank < report.rank):
        return
    logger.warning(
        LATE,
        report.rank,
        waited,
        call,
        _own_line(),
        table(known),
    )
