"""What a recorded profile says in a few lines: where the time of the steps goes."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpkit.step_times import PHASES, RANGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpkit.compat import ProfileEvent

PYTHON = "(between the operations: Python, waiting)"
UNNAMED = "(kernels that no operation has started)"

_STEP = "ProfilerStep#"  # torch's own range around a step
_WIDTH = 80
_MOST = 10
_TITLE = "What took the {}'s time, the largest first:"


@dataclass
class Operation:
    """The time of one operation, without that of others that it has called.

    Attributes:
        name: as in the trace.
        calls: how often it ran; 0 where that says nothing.
        nanoseconds: of all calls together.
    """

    name: str
    calls: int = 0
    nanoseconds: int = 0


@dataclass
class ProfileSummary:
    """Where the time of some batches went.

    Attributes:
        batches: how many were recorded.
        operations: the largest first; on a GPU, or another accelerator, each with the kernels that
            it has started.
        nanoseconds: of all operations together.
        ranges: nanoseconds on the host of each phase of :data:`~ddpkit.step_times.phases.PHASES`.
        is_device: whether the operations' time is that of an accelerator.

    Example:
        >>> from ddpkit.compat import ProfileEvent
        >>> host = {"thread": 1, "number": 1, "started_by": 0, "is_on_device": False}
        >>> outer = ProfileEvent("aten::linear", 0, 900, is_range=False, **host)
        >>> inner = ProfileEvent("aten::addmm", 100, 900, is_range=False, **host)
        >>> [(one.name, one.nanoseconds) for one in summary_of([outer, inner]).operations]
        [('aten::addmm', 800), ('aten::linear', 100)]
    """

    batches: int
    operations: list[Operation]
    nanoseconds: int
    ranges: dict[str, int] = field(default_factory=dict)
    is_device: bool = False

    def lines(self) -> list[str]:
        """Return what there is to say, in lines of at most 80 characters."""
        if not self.operations:
            return ["No operation of torch took any time in these batches."]
        return [*self._lines_of_ranges(), *self._table()]

    def _lines_of_ranges(self) -> list[str]:
        parts = [
            f"{name} {self.ranges[name] / self.batches / 1e6:.1f} ms"
            for name in PHASES
            if name in self.ranges
        ]
        text = f"A batch, on the host: {', '.join(parts)}."
        return textwrap.wrap(text, _WIDTH, subsequent_indent="  ") if parts else []

    def _table(self) -> list[str]:
        room = _WIDTH - 2 - 26  # for a name
        lines = [_TITLE.format("device" if self.is_device else "host")]
        lines.append(f"  {'operation':<{room}}{'calls':>8}{'ms':>10}{'share':>8}")
        for operation in self.operations[:_MOST]:
            name = (
                operation.name if len(operation.name) < room else f"{operation.name[: room - 4]}..."
            )
            share = operation.nanoseconds / self.nanoseconds
            calls = f"{operation.calls}" if operation.calls else ""
            lines.append(
                f"  {name:<{room}}{calls:>8}{operation.nanoseconds / 1e6:>10.1f}{share:>8.1%}"
            )
        return lines


def summary_of(events: Sequence[ProfileEvent]) -> ProfileSummary:
    """Return where the time of a profile went.

    Args:
        events: of ``ddpkit.compat.profile_events``.
    """
    steps = [event for event in events if event.name.startswith(_STEP) and not event.is_on_device]
    ranges: dict[str, int] = defaultdict(int)
    for event in events:
        if event.name.startswith(RANGE) and not event.is_on_device:
            ranges[event.name.removeprefix(RANGE)] += event.end - event.begin
    kernels = [event for event in events if event.is_on_device and not event.is_range]
    on_host = [event for event in events if not (event.is_on_device or event.is_range)]
    found = _of_device(kernels, on_host) if kernels else _of_host(on_host, steps)
    operations = sorted(found, key=lambda operation: operation.nanoseconds, reverse=True)
    total = sum(operation.nanoseconds for operation in operations)
    return ProfileSummary(
        max(len(steps), 1),
        operations,
        total,
        dict(ranges),
        bool(kernels),
    )


def _of_device(
    kernels: Iterable[ProfileEvent],
    on_host: Iterable[ProfileEvent],
) -> Iterable[Operation]:
    """Return the operations with the time of the kernels that each has started."""
    names = {event.number: event.name for event in on_host}
    found: dict[str, Operation] = {}
    callers: dict[str, set[int]] = defaultdict(set)
    for kernel in kernels:
        name = names.get(kernel.started_by, UNNAMED)
        operation = found.setdefault(name, Operation(name))
        operation.nanoseconds += kernel.end - kernel.begin
        if name != UNNAMED:
            callers[name].add(kernel.started_by)
    for name, operation in found.items():
        operation.calls = len(callers[name])
    return found.values()


def _of_host(on_host: Iterable[ProfileEvent], steps: Sequence[ProfileEvent]) -> Iterable[Operation]:
    """Return the operations with their own time, and what of the steps is between them."""
    found: dict[str, Operation] = {}
    of_thread: dict[int, list[ProfileEvent]] = defaultdict(list)
    for event in on_host:
        of_thread[event.thread].append(event)
    covered: dict[int, int] = {}
    for thread, events in of_thread.items():
        covered[thread] = _add_own_times(events, found)
    if steps:
        whole = sum(step.end - step.begin for step in steps)
        between = whole - covered.get(steps[0].thread, 0)
        if between > 0:
            found[PYTHON] = Operation(PYTHON, nanoseconds=between)
    return [operation for operation in found.values() if operation.nanoseconds > 0]


def _add_own_times(events: list[ProfileEvent], found: dict[str, Operation]) -> int:
    """Add the own times of event thread's operations; return how long any of them ran."""
    covered = 0
    running: list[ProfileEvent] = []
    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        while running and running[-1].end <= event.begin:
            running.pop()
        length = event.end - event.begin
        operation = found.setdefault(event.name, Operation(event.name))
        operation.calls += 1
        operation.nanoseconds += length
        if running:
            found[running[-1].name].nanoseconds -= length
        else:
            covered += length
        running.append(event)
    return covered
