"""Sends something of any size around a ring: each rank gets what the rank after it has."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from ddpkit.base import get_world_size, waits_for_ranks
from ddpkit.comm import control_group, keep_alive
from ddpkit.distributed.main_only_code import require_all_ranks


@waits_for_ranks
def from_next_rank(data: bytes) -> bytes:
    """Send bytes to the rank before this one, and return those of the rank after it; the last rank
    gets those of rank 0.

    As many bytes travel as there are, each once: with :func:`ddpkit.distributed.gather_objects`
    every rank would have those of all.

    Args:
        data: of this rank, of any length.

    Returns:
        Those of the next rank; its own without a process group.

    Raises:
        LaunchError: called inside main-only code, where the others are not there.

    Ranks: collective.

    Example:
        >>> from_next_rank(b"alone")
        b'alone'
    """
    world_size = get_world_size()
    if world_size == 1:
        return data
    require_all_ranks("from_next_rank")
    group = control_group()
    rank = dist.get_rank()
    before = (rank - 1) % world_size
    after = (rank + 1) % world_size
    size = keep_alive(torch.tensor([len(data)]))
    sizes = [keep_alive(torch.empty_like(size)) for _ in range(world_size)]
    dist.all_gather(sizes, size, group=group)
    coming = int(sizes[after])
    # not kept alive as the sizes are: these may be large
    received = torch.empty(coming, dtype=torch.uint8)
    sent = torch.empty(len(data), dtype=torch.uint8)
    sent.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    from_each = [0] * world_size
    to_each = [0] * world_size
    from_each[after] = coming
    to_each[before] = len(data)
    dist.all_to_all_single(received, sent, from_each, to_each, group=group)
    return received.numpy().tobytes()
