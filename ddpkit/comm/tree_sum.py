"""Sums over numbered parts whose additions follow one binary tree, whichever ranks hold which of
the parts.

Floating-point addition is not associative, so that a sum has the same bits only if the same pairs
are added. Here part ``2i`` is always added to part ``2i + 1``, the sum of both to that of the next
two, and so on, like a binary counter that counts up. A rank adds up what it has by itself:
consecutive parts come to a few *subtrees*, a single one where their number is a power of two. The
subtrees of all ranks are cut into one chunk for each rank, which adds it up in the order of the
tree: with one subtree per rank, as many bytes travel as in a ring all-reduce. Small subtrees go to
all ranks whole, in one message instead of several rounds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ddpkit.base import waiting
from ddpkit.comm.mailbox import control_group
from ddpkit.compat import add_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BUCKET_BYTES = 32 * 2**20  # sent at once, of each subtree
WHOLE_BYTES = 2**19  # of the subtrees of all ranks, which then go to every rank
ALIGNED_BYTES = 64  # vector kernels may add up a tensor in another order from another address on


class Subtree(NamedTuple):
    """The sum of the ``2 ** level`` parts from ``number * 2 ** level`` on.

    Attributes:
        level: 0 for a single part.
        number: among those of its level.
        total: the sum.

    Ranks: local.
    """

    level: int
    number: int
    total: Any


class TreeSum:
    """The subtrees that consecutive parts of a sum come to.

    Args:
        add: adds the right total to the left one; may write into both.

    Ranks: local.

    Example:
        >>> tree = TreeSum(lambda left, right: f"({left}+{right})")
        >>> for part in range(6):
        ...     tree.push(part, str(part))
        >>> [one.total for one in tree.subtrees], tree.total()
        (['((0+1)+(2+3))', '(4+5)'], '(((0+1)+(2+3))+(4+5))')
    """

    def __init__(self, add: Callable[[Any, Any], Any]) -> None:
        self.subtrees: list[Subtree] = []
        self._add = add

    def push(
        self,
        number: int,
        total: Any,
        level: int = 0,
    ) -> None:
        """Take in the next part, or the next subtree of a level."""
        while number % 2 and self.subtrees and self.subtrees[-1][:2] == (level, number - 1):
            total = self._add(self.subtrees.pop().total, total)
            level = level + 1
            number = number // 2
        self.subtrees.append(Subtree(level, number, total))

    def total(self) -> Any:
        """Return the sum of all parts; there must be one."""
        *left, (_, _, total) = self.subtrees
        for subtree in reversed(left):
            total = self._add(subtree.total, total)
        return total


def add_tensors(
    left: list[torch.Tensor | None],
    right: list[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Add tensors in pairs, in place; None counts as zeros.

    Args:
        left: written into.
        right: as many; may be written into where the left one is None.

    Ranks: local.

    Example:
        >>> add_tensors([torch.ones(1), None, None], [torch.ones(1), torch.ones(1), None])
        [tensor([2.]), tensor([1.]), None]
    """
    pairs = [
        (first, second)
        for first, second in zip(left, right, strict=True)
        if first is not None and second is not None
    ]
    if pairs:
        add_all([first for first, _ in pairs], [second for _, second in pairs])
    total = list(left)
    for place, (first, second) in enumerate(zip(left, right, strict=True)):
        if first is None or second is None:
            alone = first if second is None else second
            # as if zeros were added: -0.0 becomes 0.0
            total[place] = alone if alone is None else alone.add_(0.0)
    return total


