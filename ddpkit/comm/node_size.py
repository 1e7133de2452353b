"""How many processes are on this node, where no launcher says it: Azure ML, and a launch by hand.

torchrun sets ``LOCAL_WORLD_SIZE`` and ``GROUP_RANK``, others ``RANK`` and ``LOCAL_RANK`` alone. The
difference of those two is the first rank of the node: ranks that have the same are on one node.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddpkit.comm.agreement import tell_all_ranks

if TYPE_CHECKING:
    from torch.distributed import Store

    from ddpkit.launch import LaunchInfo

FIRSTS = "ddpkit/first_on_node"


def learn_node_size(store: Store, info: LaunchInfo, seconds: float) -> None:
    """Set ``LOCAL_WORLD_SIZE``, and ``GROUP_RANK`` where no variable numbers the node, as torchrun
    does.

    Args:
        store: of this attempt.
        info: the place of this process.
        seconds: how long to wait for the others.

    Raises:
        LaunchError: a rank does not say where it is.

    Ranks: collective, of those that torch's variables alone have placed; others return at once.

    State: these variables, where they were not set.
    """
    if info.launcher != "environment" or info.world_size == 1:
        return
    own = info.first_on_node
    firsts = tell_all_ranks(store, FIRSTS, info.rank, info.world_size, own, seconds)
    if not _are_node_by_node(firsts):
        return  # nothing tells where they are; so all ranks find
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(firsts.count(own)))
    if "NODE_RANK" not in os.environ:
        os.environ.setdefault("GROUP_RANK", str(sorted(set(firsts)).index(own)))


def _are_node_by_node(firsts: list[int]) -> bool:
    """Say whether each rank is the first of its node, or on the node of the rank before."""
    before = [None, *firsts[:-1]]
    return all(first in {rank, before[rank]} for rank, first in enumerate(firsts))
