"""The phases of steps as named ranges in the trace of a torch profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerAction, record_function

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What the names begin with, so that they are found in a trace.
RANGE = "ddpkit: "

_RECORDS = {ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE}


class NamedRanges:
    """Marks the present phase of a step in a profiler's trace, while it records; otherwise it only
    remembers the phase.

    Args:
        once: whether the profiler records once and never again.

    Attributes:
        is_over: whether the profiler has recorded, and will not again.

    Source: https://docs.pytorch.org/docs/stable/profiler.html#torch.profiler.record_function

    Example:
        >>> from torch.profiler import profile, schedule
        >>> ranges = NamedRanges(once=True)
        >>> with profile(schedule=schedule(wait=0, warmup=1, active=1, repeat=1)) as profiler:
        ...     for _ in range(2):
        ...         ranges.begin("forward")
        ...         ranges.step(profiler)
        ...     ranges.end()
        >>> {one.name for one in profiler.events() if one.name.startswith(RANGE)}, ranges.is_over
        ({'ddpkit: forward'}, True)
    """

    def __init__(self, *, once: bool) -> None:
        self.is_over = False
        self._once = once
        self._phase = ""
        self._is_on = False
        self._range: Any = None

    def begin(self, phase: str) -> None:
        """Note that a phase begins, and the one before it ends.

        Args:
            phase: of :data:`~ddpkit.step_times.phases.PHASES`.
        """
        self._phase = phase
        if self._is_on:
            self._close()
            self._open()

    def end(self) -> None:
        """Note that the present phase ends, and no other begins."""
        self._phase = ""
        self._close()

    def start(self, profiler: Any) -> None:
        """Note whether a profiler records now.

        Args:
            profiler: of torch's, ``current_action`` tells whether it records; another records
                nothing.
        """
        self._is_on = getattr(profiler, "current_action", None) in _RECORDS
        if self._is_on and self._phase:
            self._open()

    def step(self, profiler: Any) -> None:
        """Tell a profiler that a batch is over: what it records of a step lies between two such
        calls.

        Args:
            profiler: has ``step``; else as for :meth:`start`.
        """
        before = self._is_on
        self._close()
        profiler.step()
        self.start(profiler)
        self.is_over = self._once and before and not self._is_on

    def follow(
        self,
        profiler: Any,
        left_out: int,
        batches: Iterator[Any],
    ) -> Iterator[Any]:
        """Tell a profiler after each batch that a step is over, except batches that a resume only
        skips.

        Args:
            profiler: as for :meth:`step`.
            left_out: batches that are skipped.
            batches: of this rank.
        """
        self.start(profiler)
        for number, batch in enumerate(batches):
            yield batch
            if number >= left_out:
                self.step(profiler)

    def _open(self) -> None:
        self._range = record_function(RANGE + self._phase)
        self._range.__enter__()

    def _close(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