class OrderedSum:
    """Adds up lists of tensors over all ranks, in the order of the tree over all parts.

    Args:
        like: the shapes, dtypes and devices of a part's tensors.
        parts: their number over all ranks, a multiple of the number of ranks. Rank ``r`` of ``W``
            has the parts from ``r * parts / W`` on.
        in_turns: whether it has ``r``, ``r + W`` and so on instead.
        bucket_bytes: how much of a subtree is sent at once; changes no bit of the sums.
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
        bucket_bytes: int = BUCKET_BYTES,
        whole_bytes: int = WHOLE_BYTES,
        *,
        in_turns: bool = False,
    ) -> None:
        self.world_size = (
            dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        )
        self._like, self._bucket_bytes, each = like, bucket_bytes, parts // self.world_size
        self._subtrees = [
            subtrees_of(
                range(rank, parts, self.world_size)
                if in_turns
                else range(rank * each, (rank + 1) * each)
            )
            for rank in range(self.world_size)
        ]
        every_subtree = list(itertools.chain.from_iterable(self._subtrees))
        # where each is among those of all ranks, and its level and number; in the order of the tree
        self._in_order = sorted(
            enumerate(every_subtree),
            key=lambda one: one[1][1] << one[1][0],
        )
        self._known: dict[tuple[int, ...], list[_Bucket]] = {}  # by which tensors are there
        numbers = torch.zeros(len(like), dtype=torch.int64)  # how many subtrees have each tensor
        every = [*like, numbers]
        places = _divided(every, list(range(len(every))), bucket_bytes)
        self._whole = [_Bucket([every[place] for place in those], those, 1) for those in places]
        self._row_bytes = sum(bucket.row_bytes for bucket in self._whole)
        sent = self._row_bytes * sum(map(len, self._subtrees))
        self._is_sent_whole = sent <= whole_bytes and all(tensor.is_cpu for tensor in like)

    def over_ranks(self, tree: TreeSum) -> list[torch.Tensor | None]:
        """Return the sums, the same bits on any number of ranks; None where no part has a tensor.

        Args:
            tree: this rank's parts: lists of tensors and None, added by :func:`add_tensors`.

        Ranks: collective.
        """
        if self.world_size == 1:
            found: list[torch.Tensor | None] = tree.total()
            return found
        own = [subtree.total for subtree in tree.subtrees]
        sums = list[Any]([None] * len(self._like))
        if self._is_sent_whole:
            return self._add_whole(own)
        is_there = [
            any(tensor is not None for tensor in column) for column in zip(*own, strict=True)
        ]
        # in host memory: a GPU would be waited for
        present = torch.tensor(is_there, dtype=torch.uint8)
        with waiting():
            dist.all_reduce(
                present,
                dist.ReduceOp.MAX,
                group=None if self._like[0].is_cpu else control_group(),
            )
        for bucket in self._buckets(tuple(present.tolist())):
            for place, added in bucket.tensors(
                self._add([bucket.row(total) for total in own], bucket)
            ):
                sums[place] = added.view(self._like[place].shape)
        return sums

    def _add_whole(
        self,
        totals: list[list[torch.Tensor | None]],
    ) -> list[torch.Tensor | None]:
        """Send this rank's subtrees to every rank, and add up all of them here."""
        rows = []
        for total in totals:
            numbers = torch.tensor([tensor is not None for tensor in total], dtype=torch.int64)
            rows += [bucket.row([*total, numbers]).view(torch.uint8) for bucket in self._whole]
        sent = torch.cat(rows * self.world_size)
        row_bytes = self._row_bytes
        counts = [len(subtrees) * row_bytes for subtrees in self._subtrees]
        received = sent.new_empty(sum(counts))
        with waiting():
            dist.all_to_all_single(
                received,
                sent,
                counts,
                [len(totals) * row_bytes] * self.world_size,
            )
        tree = TreeSum(add_tensors)
        every_row = received.view(-1, row_bytes).unbind()
        for place, (level, number) in self._in_order:
            parts = zip(
                torch.split(every_row[place], [bucket.row_bytes for bucket in self._whole]),
                self._whole,
                strict=True,
            )
            tree.push(
                number,
                [part.view(bucket.dtype) for part, bucket in parts],
                level,
            )
        sums = zip(self._whole, tree.total(), strict=True)
        added = dict(itertools.chain.from_iterable(bucket.tensors(row) for bucket, row in sums))
        numbers = added.pop(len(self._like))
        found = (added[place].view(tensor.shape) for place, tensor in enumerate(self._like))
        return [
            tensor if number else None
            for tensor, number in zip(found, numbers.tolist(), strict=True)
        ]

    def _buckets(self, present: tuple[int, ...]) -> list[_Bucket]:
        if present not in self._known:
            places = [place for place, is_there in enumerate(present) if is_there]
            self._known[present] = [
                _Bucket(
                    [self._like[place] for place in those],
                    those,
                    self.world_size,
                )
                for those in _divided(self._like, places, self._bucket_bytes)
            ]
        return self._known[present]

    def _add(self, rows: list[torch.Tensor], bucket: _Bucket) -> torch.Tensor:
        """Send the chunks of every rank's subtrees to the rank that adds them up, and the sums
        back.
        """
        number = len(rows)
        world_size = self.world_size
        chunk = bucket.chunk
        sent = (
            rows[0]
            if number == 1
            else torch.cat([row.view(world_size, chunk) for row in rows], 1).view(-1)
        )
        counts = [len(subtrees) * chunk for subtrees in self._subtrees]
        received = sent.new_empty(sum(counts))
        item = sent.element_size()  # bytes travel: not every backend knows every dtype
        with waiting():
            dist.all_to_all_single(
                received.view(torch.uint8),
                sent.view(torch.uint8),
                [count * item for count in counts],
                [number * chunk * item] * world_size,
            )
        tree = TreeSum(torch.Tensor.add_)
        every_part = received.view(-1, chunk).unbind()
        for place, (level, subtree) in self._in_order:
            tree.push(subtree, every_part[place], level)
        joined = sent.new_empty(world_size * chunk)
        own_sum = tree.total().contiguous()
        with waiting():
            dist.all_gather(
                list(joined.view(torch.uint8).chunk(world_size)),
                own_sum.view(torch.uint8),
            )
        return joined


