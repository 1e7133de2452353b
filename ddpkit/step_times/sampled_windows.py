"""Which optimizer steps are measured: the same ones on all ranks, without asking each other."""

from __future__ import annotations

import math

#: At most about so many are measured between two syncs of the ranks, which is about a second.
MOST_PER_SYNC = 50

_NEVER = math.inf


class SampledWindows:
    """Chooses the steps by numbers that the ranks agree on: that of a batch, and of the batch of the next sync.

    Args:
        every: whether every step is measured, from the first sync of a pass on.

    Attributes:
        due: a step that begins after so many batches, or more, is measured.

    Ranks: local; equal on all ranks.

    Example:
        >>> chosen = SampledWindows(every=False)
        >>> chosen.plan(step=100, next_sync=600)
        >>> chosen.due
        105
        >>> chosen.begin(105); chosen.due
        115
    """

    def __init__(self, *, every: bool) -> None:
        self._every = every
        self._distance = 1
        self.due: float = _NEVER

    def start(self) -> None:
        """Begin a pass. Its first step waits for the loader to start, and is not measured."""
        self.due = _NEVER

    def plan(self, step: int, next_sync: int) -> None:
        """Choose the steps up to the next sync.

        Args:
            step: batches so far.
            next_sync: batches at the next sync.
        """
        batches = next_sync - step
        self._distance = 1 if self._every else max(1, math.ceil(batches / MOST_PER_SYNC))
        self.due = step + self._distance // 2

    def begin(self, step: int) -> None:
        """Note that a measured step begins.

        Args:
            step: batches before it.
        """
        self.due = step + self._distance
