"""Rows of numbers that are added up over the ranks in the order of the tree, a chunk on each rank.

Two collectives for a row, on any number of ranks: a rank gets its chunk of every subtree, adds them
up, and all sums are gathered. Between few ranks on CPUs pairs of messages are quicker
(:mod:`ddpkit.comm.piece_sums`). Their number grows with the ranks, and each is a call of Python.

With NCCL all of it is in a stream of its own, and the process waits for nothing: so a row can be
pushed while a backward pass computes. The group is its own there, too. Collectives of one group are
matched by the order in which each rank starts them, and one that a recipe calls would come before a
row on one rank and after it on another. (Written for GPUs, and not run on several.)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpkit.base import waiting
from ddpkit.comm.mailbox import get_runtime
from ddpkit.comm.tensor_rows import ALIGNED_BYTES
from ddpkit.comm.tree_sum import TreeSum

if TYPE_CHECKING:
    from collections.abc import Sequence

USE_OF_GROUP = "sums of virtual ranks"


class ChunkSums:
    """Adds up rows of numbers over all ranks, in place.

    Args:
        subtrees: level and number of the subtrees of each rank.
        device: where the rows are.

    Ranks: local; what :meth:`begin` returns is collective.

    Example:
        >>> ChunkSums([[(0, 0)], [(0, 1)]], torch.device("cpu")).in_order
        [(0, (0, 0)), (1, (0, 1))]
    """

    def __init__(
        self,
        subtrees: Sequence[Sequence[tuple[int, int]]],
        device: torch.device,
    ) -> None:
        self.subtrees = subtrees
        self.device = device
        self.begins_early = device.type == "cuda" and _never_waits()
        every_subtree = itertools.chain.from_iterable(subtrees)
        # where each is among those of all ranks, and its level and number; in the order of the tree
        self.in_order = sorted(
            enumerate(every_subtree),
            key=lambda one: one[1][1] << one[1][0],
        )

    def begin(self) -> ChunksUnderWay:
        """Return what takes the rows of a step."""
        return ChunksUnderWay(self)


class ChunksUnderWay:
    """The rows of a step, whose sums are written into them.

    Args:
        sums: whose ranks these are.

    Ranks: collective: each rank pushes rows of the same sizes and dtypes, in the same order.
    """

    def __init__(self, sums: ChunkSums) -> None:
        self._sums = sums
        self._side = _stream_for_sums(sums.device) if sums.begins_early else None
        self._group = None if self._side is None else get_runtime().own_group(USE_OF_GROUP)
        self._held: list[Any] = []  # what the other stream reads

    def has_room(self, row_bytes: int) -> bool:
        """Say whether a row can be pushed without a wait for another rank."""
        del row_bytes
        return self._side is not None

    def push(self, parts: Sequence[torch.Tensor], *, may_wait: bool) -> None:
        """Send a row, and add it up.

        Args:
            parts: what is added up together: a row for each of this rank's subtrees, of shape
                ``(N,)``. The first is given the sums.
            may_wait: for the other ranks. On GPUs nothing waits.
        """
        del may_wait
        if not len(parts[0]):
            return
        if self._side is None:
            self._add(parts)
            return
        self._held += parts
        # after what has computed them
        self._side.wait_stream(torch.cuda.current_stream(self._sums.device))
        with torch.cuda.stream(self._side):
            self._add(parts)

    def finish(self) -> None:
        """Let what follows wait for all sums."""
        if self._side is not None:
            torch.cuda.current_stream(self._sums.device).wait_stream(self._side)
        self._held = []

    def _add(self, parts: Sequence[torch.Tensor]) -> None:
        world_size = len(self._sums.subtrees)
        first = parts[0]
        item = first.element_size()
        unit = max(1, ALIGNED_BYTES // item)
        units = -(-len(first) // (world_size * unit))
        chunk = units * unit
        missing = first.new_zeros(world_size * chunk - len(first))
        padded = [torch.cat([part, missing]).view(world_size, chunk) for part in parts]
        sent = torch.cat(padded, 1).view(-1)
        counts = [len(subtrees) * chunk for subtrees in self._sums.subtrees]
        received = sent.new_empty(sum(counts))
        with self._waiting():  # bytes travel: not every backend knows every dtype
            dist.all_to_all_single(
                received.view(torch.uint8),
                sent.view(torch.uint8),
                [count * item for count in counts],
                [len(parts) * chunk * item] * world_size,
                group=self._group,
            )
        tree = TreeSum(torch.Tensor.add_)
        every_part = received.view(-1, chunk).unbind()
        for place, (level, number) in self._sums.in_order:
            tree.push(number, every_part[place], level)
        joined = sent.new_empty(world_size * chunk)
        own_sum = tree.total().contiguous()
        with self._waiting():
            dist.all_gather(
                list(joined.view(torch.uint8).chunk(world_size)),
                own_sum.view(torch.uint8),
                group=self._group,
            )
        first.copy_(joined[: len(first)])

    def _waiting(self) -> Any:
        """Return a context for a collective, which a process waits for on a CPU."""
        return waiting() if self._side is None else contextlib.nullcontext()


def _never_waits() -> bool:
    """Say whether a process that starts a collective goes on at once. With gloo, and with some
    settings of NCCL that are for debugging, it waits for the other ranks.
    """
    return (
        dist.is_initialized()
        and dist.get_backend() == "nccl"
        and os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") in {"", "0"}
        and os.environ.get("TORCH_DISTRIBUTED_DEBUG", "") != "DETAIL"
    )


# a stream has memory of its own
@functools.cache
def _stream_for_sums(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
