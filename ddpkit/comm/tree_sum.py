"""Sums over numbered parts whose additions follow one binary tree, whichever ranks hold which of the parts.

Floating-point addition is not associative, so that a sum has the same bits only if the same pairs are added. Here part
``2i`` is always added to part ``2i + 1``, the sum of both to that of the next two, and so on, like a binary counter
that counts up. A rank adds up what it has by itself: consecutive parts come to a few *subtrees*, a single one where
their number is a power of two. The subtrees of all ranks are cut into one chunk for each rank, which adds it up in the
order of the tree: with one subtree per rank, as many bytes travel as in a ring all-reduce.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ddpkit.compat import add_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BUCKET_BYTES = 32 * 2**20  # sent at once, of each subtree


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

    def push(self, number: int, total: Any, level: int = 0) -> None:
        """Take in the next part, or the next subtree of a level."""
        while number % 2 and self.subtrees and self.subtrees[-1][:2] == (level, number - 1):
            total = self._add(self.subtrees.pop().total, total)
            level, number = level + 1, number // 2
        self.subtrees.append(Subtree(level, number, total))

    def total(self) -> Any:
        """Return the sum of all parts; there must be one."""
        *left, (_, _, total) = self.subtrees
        for one in reversed(left):
            total = self._add(one.total, total)
        return total


def add_tensors(left: list[torch.Tensor | None], right: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Add tensors in pairs, in place; None counts as zeros.

    Args:
        left: written into.
        right: as many; may be written into where the left one is None.

    Ranks: local.

    Example:
        >>> add_tensors([torch.ones(1), None, None], [torch.ones(1), torch.ones(1), None])
        [tensor([2.]), tensor([1.]), None]
    """
    pairs = [(one, other) for one, other in zip(left, right, strict=True) if one is not None and other is not None]
    if pairs:
        add_all([one for one, _ in pairs], [other for _, other in pairs])
    total = list(left)
    for place, (one, other) in enumerate(zip(left, right, strict=True)):
        if one is None or other is None:
            alone = one if other is None else other
            total[place] = alone if alone is None else alone.add_(0.0)  # as if zeros were added: -0.0 becomes 0.0
    return total


def sum_over_ranks_in_order(
    tree: TreeSum, parts: int, like: Sequence[torch.Tensor], bucket_bytes: int = BUCKET_BYTES
) -> list[torch.Tensor | None]:
    """Add up lists of tensors over all ranks, in the order of the tree over all parts.

    Args:
        tree: this rank's parts: lists of tensors and None, added by :func:`add_tensors`. Rank ``r`` of ``W`` has the
            parts from ``r * parts / W`` on.
        parts: their number over all ranks, a multiple of the number of ranks.
        like: the shapes, dtypes and devices of a part's tensors.
        bucket_bytes: how much of a subtree is sent at once; changes no bit of the sums.

    Returns:
        The sums, the same bits on any number of ranks; None where no part has a tensor.

    Ranks: collective.

    Example:
        >>> tree = TreeSum(add_tensors)
        >>> tree.push(0, [torch.ones(1)]); tree.push(1, [torch.ones(1)])
        >>> sum_over_ranks_in_order(tree, 2, [torch.ones(1)])
        [tensor([2.])]
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        found: list[torch.Tensor | None] = tree.total()
        return found
    own = [one.total for one in tree.subtrees]
    is_full = all(tensor is not None for total in own for tensor in total)
    present = [torch.tensor([float(one is not None) for one in total]).to(like[0].device) for total in own]
    own, like = [[*total, one] for total, one in zip(own, present, strict=True)], [*like, present[0]]
    exchange, sums = _Exchange(parts, dist.get_world_size()), list[Any](like)
    for places in _buckets(like, bucket_bytes):
        added = exchange.add([[total[place] for place in places] for total in own], [like[place] for place in places])
        for place, tensor in zip(places, added, strict=True):
            sums[place] = tensor
    *sums, counts = sums
    return sums if is_full else [one if count else None for one, count in zip(sums, counts.tolist(), strict=True)]


def _buckets(like: Sequence[torch.Tensor], most: int) -> Iterator[list[int]]:
    """Yield the places of tensors that are sent together: of one dtype, and not many bytes but for a large tensor."""
    open_buckets: dict[Any, tuple[int, list[int]]] = defaultdict(lambda: (0, []))
    for place, tensor in enumerate(like):
        key = tensor.dtype, tensor.device
        size, places = open_buckets[key]
        size += tensor.numel() * tensor.element_size()
        open_buckets[key] = size, [*places, place]
        if size >= most:
            yield open_buckets.pop(key)[1]
    yield from (places for _, places in open_buckets.values())


class _Exchange:
    """Sends the chunks of every rank's subtrees to the rank that adds them up, and the sums back."""

    def __init__(self, parts: int, world_size: int) -> None:
        self.world_size, self.shapes = world_size, []
        each = parts // world_size
        for rank in range(world_size):
            tree = TreeSum(lambda *_: None)
            for part in range(rank * each, (rank + 1) * each):
                tree.push(part, None)
            self.shapes.append([(one.level, one.number) for one in tree.subtrees])

    def add(self, totals: list[list[torch.Tensor | None]], like: list[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [one.numel() for one in like]
        chunk = -(-sum(sizes) // self.world_size)
        padding = like[0].new_zeros(chunk * self.world_size - sum(sizes))
        flat = []
        for total in totals:
            pairs = zip(total, like, strict=True)
            rows = [one.new_zeros(one.numel()) if own is None else own.reshape(-1) for own, one in pairs]
            flat.append(torch.cat([*rows, padding]))
        sent = torch.stack(flat).view(len(flat), self.world_size, chunk).transpose(0, 1).reshape(-1)
        counts = [len(shapes) * chunk for shapes in self.shapes]
        received = sent.new_empty(sum(counts))
        item = sent.element_size()  # bytes travel: not every backend knows every dtype
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [count * item for count in counts],
            [len(flat) * chunk * item] * self.world_size,
        )
        tree = TreeSum(torch.Tensor.add_)
        shapes = (shape for shapes in self.shapes for shape in shapes)
        for (level, number), part in zip(shapes, received.view(-1, chunk).unbind(), strict=True):
            tree.push(number, part, level)
        joined = sent.new_empty(self.world_size * chunk)
        own_sum = tree.total().contiguous()
        dist.all_gather(list(joined.view(torch.uint8).chunk(self.world_size)), own_sum.view(torch.uint8))
        parts = torch.split(joined[: sum(sizes)], sizes)
        return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]
