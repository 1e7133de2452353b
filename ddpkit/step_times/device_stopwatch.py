"""A stopwatch on a GPU. It records events in the stream, and reads them when they are done, without
waiting.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ddpkit.step_times.phases import PHASES
from ddpkit.step_times.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_WAITS = 16  # of a step that are marked: each costs the host some microseconds
_MILLISECONDS = 1e3


class Event(Protocol):
    """What is used of a CUDA event."""

    def query(self) -> bool:
        """Say whether the GPU has come to it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to another."""


def event_recorder(device: str) -> Callable[[], Event | None]:
    """Return what records an event in the present stream of a GPU; it gives None while a graph is
    captured.

    Args:
        device: such as ``"cuda:1"``.
    """
    return functools.partial(_record, torch.device(device))


def _record(device: torch.device) -> Event | None:
    if torch.cuda.is_current_stream_capturing():  # a time inside of a graph would be an error
        return None
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    recorded: Event = event
    return recorded


class DeviceStopwatch(Stopwatch):
    """Divides the time of one step into its phases, on the host and on a GPU.

    A GPU works later than the host tells it to. So what a phase takes is the time on the GPU from
    the event at its beginning to the one at its end, with gaps in which the GPU has nothing to do.

    Args:
        record: records an event now, or gives None.
    """

    is_late = True

    def __init__(self, record: Callable[[], Event | None]) -> None:
        super().__init__()
        self._record = record
        self._events = [record()]
        self._phases: list[str] = []
        self._waits = 0

    def switch(self, phase: str) -> str:
        """End the present phase, and begin another.

        Args:
            phase: the next one.

        Returns:
            The one that has ended.
        """
        before = super().switch(phase)
        self._phases.append(before)
        self._events.append(self._record())
        return before

    def begin_wait(self) -> str:
        """Note that this rank waits for others, if that was not noted too often already."""
        self._waits += 1
        return self.phase if self._waits > MOST_WAITS else super().begin_wait()

    def end_wait(self, before: str) -> None:
        """Note that the wait is over.

        Args:
            before: what :meth:`begin_wait` has returned.
        """
        if before != self.phase:
            super().end_wait(before)

    def finish(self) -> None:
        """End the last phase, and with it the step."""
        last = self._events[-1]
        self.is_host_bound = last is not None and last.query()
        super().finish()

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase on the GPU; those of the host if the GPU is not there
        yet.
        """
        events = [event for event in self._events if event is not None]
        if len(events) < len(self._events) or not events[-1].query():
            return self.seconds
        found = dict.fromkeys(PHASES, 0.0)
        for phase, begin, end in zip(self._phases, events, events[1:], strict=False):
            found[phase] += begin.elapsed_time(end) / _MILLISECONDS
        return found
