"""The events of a profile: from where torch keeps them, and from its public list where they are not
there.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.profiler import profile, record_function

from ddpkit.compat import profile_events


def recorded(**options):
    with profile(**options) as profiler, record_function("a range"):
        torch.ones(3, 3).mm(torch.ones(3, 3))
    return profiler


def names(events):
    return sorted(one.name for one in events)


def test_operations_and_ranges_are_there_and_no_function_of_python():
    events = profile_events(recorded(with_stack=True))
    assert {"aten::mm", "aten::ones", "a range"} < {one.name for one in events}
    assert not [one.name for one in events if ".py" in one.name or one.name.startswith("<")]
    (found,) = [one for one in events if one.name == "a range"]
    assert found.is_range
    (product,) = [one for one in events if one.name == "aten::mm"]
    assert found.begin <= product.begin < product.end <= found.end
    assert found.thread == product.thread
    assert product.is_range is product.is_on_device is False


def test_the_public_list_gives_the_same():
    profiler = recorded()
    public = SimpleNamespace(events=profiler.events)
    inside = profile_events(profiler)
    outside = profile_events(public)
    assert names(inside) == names(outside)
    for one, other in zip(sorted(inside), sorted(outside), strict=True):
        assert abs((one.end - one.begin) - (other.end - other.begin)) <= 2
        assert one[3:] == other[3:]


def test_a_name_that_is_no_text_is_left_out():
    def broken():
        raise UnicodeDecodeError("utf-8", b"\xa0", 0, 1, "invalid start byte")

    event = SimpleNamespace(name=broken, start_thread_id=int, end_thread_id=int)
    results = SimpleNamespace(events=lambda: [event])
    profiler = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    assert profile_events(profiler) == []
