"""Sums over numbered parts whose additions follow one binary tree, whichever ranks hold which of
the parts.

Floating-point addition is not associative, so that a sum has the same bits only if the same pairs
are added. Here part ``2i`` is always added to part ``2i + 1``, the sum of both to that of the next
two, and so on, like a binary counter that counts up. A rank adds up what it has by itself:
consecutive parts come to a few *subtrees*, a single one where their number is a power of two. How
the subtrees of several ranks are added up, :mod:`ddpkit.comm.ordered_sum` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ddpkit.compat import add_all

if TYPE_CHECKING:
    from collections.abc import Callable


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

    def take_column(self, place: int) -> TreeSum:
        """Return the tree of one entry of totals that are lists, and leave None in its place.

        Args:
            place: of the entry in each list.
        """
        column = TreeSum(self._add)
        for level, number, total in self.subtrees:
            column.subtrees.append(Subtree(level, number, [total[place]]))
            total[place] = None
        return column

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
