"""What is said of a recorded profile: which operations took the time of the host, or of a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from ddpkit.reporting import (
    largest_operations,
    line_of_ranges,
    ranges_of,
    table_of_operations,
)


def row(key, host=0.0, device=0.0, *, calls=1, kind=DeviceType.CPU, is_user_annotation=False):
    return SimpleNamespace(
        key=key,
        count=calls,
        self_cpu_time_total=host,
        cpu_time_total=2 * host,
        self_device_time_total=device,
        device_type=kind,
        is_user_annotation=is_user_annotation,
    )


def test_on_a_gpu_the_time_of_kernels_counts_and_each_belongs_to_the_operation_that_started_it():
    rows = [
        row("aten::mm", host=900.0, device=60.0, calls=4),
        row("aten::relu", host=5.0, device=20.0),
        row("aten::empty", host=70.0),
        row("sgemm_kernel", device=60.0, calls=4, kind=DeviceType.CUDA),
        row("relu_kernel", device=20.0, kind=DeviceType.CUDA),
        row("own_kernel", device=20.0, kind=DeviceType.CUDA),
        row("ddpkit: forward", host=10.0),
        row("ddpkit: forward", device=90.0, kind=DeviceType.CUDA, is_user_annotation=True),
    ]
    found, total, is_device = largest_operations(rows)
    assert (total, is_device) == (100.0, True)
    assert [(one.name, one.calls, one.microseconds) for one in found] == [
        ("aten::mm", 4, 60.0),
        ("aten::relu", 1, 20.0),
        ("(kernels that no operation has started)", 0, 20.0),
    ]
    table = table_of_operations(found, total, is_device=is_device)
    assert table[0] == "What took the device's time, the largest first:"
    assert table[2].split() == ["aten::mm", "4", "0.1", "60.0%"]
    assert table[4].split()[-2:] == ["0.0", "20.0%"]


def test_on_the_host_pythons_own_time_is_one_row_and_the_profilers_none():
    rows = [
        row("aten::mm", host=30.0, calls=2),
        row("train.py(12): compute_forward", host=15.0),
        row("nn.Module: Linear_0", host=4.0),
        row("<built-in function len>", host=1.0),
        row("torch/profiler/profiler.py(1227): step", host=500.0),
        row("<built-in method _record_function_enter_new of X>", host=500.0),
        row("ProfilerStep*", host=70.0, is_user_annotation=True),
        row("ddpkit: data", host=70.0, is_user_annotation=True),
    ]
    found, total, is_device = largest_operations(rows)
    assert (total, is_device) == (50.0, False)
    assert [(one.name, one.microseconds) for one in found] == [
        ("aten::mm", 30.0),
        ("(Python, between the operations)", 20.0),
    ]


def test_ten_rows_at_most_each_within_80_columns():
    rows = [row("operation" * number, host=1e9 * number, calls=10**6) for number in range(1, 15)]
    found, total, is_device = largest_operations(rows)
    table = table_of_operations(found, total, is_device=is_device)
    assert len(table) == 12
    assert max(map(len, table)) == 80
    assert table[2].startswith("  operationoperation")
    assert "..." in table[2]


@pytest.mark.parametrize(("steps", "shown"), [(1, "1.0"), (4, "0.2")])
def test_ranges_are_told_per_batch(steps, shown):
    rows = [
        row("ddpkit: data", host=500.0),
        row("ddpkit: data", device=90.0, kind=DeviceType.CUDA, is_user_annotation=True),
        row("aten::mm", host=30.0),
    ]
    found = ranges_of(rows)
    assert found == {"data": 1000.0}
    assert line_of_ranges(found, steps) == f"A batch, on the host: data {shown} ms."
