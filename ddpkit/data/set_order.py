"""Which of several sets gives the sample at a position of an epoch, and which of its samples.

Both are computed where they are asked for: a position costs about the same wherever it is, and
nothing of an epoch is stored. They are a function of (seed, epoch, position), so that they do not
depend on the number of processes, and a run that goes on needs no state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ddpkit.data.plan import Order
from ddpkit.seed import mix_key

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 256  # positions that have each set in its proportion
CHUNK = 1024  # samples of a set whose order is computed at a time


class SetOrder:
    """Which set gives the sample at a position of an epoch, and how many it has given before.

    Each block of 256 positions has the sets in their proportions, to within two samples, in an
    order of its own. How many samples a set has in a block is found by halving the epoch again and
    again: the samples of a set are divided as the halves are, and rounding is drawn.

    Args:
        counts: samples of each set in the epoch.
        key: from which everything that is drawn follows.

    Ranks: local; alike on every rank.

    Example:
        >>> order = SetOrder([2, 3], key=1)
        >>> sorted(order.at(position) for position in range(5))
        [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    """

    def __init__(self, counts: Sequence[int], key: int) -> None:
        self.counts = list(counts)
        self.key = key
        self._block = -1
        self._sets: list[int] = []
        self._numbers: list[int] = []

    def at(self, position: int) -> tuple[int, int]:
        """Return the number of the set, and of its sample among those of this epoch."""
        block, place = divmod(position, BLOCK)
        if block != self._block:
            self._make(block)
        return self._sets[place], self._numbers[place]

    def _make(self, block: int) -> None:
        before, own = self._in_block(block)
        order = Order(sum(own), mix_key(self.key, block), 0)
        sorted_sets = np.repeat(np.arange(len(own)), own)
        sets = sorted_sets[order.at(np.arange(len(sorted_sets)))]
        numbers = np.zeros_like(sets)
        for number, (start, count) in enumerate(zip(before, own, strict=True)):
            numbers[sets == number] = np.arange(start, start + count)
        self._sets = sets.tolist()
        self._numbers = numbers.tolist()
        self._block = block

    def _in_block(self, block: int) -> tuple[list[int], list[int]]:
        """Return how many samples of each set come before a block, and how many are in it."""
        own = self.counts
        size = sum(own)
        before = [0] * len(own)
        first = 0
        last = -(-size // BLOCK)
        while last - first > 1:
            middle = (first + last) // 2
            left_size = (middle - first) * BLOCK
            left = divided(own, size, left_size, mix_key(self.key, first, last))
            if block < middle:
                own = left
                size = left_size
                last = middle
            else:
                before = [start + count for start, count in zip(before, left, strict=True)]
                own = [count - taken for count, taken in zip(own, left, strict=True)]
                size -= left_size
                first = middle
        return before, own


def divided(
    counts: Sequence[int],
    size: int,
    part: int,
    key: int,
) -> list[int]:
    """Return how many of each set are in the first ``part`` of ``size`` positions.

    Each number is the exact proportion, rounded down or up; which of both is drawn, so that it is
    exact in the mean.

    Example:
        >>> divided([2, 6], 8, 4, key=1)
        [1, 3]
    """
    # The remainders add up to a whole number of positions. A set gets one of them for each multiple
    # of `size` that its own stretch of their sum has passed, counted from a drawn start.
    passed = key % size
    found = []
    for count in counts:
        whole, remainder = divmod(count * part, size)
        found.append(whole + (passed + remainder) // size)
        passed = (passed + remainder) % size
    return found


class SetPasses:
    """The samples of one set, pass after pass; in each pass every sample comes once.

    Args:
        size: samples of the set.
        seed: of the orders.
        shuffle: whether each pass has an order of its own.

    Ranks: local; alike on every rank.

    Example:
        >>> passes = SetPasses(3, seed=1, shuffle=True)
        >>> drawn = [passes.sample(number) for number in range(6)]
        >>> sorted(drawn[:3]), sorted(drawn[3:])
        ([0, 1, 2], [0, 1, 2])
    """

    def __init__(
        self,
        size: int,
        seed: int,
        *,
        shuffle: bool,
    ) -> None:
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self._order: tuple[int, Order] | None = None
        self._known = (0, 0)
        self._chunk: list[int] = []

    def sample(self, number: int) -> int:
        """Return the index of the sample that comes as the ``number``-th of all passes."""
        if not self.shuffle:
            return number % self.size
        turn, place = divmod(number, self.size)
        start = place - place % CHUNK
        if not self._chunk or (turn, start) != self._known:
            if self._order is None or self._order[0] != turn:
                self._order = turn, Order(self.size, self.seed, turn)
            self._chunk = self._order[1].indices(start, min(start + CHUNK, self.size))
            self._known = turn, start
        return self._chunk[place - start]