class _Bucket:
    """Tensors of one dtype that are sent together in a row, each from where a tensor of its own
    could begin.
    """

    def __init__(
        self,
        like: list[torch.Tensor],
        places: list[int],
        world_size: int,
    ) -> None:
        self.places = places
        self.sizes = [tensor.numel() for tensor in like]
        self._first = like[0]
        unit = ALIGNED_BYTES // like[0].element_size()
        padded = [-(-size // unit) * unit for size in self.sizes]
        self.chunk = max(1, -(-sum(padded) // (world_size * unit))) * unit
        self.padded = [*padded, self.chunk * world_size - sum(padded)]
        self.dtype = like[0].dtype
        self.row_bytes = self.chunk * world_size * like[0].element_size()

    def row(self, total: list[torch.Tensor | None]) -> torch.Tensor:
        """Join the tensors of a total; zeros for one that is not there."""
        zeros = self._first.new_zeros(max(self.padded))
        parts = []
        for place, size, padded in zip(self.places, self.sizes, self.padded, strict=False):
            own = total[place]
            parts += [zeros[:size] if own is None else own.reshape(-1), zeros[: padded - size]]
        return torch.cat([*parts, zeros[: self.padded[-1]]])

    def tensors(self, row: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the place and the numbers of each tensor in a row."""
        for place, size, padded in zip(
            self.places,
            self.sizes,
            torch.split(row, self.padded),
            strict=False,
        ):
            yield place, padded[:size]


def subtrees_of(parts: range) -> list[tuple[int, int]]:
    """Return level and number of the subtrees that some parts come to.

    Args:
        parts: in the order in which they come.

    Ranks: local.

    Example:
        >>> subtrees_of(range(6)), subtrees_of(range(1, 6, 2))
        ([(2, 0), (1, 2)], [(0, 1), (0, 3), (0, 5)])
    """
    tree = TreeSum(lambda *_: None)
    for part in parts:
        tree.push(part, None)
    return [(subtree.level, subtree.number) for subtree in tree.subtrees]


def _divided(
    like: Sequence[torch.Tensor],
    places: list[int],
    most: int,
) -> Iterator[list[int]]:
    """Yield the places of tensors that are sent together: of one dtype, and not many bytes but for
    a large tensor.
    """
    open_buckets: dict[Any, tuple[int, list[int]]] = defaultdict(lambda: (0, []))
    for place in places:
        key = like[place].dtype, like[place].device
        size, those = open_buckets[key]
        size += like[place].numel() * like[place].element_size()
        open_buckets[key] = size, [*those, place]
        if size >= most:
            yield open_buckets.pop(key)[1]
    yield from (those for _, those in open_buckets.values())
