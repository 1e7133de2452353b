"""Sends something of any size around a ring: each rank gets what the rank after it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddpkit.base import get_world_size, waits_for_ranks
from ddpkit.comm import control_group
from ddpkit.distributed.main_only_code import require_all_ranks

LENGTH_BYTES = 8
FIRST_BYTES = 2**14  # so much goes in one message with its length
TAG = 0x64647001  # of no other message between two ranks


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
    ring = _Ring()
    length = len(data).to_bytes(LENGTH_BYTES, "little")
    first = (length + data[:FIRST_BYTES]).ljust(LENGTH_BYTES + FIRST_BYTES, b"\0")
    came = ring.pass_on(first, len(first))
    coming = int.from_bytes(came[:LENGTH_BYTES], "little")
    begun = came[LENGTH_BYTES : LENGTH_BYTES + coming]
    return begun + ring.pass_on(data[FIRST_BYTES:], coming - len(begun))


class _Ring:
    """Passes bytes on to the rank before this one."""

    def __init__(self) -> None:
        world_size = get_world_size()
        rank = dist.get_rank()
        self._group = control_group()
        self._before = (rank - 1) % world_size
        self._after = (rank + 1) % world_size

    def pass_on(self, data: bytes, coming: int) -> bytes:
        """Send bytes, and return those of the rank after this one.

        Args:
            data: nothing is sent where there is none.
            coming: how many that rank sends.
        """
        works: list[Any] = []
        received = torch.empty(coming, dtype=torch.uint8)
        if coming:
            works.append(dist.irecv(received, self._after, group=self._group, tag=TAG))
        if data:
            sent = torch.empty(len(data), dtype=torch.uint8)
            sent.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
            works.append(dist.isend(sent, self._before, group=self._group, tag=TAG))
        for work in works:
            work.wait()
        return received.numpy().tobytes()
