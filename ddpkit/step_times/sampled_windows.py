"""Which optimizer steps are measured: the same ones on all ranks, which need not ask each other."""

from __future__ import annotations

import math
import sys

#: At most about so many are measured in a second, in which the ranks sync once or more often.
MOST_PER_SECOND = 50

_NEVER = sys.maxsize


class SampledWindows:
    """Chooses the steps by numbers that the ranks agree on: that of a batch, and of the batch of
    the next sync.

    Args:
        every: whether every step is measured, from the first sync of a pass on.

    Attributes:
        due: a step that begins after so many batches, or more, is measured.
        every: as given; may be changed.

    Ranks: local; equal on all ranks.

    Example:
        >>> chosen = SampledWindows(every=False)
        >>> chosen.plan(step=100, next_sync=350, per_second=500)
        >>> chosen.due
        105
        >>> chosen.begin(105); chosen.due
        115
    """

    def __init__(self, *, every: bool) -> None:
        self.every = every
        self._distance = 1
        self.due = _NEVER
        self._next_sync = 0

    def start(self) -> None:
        """Begin a pass. Its first step waits for the loader to start, and is not measured."""
        self.due = _NEVER
        self._next_sync = 0

    def plan(
        self,
        step: int,
        next_sync: int,
        per_second: int,
    ) -> None:
        """Choose the steps up to the next sync.

        Args:
            step: batches so far.
            next_sync: batches at the next sync.
            per_second: batches in a second; at the beginning of a run more syncs come in it.
        """
        batches = max(next_sync - step, per_second)
        self._distance = 1 if self.every else max(1, math.ceil(batches / MOST_PER_SECOND))
        self.due = step + self._distance // 2
        self._next_sync = next_sync

    def unmeasured(self, step: int) -> int:
        """Return how many batches come before anything is due: a measured step, or a sync, which
        may choose others.

        Args:
            step: batches so far, none of a step that is measured.

        Example:
            >>> chosen = SampledWindows(every=False)
            >>> before = chosen.unmeasured(1)
            >>> chosen.plan(step=100, next_sync=350, per_second=500)
            >>> before, chosen.unmeasured(100), chosen.unmeasured(350)
            (0, 5, 0)
        """
        return max(min(self.due, self._next_sync) - step, 0)

    def begin(self, step: int) -> None:
        """Note that a measured step begins.

        Args:
            step: batches before it.
        """
        self.due = step + self._distance
