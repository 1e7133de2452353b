"""The number of this process on its machine."""

from __future__ import annotations

import os

import torch.distributed as dist

from ddpkit.base import is_distributed_initialized
from ddpkit.comm import get_runtime
from ddpkit.launch import find_launch


def get_local_rank() -> int | None:
    """Return this process's number on its machine, as the launcher has it, or None without a
    launcher.

    In a process group that was made without a launcher (``mp.spawn`` and ``init_process_group``)
    the ranks tell each other where they are, in their first Brain, :func:`ddp_init_group` or
    :func:`run_once_per_node`: until then the answer is None.

    Ranks: local.

    Example:
        >>> get_local_rank() is None
        True
    """
    machine = get_runtime().machine if is_distributed_initialized() else None
    if machine is not None:
        return machine[1].index(dist.get_rank())
    # before the launchers are looked at, which takes longer
    rank = os.environ.get("LOCAL_RANK")
    if rank:
        return int(rank)
    info = find_launch()
    return info.local_rank if info.is_distributed else None


def is_local_rank_zero() -> bool:
    """Say whether this is the first process of its machine.

    Where :func:`get_local_rank` does not know, every process takes itself for the first. In a group
    that was made without a launcher call :func:`ddp_init_group` first.

    Ranks: local.

    Example:
        >>> is_local_rank_zero()
        True
    """
    return get_local_rank() in {None, 0}
