"""The peaks of memory that a torch profiler records on a CPU.

Reason: the allocator of a CPU keeps no statistics. A profiler notes each allocation and
each release, and its trace tells them; nothing public sums them up.
"""

from __future__ import annotations

import itertools
import json
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from ddpkit.compat.recorded_events import allocations_recorder, mark_moment

OPTIMIZER_STEP = "ddpkit: optimizer step"
MEMORY_EVENT = "[memory]"  # of a trace, at each allocation and at each release
_CPU = 0  # the number of this device in a trace


class StepPeaks(NamedTuple):
    """The peaks of one step, in bytes above what was allocated when it began.

    Attributes:
        passes: forward and backward pass.
        step: the optimizer step; None where none was seen.
    """

    passes: float
    step: float | None


class RecordedPeaks:
    """Peaks as torch's profiler records the allocations of a CPU, which has no counters.

    Args:
        folder: for the trace, which is read and removed.

    Ranks: local.
    """

    def __init__(
        self,
        folder: Path,
    ) -> None:
        self._trace = folder / "memory_trace.json"
        self._recorder: Any = None
        self._has_stepped = False

    def begin(self) -> None:
        """Begin a step."""
        self._has_stepped = False
        self._recorder = allocations_recorder()
        self._recorder.start()

    def begin_optimizer(self) -> None:
        """Note that the optimizers step from here on."""
        if not self._has_stepped:
            self._has_stepped = True
            mark_moment(OPTIMIZER_STEP)

    def end(self) -> StepPeaks:
        """End the step, and return its peaks."""
        self._recorder.stop()
        self._recorder.export_chrome_trace(str(self._trace))
        text = self._trace.read_text(encoding="utf-8")
        self._trace.unlink()
        self._recorder = None
        return peaks_of_trace(json.loads(text)["traceEvents"])


def peaks_of_trace(events: list[dict[str, Any]]) -> StepPeaks:
    """Return the peaks that a trace of torch's profiler tells.

    Args:
        events: its ``traceEvents``.

    Example:
        >>> cpu = {"Device Type": 0}
        >>> peaks_of_trace(
        ...     [
        ...         {"name": "[memory]", "ts": 1, "args": {**cpu, "Bytes": 8}},
        ...         {"name": "[memory]", "ts": 2, "args": {**cpu, "Bytes": -6}},
        ...         {"name": "ddpkit: optimizer step", "ts": 3},
        ...         {"name": "[memory]", "ts": 4, "args": {**cpu, "Bytes": 4}},
        ...     ]
        ... )
        StepPeaks(passes=8, step=6)
    """
    moments = [event["ts"] for event in events if event.get("name") == OPTIMIZER_STEP]
    changes = [
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == MEMORY_EVENT and event["args"]["Device Type"] == _CPU
    ]
    changes.sort(key=itemgetter(0))
    # what was there before counts as nothing: a release of it leads below 0
    levels = list(itertools.accumulate(size for _, size in changes))
    if not moments:
        return StepPeaks(max([0, *levels]), None)
    # of several optimizers the first
    first = min(moments)
    number = sum(moment < first for moment, _ in changes)
    at_step = levels[number - 1] if number else 0
    in_passes = levels[:number]
    in_step = levels[number:]
    return StepPeaks(
        max([0, *in_passes]),
        max([at_step, *in_step]),
    )
