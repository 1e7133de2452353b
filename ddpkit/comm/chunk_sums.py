"""Rows of numbers that are added up over the ranks in the order of the tree, a chunk on each rank.

Two collectives for a row, on any number of ranks: a rank gets its chunk of every subtree, adds them
up, and all sums are gathered. Between few ranks on CPUs pairs of messages are quicker
(:mod:`ddpkit.comm.piece_sums`). Their number grows with the ranks, and each is a call of Python.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddpkit.base import waiting
from ddpkit.comm.tensor_rows import ALIGNED_BYTES
from ddpkit.comm.tree_sum import TreeSum

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class ChunkSums:
    """Adds up rows of numbers over all ranks, in place.

    Args:
        subtrees: level and number of the subtrees of each rank.

    Ranks: local; :meth:`add` is collective.

    Example:
        >>> ChunkSums([[(0, 0)], [(0, 1)]]).in_order
        [(0, (0, 0)), (1, (0, 1))]
    """

    def __init__(self, subtrees: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._subtrees = subtrees
        every_subtree = itertools.chain.from_iterable(subtrees)
        # where each is among those of all ranks, and its level and number; in the order of the tree
        self.in_order = sorted(
            enumerate(every_subtree),
            key=lambda one: one[1][1] << one[1][0],
        )

    def add(self, rows: Iterable[Sequence[torch.Tensor]]) -> None:
        """Write the sums of rows into them.

        Args:
            rows: what is added up together: one row for each of this rank's subtrees, of shape
                ``(N,)``. The first is given the sums.

        Ranks: collective; of the same sizes and dtypes on all.
        """
        for parts in rows:
            if len(parts[0]):
                self._add(parts)

    def _add(self, parts: Sequence[torch.Tensor]) -> None:
        world_size = len(self._subtrees)
        first = parts[0]
        item = first.element_size()
        unit = max(1, ALIGNED_BYTES // item)
        units = -(-len(first) // (world_size * unit))
        chunk = units * unit
        missing = first.new_zeros(world_size * chunk - len(first))
        padded = [torch.cat([part, missing]).view(world_size, chunk) for part in parts]
        sent = torch.cat(padded, 1).view(-1)
        counts = [len(subtrees) * chunk for subtrees in self._subtrees]
        received = sent.new_empty(sum(counts))
        with waiting():  # bytes travel: not every backend knows every dtype
            dist.all_to_all_single(
                received.view(torch.uint8),
                sent.view(torch.uint8),
                [count * item for count in counts],
                [len(parts) * chunk * item] * world_size,
            )
        tree = TreeSum(torch.Tensor.add_)
        every_part = received.view(-1, chunk).unbind()
        for place, (level, number) in self.in_order:
            tree.push(number, every_part[place], level)
        joined = sent.new_empty(world_size * chunk)
        own_sum = tree.total().contiguous()
        with waiting():
            dist.all_gather(
                list(joined.view(torch.uint8).chunk(world_size)),
                own_sum.view(torch.uint8),
            )
        first.copy_(joined[: len(first)])
