"""Sums of lists of tensors over all ranks, in the order of one tree
(:mod:`ddpkit.comm.tree_sum`).

Small tensors go to every rank, in one message that also tells which of the tensors a rank has at
all. Large ones are cut into one chunk for each rank, which adds it up and gives the sum to the
others: by pairs of messages between few ranks on CPUs (:mod:`ddpkit.comm.piece_sums`), else by two
collectives (:mod:`ddpkit.comm.chunk_sums`).
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpkit.base import waiting
from ddpkit.comm.chunk_sums import ChunkSums
from ddpkit.comm.mailbox import control_group
from ddpkit.comm.piece_sums import AHEAD, PieceSums
from ddpkit.comm.tensor_rows import ALONE, TensorRow, padded_size, rows_of
from ddpkit.comm.tree_sum import TreeSum, add_tensors, subtrees_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

BUCKET_BYTES = 32 * 2**20  # sent at once between GPUs, of each subtree
PIECE_BYTES = 8 * 2**20  # between CPUs; smaller ones take more processor time, larger ones memory
MOST_PAIRED = 8  # ranks that send to each other; above it Python would be busy with their messages
WHOLE_BYTES = 2**20  # of the subtrees of all ranks, which then go to every rank


class OrderedSum:
    """Adds up lists of tensors over all ranks, in the order of the tree over all parts.

    Args:
        like: the shapes, dtypes and devices of a part's tensors.
        parts: their number over all ranks, a multiple of the number of ranks. Rank ``r`` of ``W``
            has the parts from ``r * parts / W`` on.
        in_turns: whether it has ``r``, ``r + W`` and so on instead.
        piece_bytes: how much of a subtree is sent at once; changes no bit of the sums. None: what
            suits the device.
        whole_bytes: up to how much of all subtrees goes to every rank, in host memory; changes no
            bit either.

    Ranks: local; :meth:`over_ranks` is collective.

    Example:
        >>> tree = TreeSum(add_tensors)
        >>> tree.push(0, [torch.ones(1), None]); tree.push(1, [torch.ones(1), None])
        >>> OrderedSum([torch.ones(1), torch.ones(2)], 2).over_ranks(tree)
        [tensor([2.]), None]
    """

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        parts: int,
        piece_bytes: int | None = None,
        whole_bytes: int = WHOLE_BYTES,
        *,
        in_turns: bool = False,
    ) -> None:
        self.world_size = (
            dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        )
        each = parts // self.world_size
        subtrees = [
            subtrees_of(
                range(rank, parts, self.world_size)
                if in_turns
                else range(rank * each, (rank + 1) * each)
            )
            for rank in range(self.world_size)
        ]
        self._like = like
        self._is_on_cpu = all(tensor.is_cpu for tensor in like)
        if piece_bytes is None:
            piece_bytes = PIECE_BYTES if self._is_on_cpu else BUCKET_BYTES
        self._piece_bytes = piece_bytes
        in_pairs = self._is_on_cpu and self.world_size <= MOST_PAIRED
        self._sums_of_rows: PieceSums | ChunkSums = (
            PieceSums(subtrees, piece_bytes) if in_pairs else ChunkSums(subtrees)
        )
        small = self._small_places(whole_bytes // sum(map(len, subtrees)))
        self._whole = _WholeSums(like, small, subtrees) if small else None
        self._large = [place for place in range(len(like)) if place not in set(small)]
        self._known: dict[tuple[int, ...], list[TensorRow]] = {}  # by which tensors are there

    def over_ranks(self, tree: TreeSum) -> list[torch.Tensor | None]:
        """Return the sums, the same bits on any number of ranks; None where no part has a tensor.

        Args:
            tree: this rank's parts: lists of tensors and None, added by :func:`add_tensors`. They
                are written into; so none may share its memory with another.

        Ranks: collective.
        """
        if self.world_size == 1:
            found: list[torch.Tensor | None] = tree.total()
            return found
        own = [subtree.total for subtree in tree.subtrees]
        if self._whole is None:
            present = self._agree(own)
            sums = self._sums_of(present, own)
        elif self._has_every_large_one(own):
            # what others have decides nothing about the large ones, so they need not wait for it
            coming = self._whole.send(own)
            sums = self._sums_of(None, own)
            small, present = self._whole.add(coming)
            sums |= small
        else:
            small, present = self._whole.add(self._whole.send(own))
            sums = self._sums_of(present, own) | small
        return [
            sums[place].view(tensor.shape) if present[place] else None
            for place, tensor in enumerate(self._like)
        ]

    def _has_every_large_one(self, own: list[Any]) -> bool:
        return all(any(total[place] is not None for total in own) for place in self._large)

    def _sums_of(self, present: list[int] | None, own: list[Any]) -> dict[int, torch.Tensor]:
        """Return the sums of the large tensors, of those that are present, by place.

        Args:
            present: of each tensor whether any rank has it; None: all are.
            own: this rank's subtrees.
        """
        sums: dict[int, torch.Tensor] = {}
        places = [place for place in self._large if present is None or present[place]]
        self._sums_of_rows.add(_joined(self._rows(tuple(places)), own, sums))
        return sums

    def _small_places(self, most: int) -> list[int]:
        """Return the places of the smallest tensors, so many that a subtree's message has at most
        so many bytes.
        """
        if not self._is_on_cpu:
            return []
        bytes_each = [padded_size(tensor) * tensor.element_size() for tensor in self._like]
        by_size = sorted(range(len(self._like)), key=bytes_each.__getitem__)
        left = most - padded_size(_numbers(self._like)) * _numbers(self._like).element_size()
        small = []
        for place in by_size:
            left -= bytes_each[place]
            if left < 0:
                break
            small.append(place)
        return sorted(small)

    def _agree(self, own: list[Any]) -> list[int]:
        """Return of each tensor whether any rank has it."""
        is_there = [
            any(tensor is not None for tensor in column) for column in zip(*own, strict=True)
        ]
        # in host memory: a GPU would be waited for
        present = torch.tensor(is_there, dtype=torch.uint8)
        with waiting():
            dist.all_reduce(
                present,
                dist.ReduceOp.MAX,
                group=None if self._is_on_cpu else control_group(),
            )
        found: list[int] = present.tolist()
        return found

    def _rows(self, places: tuple[int, ...]) -> list[TensorRow]:
        if places not in self._known:
            self._known[places] = list(rows_of(self._like, places, self._piece_bytes))
        return self._known[places]


class _WholeSums:
    """Adds up small tensors on every rank by itself: each sends its subtrees to all others.

    Args:
        like: of all tensors.
        places: of the small ones.
        subtrees: level and number of the subtrees of each rank.
    """

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        places: list[int],
        subtrees: list[list[tuple[int, int]]],
    ) -> None:
        every = [*like, _numbers(like)]
        self._number_of_like = len(like)
        self._rows = list(rows_of(every, [*places, len(like)], math.inf))
        self._row_bytes = sum(row.row_bytes for row in self._rows)
        self._subtrees = subtrees
        every_subtree = itertools.chain.from_iterable(subtrees)
        # where each is among those of all ranks, and its level and number; in the order of the tree
        self._in_order = sorted(
            enumerate(every_subtree),
            key=lambda one: one[1][1] << one[1][0],
        )

    def send(self, own: list[Any]) -> tuple[torch.Tensor, Any]:
        """Send this rank's subtrees to all; return where those of all will be, and what is under
        way.
        """
        sent_rows = []
        for total in own:
            numbers = torch.tensor([tensor is not None for tensor in total], dtype=torch.int32)
            sent_rows += [row.join([*total, numbers]).view(torch.uint8) for row in self._rows]
        world_size = len(self._subtrees)
        sent = torch.cat(sent_rows * world_size)
        counts = [len(subtrees) * self._row_bytes for subtrees in self._subtrees]
        received = sent.new_empty(sum(counts))
        work = dist.all_to_all_single(
            received,
            sent,
            counts,
            [len(own) * self._row_bytes] * world_size,
            async_op=True,
        )
        return received, work

    def add(
        self,
        coming: tuple[torch.Tensor, Any],
    ) -> tuple[dict[int, torch.Tensor], list[int]]:
        """Return the sums by place, and of all tensors, large ones too, in how many subtrees each
        is.

        Args:
            coming: what :meth:`send` has returned.
        """
        received, work = coming
        with waiting():
            work.wait()
        tree = TreeSum(add_tensors)
        every_row = received.view(-1, self._row_bytes).unbind()
        sizes = [row.row_bytes for row in self._rows]
        for place, (level, number) in self._in_order:
            parts = zip(torch.split(every_row[place], sizes), self._rows, strict=True)
            tree.push(number, [part.view(row.dtype) for part, row in parts], level)
        sums = dict(
            itertools.chain.from_iterable(
                row.tensors(total) for row, total in zip(self._rows, tree.total(), strict=True)
            )
        )
        present: list[int] = sums.pop(self._number_of_like).tolist()
        return sums, present


def _joined(
    rows: list[TensorRow],
    own: list[Any],
    sums: dict[int, torch.Tensor],
) -> Iterator[list[torch.Tensor]]:
    """Yield the rows of all subtrees; note where the sums of each tensor will be."""
    for row in rows:
        joined = [row.join(total) for total in own]
        sums.update(row.tensors(joined[0]))
        yield joined


def bytes_in_sums(
    sizes: Iterable[int],
    subtrees: int,
    ranks: int,
    *,
    is_on_cpu: bool,
) -> float:
    """Return how much memory :meth:`OrderedSum.over_ranks` takes beside what it is given.

    Args:
        sizes: bytes of the tensors.
        subtrees: of this rank.
        ranks: their number.
        is_on_cpu: where the tensors are.

    Ranks: local.

    Example:
        >>> bytes_in_sums([2**30, 2**10], 1, 2, is_on_cpu=True) == 4 * PIECE_BYTES + 2**10
        True
    """
    known = list(sizes)
    piece = PIECE_BYTES if is_on_cpu else BUCKET_BYTES
    copied = sum(size for size in known if size < piece / ALONE)
    if is_on_cpu and ranks <= MOST_PAIRED:
        return float(subtrees * min(sum(known), AHEAD * piece) + copied)
    row = min(sum(known), max(piece, *known))
    # of each subtree its row, once more all of them, what comes of them, and the sums
    return float((3 * subtrees + 1) * row + copied)


def _numbers(like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what tells in how many subtrees each tensor is."""
    return torch.zeros(len(like), dtype=torch.int32)
