"""What a torch profiler has recorded, event by event.

Reason: the public ``events()`` and ``key_averages()`` read the name of each Python function, too,
and torch 2.13 may keep such a name of a type that is gone by then: the names of some traces are no
text, and the call fails with UnicodeDecodeError, in the middle of a training. The events that they
are made of tell which of them are Python functions. They are read from where torch keeps them;
where they are not there, the public ``events()`` are taken.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.profiler
from torch.autograd import DeviceType

if TYPE_CHECKING:
    from collections.abc import Iterable


class ProfileEvent(NamedTuple):
    """One operation, range or kernel.

    Attributes:
        name: as in the trace.
        begin: nanoseconds; the origin is the same for all events.
        end: likewise.
        thread: of the host; of an event of a device it says nothing.
        number: of an operation: kernels name it.
        started_by: of a kernel: the number of the operation; 0 where that is not known.
        is_range: whether it is an annotation, not an operation.
        is_on_device: whether it ran on a GPU, or another accelerator.
    """

    name: str
    begin: int
    end: int
    thread: int
    number: int
    started_by: int
    is_range: bool
    is_on_device: bool


def profile_events(profiler: Any) -> list[ProfileEvent]:
    """Return what a profiler has recorded, without the functions of Python.

    Args:
        profiler: a ``torch.profiler.profile`` that has recorded.

    Example:
        >>> import torch
        >>> with torch.profiler.profile() as profiler:
        ...     total = torch.ones(3).sum()
        >>> "aten::sum" in [one.name for one in profile_events(profiler)]
        True
    """
    results = getattr(getattr(profiler, "profiler", None), "kineto_results", None)
    events = getattr(results, "events", None)
    return _of_public(profiler.events()) if events is None else _of_kineto(events())


def allocations_recorder() -> torch.profiler.profile:
    """Return a profiler that records what is allocated on the CPU; it is not started."""
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
    )


def mark_moment(name: str) -> None:
    """Mark this moment in what is recorded.

    Args:
        name: of the mark.
    """
    with torch.profiler.record_function(name):
        pass


def _of_kineto(events: Iterable[Any]) -> list[ProfileEvent]:
    found = []
    for event in events:
        if (
            getattr(event, "is_python_function", bool)()
            or getattr(event, "is_hidden_event", bool)()
        ):
            continue
        if event.start_thread_id() != event.end_thread_id():  # of what goes on in the background
            continue
        with contextlib.suppress(
            UnicodeDecodeError
        ):  # a Python function of a torch that does not tell
            name = event.name()
            if not _is_python(name):
                found.append(
                    ProfileEvent(
                        name,
                        event.start_ns(),
                        event.start_ns() + event.duration_ns(),
                        event.start_thread_id(),
                        event.correlation_id(),
                        event.linked_correlation_id(),
                        event.is_user_annotation(),
                        event.device_type() != DeviceType.CPU,
                    )
                )
    return found


def _of_public(events: Iterable[Any]) -> list[ProfileEvent]:
    return [
        ProfileEvent(
            getattr(event, "trace_name", None) or event.name,
            round(event.time_range.start * 1e3),
            round(event.time_range.end * 1e3),
            event.thread,
            event.id,
            getattr(event, "linked_correlation_id", 0) or 0,
            event.is_user_annotation,
            event.device_type != DeviceType.CPU,
        )
        for event in events
        if not (event.is_async or _is_python(event.name))
    ]


def _is_python(name: str) -> bool:
    return name.startswith(("<", "nn.Module: ")) or (".py(" in name and "): " in name)
