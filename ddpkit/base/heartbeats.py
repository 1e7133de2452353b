"""Where each rank was at its last heartbeat: what the ranks post in the store of their group.

The heartbeats are sent by :class:`ddpkit.control.heartbeat.Heartbeat`. Here they are read by a rank
that waits, or has waited, for others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit.base.position import POSITION
from ddpkit.base.rank_status import RankStatus

if TYPE_CHECKING:
    from ddpkit.base.failure_report import FailureReport


def beat_key(rank: int) -> str:
    """Return the store key of a rank's heartbeat.

    Example:
        >>> beat_key(3)
        'ddpkit/beat/3'
    """
    return f"ddpkit/beat/{rank}"


def latest_statuses(report: FailureReport) -> list[RankStatus]:
    """Return where each rank was at its last heartbeat, and where this one is.

    Args:
        report: of the process group.

    Returns:
        One for each rank, in their order. Without ``beats`` where the rank has sent none.

    Raises:
        RuntimeError: the store has gone.

    Ranks: local; asks the process group's store.

    Example:
        >>> from torch.distributed import HashStore
        >>> from ddpkit.base import FailureReport
        >>> own, other = latest_statuses(FailureReport(HashStore(), rank=0, world_size=2))
        >>> own.pid > 0, other.pid
        (True, 0)
    """
    found = []
    for rank in range(report.world_size):
        key = beat_key(rank)
        if rank == report.rank:
            found.append(POSITION.own_status(rank, 0.0, look=True))
        elif report.store.check([key]):
            found.append(RankStatus.read(report.store.get(key)))
        else:
            found.append(RankStatus(rank))
    return found
