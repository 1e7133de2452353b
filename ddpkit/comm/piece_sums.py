"""Rows of numbers that are added up over the ranks in the order of the tree, piece by piece and in
place.

A piece has a chunk for each rank. A rank gets its chunk of the subtrees of all others, adds them up
in the order of the tree, and sends the sum to each of them: with one subtree per rank, as many
bytes travel as in a ring all-reduce. Numbers are sent from where they are, and sums arrive where
they stay. The next pieces are under way meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ddpkit.base import waiting, waits_for_ranks
from ddpkit.comm.tensor_rows import ALIGNED_BYTES
from ddpkit.comm.tree_sum import TreeSum

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

AHEAD = 4  # pieces under way
# Messages of a recipe's own, and of what an error has left undone, have other tags: each of so many
# epochs has a range, which holds the messages of a step.
FIRST_TAG = 2**30
TAGS_OF_EPOCH = 2**20
EPOCHS = 512


class _Piece(NamedTuple):
    """A piece of each of this rank's subtrees, of which those of the other ranks are to come.

    Attributes:
        parts: the piece, of each of this rank's subtrees; the first is given the sums.
        bounds: where each rank's chunk begins, and the last ends.
        came: of every subtree, by rank and place there: this rank's chunk of it.
        works: what is under way.
        tag: the first of the piece's own, by which messages of one rank are told apart.
    """

    parts: list[torch.Tensor]
    bounds: list[int]
    came: dict[tuple[int, int], torch.Tensor]
    works: list[Any]
    tag: int

    def chunk(self, part: torch.Tensor, rank: int) -> torch.Tensor:
        """Return what of a part a rank adds up."""
        return part[self.bounds[rank] : self.bounds[rank + 1]]


class PieceSums:
    """Adds up rows of numbers over all ranks, in place.

    Args:
        subtrees: level and number of the subtrees of each rank.
        piece_bytes: how much of each subtree is sent at once; changes no bit of the sums.
        most_ahead: how many pieces are under way in a backward pass.
        epoch: the same number on all ranks, and another one than at other times.

    Ranks: local; what :meth:`begin` returns is collective.

    Example:
        >>> PieceSums([[(0, 0)], [(0, 1)]], 2**20).piece_bytes
        1048576
    """

    begins_early = True

    def __init__(
        self,
        subtrees: Sequence[Sequence[tuple[int, int]]],
        piece_bytes: int,
        most_ahead: int = AHEAD,
        epoch: int = 0,
    ) -> None:
        self.piece_bytes = piece_bytes
        self.most_ahead = most_ahead
        self.first_tag = FIRST_TAG + epoch % EPOCHS * TAGS_OF_EPOCH
        self.subtrees = subtrees
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        # whose each is, and its place, level and number; in the order of the tree
        self.in_order = sorted(
            (
                (rank, place, level, number)
                for rank, those in enumerate(subtrees)
                for place, (level, number) in enumerate(those)
            ),
            key=lambda one: one[3] << one[2],
        )

    def begin(self) -> PiecesUnderWay:
        """Return what takes the rows of a step."""
        return PiecesUnderWay(self)


class PiecesUnderWay:
    """The rows of a step, whose sums are written into them.

    Args:
        sums: whose ranks and pieces these are.

    Ranks: collective: each rank pushes rows of the same sizes and dtypes, in the same order.
    """

    def __init__(self, sums: PieceSums) -> None:
        self._sums = sums
        self._coming: deque[_Piece] = deque()
        self._returning: list[Any] = []
        self._number = 0

    def has_room(self, row_bytes: int) -> bool:
        """Say whether a row can be pushed without a wait for another rank."""
        pieces = max(1, -(-row_bytes // self._sums.piece_bytes))
        return len(self._coming) + pieces <= self._sums.most_ahead

    def push(self, parts: Sequence[torch.Tensor], *, may_wait: bool) -> None:
        """Send a row.

        Args:
            parts: what is added up together: a row for each of this rank's subtrees, of shape
                ``(N,)``. The first is given the sums, and the others are used up.
            may_wait: whether earlier ones are awaited, so that few are under way.
        """
        # a message for each subtree, and one for the sum
        tags = 1 + max(map(len, self._sums.subtrees))
        size = self._sums.piece_bytes // parts[0].element_size()
        pieces = (torch.split(row, size) for row in parts if len(row))
        for each in zip(*pieces, strict=True):
            while may_wait and len(self._coming) >= AHEAD:
                self._send_next_sum()
            tag = self._sums.first_tag + self._number * tags % TAGS_OF_EPOCH
            self._coming.append(self._send_parts(list(each), tag))
            self._number += 1

    def finish(self) -> None:
        """Wait until all sums are there."""
        while self._coming:
            self._send_next_sum()
        _wait_for(self._returning)
        self._returning = []

    def _others(self) -> Iterator[int]:
        """Yield the other ranks, on each rank from another one on."""
        world_size = len(self._sums.subtrees)
        return ((self._sums.rank + step) % world_size for step in range(1, world_size))

    def _send_parts(self, parts: list[torch.Tensor], tag: int) -> _Piece:
        """Send each rank its chunk of this rank's subtrees."""
        rank = self._sums.rank
        world_size = len(self._sums.subtrees)
        size = len(parts[0])
        unit = max(1, ALIGNED_BYTES // parts[0].element_size())
        units = -(-size // (world_size * unit))
        each = units * unit
        bounds = [min(size, each * number) for number in range(world_size + 1)]
        piece = _Piece(parts, bounds, {}, [], tag)
        transfers = []
        for other in self._others():
            for place, part in enumerate(parts):
                chunk = piece.chunk(part, other)
                transfers += _transfer(dist.isend, chunk, other, tag + place)
            for place in range(len(self._sums.subtrees[other])):
                received = torch.empty_like(piece.chunk(parts[0], rank))
                piece.came[other, place] = received
                transfers += _transfer(dist.irecv, received, other, tag + place)
        for place, part in enumerate(parts):
            piece.came[rank, place] = piece.chunk(part, rank)
        piece.works.extend(dist.batch_isend_irecv(transfers))
        return piece

    def _send_next_sum(self) -> None:
        """Add up this rank's chunk of the oldest piece, and send the sum to each rank."""
        piece = self._coming.popleft()
        _wait_for(piece.works)
        own = piece.came[self._sums.rank, 0]

        def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            # a sum of two numbers has the same bits in either order
            return right.add_(left) if right is own else left.add_(right)

        tree = TreeSum(add)
        for rank, place, level, number in self._sums.in_order:
            tree.push(number, piece.came[rank, place], level)
        tree.total()  # is written into `own`, which takes part in the last addition
        transfers = []
        tag = piece.tag + max(map(len, self._sums.subtrees))
        for other in self._others():
            chunk = piece.chunk(piece.parts[0], other)
            transfers += _transfer(dist.isend, own, other, tag)
            transfers += _transfer(dist.irecv, chunk, other, tag)
        self._returning += dist.batch_isend_irecv(transfers)


def _transfer(operation: Any, tensor: torch.Tensor, other: int, tag: int) -> list[Any]:
    """Return one message, or none where there is nothing to send."""
    if not len(tensor):
        return []
    # bytes travel: not every backend knows every dtype
    return [dist.P2POp(operation, tensor.view(torch.uint8), other, tag=tag)]


@waits_for_ranks
def _wait_for(works: Iterable[Any]) -> None:
    with waiting():
        for work in works:
            work.wait()
