"""The epoch counters of the calls of ``fit``: which of them counts the epochs that run now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpkit.epoch_loop import EpochCounter


class FitCounters:
    """Tells the counters of earlier calls of ``fit`` that the present epochs are not theirs.

    A checkpoint from the middle of an epoch holds all counters. Only the one that counts that epoch
    has to do it again.

    Ranks: local; alike on every rank.

    Example:
        >>> counters, first, second = FitCounters(), EpochCounter(2), EpochCounter(3)
        >>> counters.begin(first)
        >>> counters.begin(second)
    """

    def __init__(self) -> None:
        self._known: list[EpochCounter] = []

    def begin(self, epoch_counter: Any) -> None:
        """Note what a call of ``fit`` counts with.

        Args:
            epoch_counter: as ``fit`` was given it. What is neither a counter nor a sequence may
                count with any of them inside: then all of them count as running.
        """
        is_counter = isinstance(epoch_counter, EpochCounter)
        is_wrapper = not is_counter and not isinstance(epoch_counter, Sequence)
        if is_counter and all(counter is not epoch_counter for counter in self._known):
            self._known.append(epoch_counter)
        for counter in self._known:
            counter.note_running(is_running=is_wrapper or counter is epoch_counter)
