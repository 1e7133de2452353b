"""What a recorded profile says in a few lines: where the time of the steps goes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType

#: What the names of ddpkit's own ranges in a trace begin with.
RANGE = "ddpkit: "

PYTHON = "(Python, between the operations)"
UNNAMED = "(kernels that no operation has started)"

_WIDTH = 80
_PYTHON = re.compile(r"<|nn\.Module: |.*\.py\(\d+\): ")
_PROFILERS_OWN = re.compile(r"torch/(autograd/)?profiler|.*_record_function_|.*_profiler of ")
_TITLE = "What took {}, the largest first:"


@dataclass(frozen=True)
class Operation:
    """The time of one operation, without what it has called.

    Attributes:
        name: as in the trace.
        calls: how often it ran; 0 where that says nothing.
        microseconds: of all calls together.

    Ranks: local.
    """

    name: str
    calls: int
    microseconds: float


def largest_operations(
    averages: Iterable[Any], limit: int = 10
) -> tuple[list[Operation], float, bool]:
    """Choose the operations of a profile that took most time by themselves.

    Args:
        averages: of ``torch.profiler.profile.key_averages()``.
        limit: how many are returned at most.

    Returns:
        Them, the largest first; the microseconds of everything; and whether that is the time of a GPU, or of another
        accelerator. Then what the host did does not count.

    Ranks: local.

    Example:
        >>> import torch
        >>> from torch.profiler import profile
        >>> with profile() as profiler:
        ...     total = torch.ones(3).sum()
        >>> found, microseconds, is_device = largest_operations(profiler.key_averages())
        >>> "aten::sum" in [one.name for one in found], is_device
        (True, False)
    """
    rows = [one for one in averages if not (one.is_user_annotation or one.key.startswith(RANGE))]
    on_device = [one for one in rows if one.device_type is not DeviceType.CPU]
    of_device = sum(one.self_device_time_total for one in on_device)
    if of_device:
        found = _of_device(rows, of_device)
        total = of_device
    else:
        found = _of_host(rows)
        total = sum(one.microseconds for one in found)
    found.sort(key=lambda one: one.microseconds, reverse=True)
    return found[:limit], total, of_device > 0


def _of_device(rows: Sequence[Any], total: float) -> list[Operation]:
    """Return the operations with the kernels that each of them has started."""
    found = [
        Operation(one.key, one.count, one.self_device_time_total)
        for one in rows
        if one.device_type is DeviceType.CPU and one.self_device_time_total > 0
    ]
    rest = total - sum(one.microseconds for one in found)
    if rest > total / 100:
        found.append(Operation(UNNAMED, 0, rest))
    return found


def _of_host(rows: Sequence[Any]) -> list[Operation]:
    """Return the operations on the host; what is Python's own becomes one of them."""
    python: Counter[str] = Counter()
    found = []
    for one in rows:
        if _PROFILERS_OWN.match(one.key):
            continue
        if _PYTHON.match(one.key):
            python[PYTHON] += max(one.self_cpu_time_total, 0.0)
        elif one.self_cpu_time_total > 0:
            found.append(Operation(one.key, one.count, one.self_cpu_time_total))
    return found + [Operation(name, 0, time) for name, time in python.items() if time > 0]


def ranges_of(averages: Iterable[Any]) -> dict[str, float]:
    """Return the microseconds on the host of each of ddpkit's named ranges, by their short names.

    Args:
        averages: of ``torch.profiler.profile.key_averages()``.

    Ranks: local.

    Example:
        >>> ranges_of([])
        {}
    """
    return {
        one.key.removeprefix(RANGE): one.cpu_time_total
        for one in averages
        if one.key.startswith(RANGE) and one.device_type is DeviceType.CPU
    }


def table_of_operations(
    operations: Sequence[Operation], total: float, *, is_device: bool
) -> list[str]:
    """Return the lines of a table, each of at most 80 characters.

    Args:
        operations: as :func:`largest_operations` returns them.
        total: microseconds of everything, of which the shares are.
        is_device: whether it is the time of an accelerator.

    Ranks: local.

    Example:
        >>> for line in table_of_operations([Operation("aten::mm", 12, 1500.0)], 2000.0, is_device=False):
        ...     print(line)
        What took the host's time, the largest first:
          operation                                             calls        ms   share
          aten::mm                                                 12       1.5   75.0%
    """
    whose = "the device's time" if is_device else "the host's time"
    name_width = _WIDTH - 2 - 26
    lines = [_TITLE.format(whose)]
    lines.append(f"  {'operation':<{name_width}}{'calls':>8}{'ms':>10}{'share':>8}")
    for one in operations:
        name = one.name if len(one.name) <= name_width - 1 else f"{one.name[: name_width - 4]}..."
        calls = f"{one.calls}" if one.calls else ""
        lines.append(
            f"  {name:<{name_width}}{calls:>8}{one.microseconds / 1e3:>10.1f}{one.microseconds / total:>8.1%}"
        )
    return lines


def line_of_ranges(microseconds: dict[str, float], steps: int) -> str:
    """Return a line that says how long each range of a step took on the host; empty where there are none.

    Args:
        microseconds: of each range in all steps.
        steps: how many were recorded.

    Ranks: local.

    Example:
        >>> line_of_ranges({"data": 500.0, "forward": 1500.0}, 2)
        'A batch, on the host: data 0.2 ms, forward 0.8 ms.'
    """
    if not microseconds:
        return ""
    parts = ", ".join(f"{name} {time / steps / 1e3:.1f} ms" for name, time in microseconds.items())
    return f"A batch, on the host: {parts}."
