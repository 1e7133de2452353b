"""A stopwatch on the host: which phase of a step takes how long."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddpkit.step_times.phases import (
    BACKWARD,
    DATA,
    EXCHANGE,
    FORWARD,
    MOVE,
    OTHER,
    PHASES,
)

if TYPE_CHECKING:
    from ddpkit.step_times.named_ranges import NamedRanges


class Stopwatch:
    """Divides the time of one step into its phases.

    Attributes:
        is_late: whether the times are known later, when another device has come to the end.
        is_host_bound: whether such a device had done all when the host came to the end.
        phase: the present one.
        seconds: of each phase so far, up to the last :meth:`switch`.

    Example:
        >>> watch = Stopwatch()
        >>> watch.switch("forward"), watch.switch("backward")
        ('data', 'forward')
        >>> watch.seconds["forward"] >= 0.0, watch.seconds["backward"]
        (True, 0.0)
    """

    is_late = False
    is_host_bound = False

    def __init__(self) -> None:
        self.phase = DATA
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._since = time.perf_counter()
        self._ranges: NamedRanges | None = None

    def mark(self, ranges: NamedRanges) -> None:
        """Mark the phases in a profiler's trace, too, from the present one on.

        Args:
            ranges: in the trace.
        """
        self._ranges = ranges
        ranges.begin(self.phase)

    def switch(self, phase: str) -> str:
        """End the present phase, and begin another.

        Args:
            phase: the next one.

        Returns:
            The one that has ended.
        """
        now = time.perf_counter()
        before = self.phase
        self.seconds[before] += now - self._since
        self._since = now
        self.phase = phase
        if self._ranges is not None:
            self._ranges.begin(phase)
        return before

    def note_call(self) -> None:
        """Note that a model is called: the forward pass begins."""
        if self.phase in {MOVE, OTHER}:
            self.switch(FORWARD)

    def begin_backward(self) -> None:
        """Note that a backward pass begins; what came before it was the forward pass, if no model
        was called.
        """
        if self.phase in {MOVE, OTHER}:
            self.phase = FORWARD
        self.switch(BACKWARD)

    def begin_wait(self) -> str:
        """Note that this rank waits for others; return the phase in which that is."""
        return self.switch(EXCHANGE)

    def end_wait(self, before: str) -> None:
        """Note that the wait is over.

        Args:
            before: what :meth:`begin_wait` has returned.
        """
        self.switch(before)

    def finish(self) -> None:
        """End the last phase, and with it the step."""
        self.switch(OTHER)

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase of a step that is finished."""
        return self.seconds
