"""What is said of a recorded profile: which operations took the time of the host, or of a GPU."""

from __future__ import annotations

from ddpkit.compat import ProfileEvent
from ddpkit.reporting import summary_of

MS = 1_000_000


def event(name, begin, end, **given):
    defaults = {"thread": 1, "number": 0, "started_by": 0, "is_range": False, "is_on_device": False}
    return ProfileEvent(name, begin * MS, end * MS, **{**defaults, **given})


def rows(summary):
    return [(one.name, one.calls, one.nanoseconds / MS) for one in summary.operations]


def test_on_a_gpu_each_kernel_belongs_to_the_operation_that_started_it():
    on_gpu = {"is_on_device": True, "thread": 7}
    summary = summary_of(
        [
            event("ProfilerStep#5", 0, 100, is_range=True),
            event("ddpkit: forward", 0, 90, is_range=True),
            event("ddpkit: forward", 0, 300, is_range=True, **on_gpu),
            event("aten::mm", 1, 3, number=1),
            event("aten::mm", 4, 6, number=2),
            event("aten::relu", 7, 9, number=3),
            event("aten::empty", 9, 99, number=4),
            event("sgemm", 100, 130, started_by=1, **on_gpu),
            event("sgemm", 130, 160, started_by=2, **on_gpu),
            event("relu_kernel", 160, 180, started_by=3, **on_gpu),
            event("own_kernel", 180, 200, **on_gpu),
        ]
    )
    assert summary.is_device
    assert rows(summary) == [
        ("aten::mm", 2, 60),
        ("aten::relu", 1, 20),
        ("(kernels that no operation has started)", 0, 20),
    ]
    lines = summary.lines()
    assert lines[0] == "A batch, on the host: forward 90.0 ms."
    assert lines[1] == "What took the device's time, the largest first:"
    assert lines[3].split() == ["aten::mm", "2", "60.0", "60.0%"]
    assert lines[5].split()[-2:] == ["20.0", "20.0%"]


def test_on_the_host_an_operation_has_its_own_time_and_the_rest_of_a_step_is_between_them():
    summary = summary_of(
        [
            event("ProfilerStep#5", 0, 100, is_range=True),
            event("ProfilerStep#6", 100, 150, is_range=True),
            event("ddpkit: data", 0, 10, is_range=True),
            event("aten::linear", 20, 60),
            event("aten::t", 21, 26),
            event("aten::addmm", 30, 55),
            event("aten::linear", 110, 120),
            event("aten::add_", 40, 47, thread=2),  # of the autograd engine
        ]
    )
    assert not summary.is_device
    assert rows(summary) == [
        ("(between the operations: Python, waiting)", 0, 100),
        ("aten::addmm", 1, 25),
        ("aten::linear", 2, 20),
        ("aten::add_", 1, 7),
        ("aten::t", 1, 5),
    ]
    assert summary.nanoseconds == 157 * MS
    assert summary.batches == 2
    assert summary.lines()[0] == "A batch, on the host: data 5.0 ms."


def test_ten_rows_at_most_each_within_80_columns():
    ranges = [event(f"ddpkit: {name}", 0, 1234567, is_range=True) for name in ("exchange", "data")]
    many = [event("operation" * number, number * 10, number * 11) for number in range(1, 15)]
    lines = summary_of([*ranges, *many]).lines()
    assert lines[0] == "A batch, on the host: data 1234567.0 ms, exchange 1234567.0 ms."
    assert len(lines) == 1 + 2 + 10
    assert max(map(len, lines)) <= 80
    assert lines[3].startswith("  operationoperation")
    assert "..." in lines[3]


def test_a_long_line_of_ranges_is_broken():
    names = ("data", "move", "forward", "backward", "exchange", "optimizer", "other")
    ranges = [event(f"ddpkit: {name}", 0, 100, is_range=True) for name in names]
    lines = summary_of([*ranges, event("aten::mm", 0, 1)]).lines()
    assert max(map(len, lines)) <= 80
    assert "".join(lines[:2]).replace(" ", "") == "Abatch,onthehost:" + (
        ",".join(f"{name}100.0ms" for name in names) + "."
    )


def test_a_profile_of_nothing_says_so():
    assert summary_of([]).lines() == ["No operation of torch took any time in these batches."]
