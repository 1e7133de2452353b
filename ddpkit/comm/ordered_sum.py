"""Sums of lists of tensors over all ranks, in the order of one tree
(:mod:`ddpkit.comm.tree_sum`).

Small tensors go to every rank, in one message that also tells which of the tensors a rank has at
all. Large ones are cut into one chunk for each rank, which adds it up and gives the sum to the
others: by pairs of messages between few ranks on CPUs (:mod:`ddpkit.comm.piece_sums`), else by two
collectives (:mod:`ddpkit.comm.chunk_sums`).

Large ones that were there in the step before can be given as soon as they are computed: their sums
then begin while others are computed (:mod:`ddpkit.comm.rows_under_way`).
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
from ddpkit.comm.rows_under_way import RowsUnderWay
from ddpkit.comm.tensor_rows import ALONE, TensorRow, padded_size, rows_of
from ddpkit.comm.tree_sum import TreeSum, add_tensors, subtrees_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
        epoch: the same number on all ranks, and another one than that of other sums: messages that
            an error has left undone are not taken for those of these.
        piece_bytes: how much of a subtree is sent at once; changes no bit of the sums. None: what
            suits the device.
        whole_bytes: up to how much of all subtrees goes to every rank, in host memory; changes no
            bit either. None: what is quick.

    Attributes:
        like: as given.
        large_places: of the tensors whose sums may begin before the others are there.
        early_places: of those among them whose sums may in this step: of those that were there in
            the step before.

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
        whole_bytes: int | None = None,
        *,
        in_turns: bool = False,
        epoch: int = 0,
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
        self.like = like
        self._is_on_cpu = all(tensor.is_cpu for tensor in like)
        if piece_bytes is None:
            piece_bytes = PIECE_BYTES if self._is_on_cpu else BUCKET_BYTES
        self._piece_bytes = piece_bytes
        if whole_bytes is None:
            whole_bytes = WHOLE_BYTES
        in_pairs = self._is_on_cpu and self.world_size <= MOST_PAIRED
        # what comes in a backward pass takes no more memory than one more copy of all tensors
        pieces = sum(-(-tensor.nbytes // piece_bytes) for tensor in like)
        most_ahead = max(AHEAD, pieces // max(map(len, subtrees)))
        self._sums_of_rows: PieceSums | ChunkSums = (
            PieceSums(subtrees, piece_bytes, most_ahead, epoch)
            if in_pairs
            else ChunkSums(subtrees, like[0].device if like else torch.device("cpu"))
        )
        small = self._small_places(whole_bytes // sum(map(len, subtrees)))
        self._whole = _WholeSums(like, small, subtrees) if small else None
        # backward passes compute the last ones first
        self._large = [place for place in reversed(range(len(like))) if place not in set(small)]
        self._known: dict[tuple[int, ...], list[TensorRow]] = {}  # by which tensors are there
        may_begin = self.world_size > 1 and self._sums_of_rows.begins_early
        # a small one would cost as much of Python as a large one
        self.large_places = [place for place in self._large if may_begin and self._is_alone(place)]
        self.early_places: tuple[int, ...] = ()
        self._under_way: RowsUnderWay | None = None

    def give_early(
        self,
        tree: TreeSum,
        number: int,
        place: int,
        tensor: torch.Tensor,
    ) -> None:
        """Begin the sum of one tensor of the last part, before the others are there.

        Args:
            tree: this rank's parts but the last, whose tensor at that place is taken out of it.
            number: of the last part, which has None at that place when it is pushed.
            place: one of :attr:`early_places`.
            tensor: may be written into.

        Ranks: local: it does not wait for the others.
        """
        column = tree.take_column(place)
        column.push(number, [tensor])
        if self._under_way is None:
            self._under_way = self._begin()
        self._under_way.add_column(place, [subtree.total[0] for subtree in column.subtrees])

    def has_early(self, place: int) -> bool:
        """Say whether a tensor was given early in this step."""
        return self._under_way is not None and place in self._under_way.columns

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
        under_way = self._under_way or self._begin()
        self._under_way = None
        own = [subtree.total for subtree in tree.subtrees]
        for place, column in under_way.columns.items():
            for total, tensor in zip(own, column, strict=True):
                total[place] = tensor
        small: dict[int, torch.Tensor] = {}
        if self._whole is None:
            present = self._agree(own)
            self._finish(under_way, own, present)
        elif self._has_every_large_one(own):
            # what others have decides nothing about the large ones, so they need not wait for it
            coming = self._whole.send(own)
            self._finish(under_way, own, None)
            small, present = self._whole.add(coming)
        else:
            small, present = self._whole.add(self._whole.send(own))
            self._finish(under_way, own, present)
        self.early_places = tuple(place for place in self.large_places if present[place])
        sums = under_way.sums | small
        return [
            sums[place].view(tensor.shape) if present[place] else None
            for place, tensor in enumerate(self.like)
        ]

    def _has_every_large_one(self, own: list[Any]) -> bool:
        return all(any(total[place] is not None for total in own) for place in self._large)

    def _begin(self) -> RowsUnderWay:
        """Return what takes the rows of this step: first those of the step before."""
        return RowsUnderWay(self._rows(self.early_places), self._sums_of_rows.begin())

    def _finish(
        self,
        under_way: RowsUnderWay,
        own: list[Any],
        present: list[int] | None,
    ) -> None:
        """Add up the large tensors, of those that are present.

        Args:
            under_way: has begun.
            own: this rank's subtrees.
            present: of each tensor whether any rank has it; None: all are.
        """

        def is_present(place: int) -> bool:
            return present is None or bool(present[place])

        others = [
            place for place in self._large if is_present(place) and not under_way.is_expected(place)
        ]
        under_way.finish(own, self._rows(tuple(others)), is_present)

    def _small_places(self, most: int) -> list[int]:
        """Return the places of the smallest tensors, so many that a subtree's message has at most
        so many bytes.
        """
        if not self._is_on_cpu:
            return []
        bytes_each = [padded_size(tensor) * tensor.element_size() for tensor in self.like]
        by_size = sorted(range(len(self.like)), key=bytes_each.__getitem__)
        left = most - padded_size(_numbers(self.like)) * _numbers(self.like).element_size()
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

    def _is_alone(self, place: int) -> bool:
        """Say whether a tensor is a row by itself."""
        return self.like[place].nbytes >= self._piece_bytes / ALONE

    def _rows(self, places: tuple[int, ...]) -> list[TensorRow]:
        if places not in self._known:
            self._known[places] = list(rows_of(self.like, places, self._piece_bytes))
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


def bytes_in_sums(
    sizes: Iterable[int],
    subtrees: int,
    ranks: int,
    *,
    is_on_cpu: bool,
) -> float:
    """Return how much memory an :class:`OrderedSum` takes beside what it is given, in a backward
    pass and after it.

    Args:
        sizes: bytes of the tensors.
        subtrees: of this rank.
        ranks: their number.
        is_on_cpu: where the tensors are.

    Ranks: local.

    Example:
        >>> bytes_in_sums([2**30, 2**10], 1, 2, is_on_cpu=True) == 2**29 + 1.5 * 2**10
        True
    """
    known = list(sizes)
    piece = PIECE_BYTES if is_on_cpu else BUCKET_BYTES
    copied = sum(size for size in known if size < piece / ALONE)
    total = sum(known)
    if is_on_cpu and ranks <= MOST_PAIRED:
        coming = min(subtrees * total, max(subtrees * AHEAD * piece, total))
        return coming * (ranks - 1) / ranks + copied
    row = min(total, max(piece, *known))
    # of each subtree its row, once more all of them, what comes of them, and the sums
    return float((3 * subtrees + 1) * row + copied)


def _numbers(like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what tells in how many subtrees each tensor is."""
    return torch.zeros(len(like), dtype=torch.int32)
