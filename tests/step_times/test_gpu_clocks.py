"""The clock of a rank's GPU, from what a real driver has answered."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from ddpkit.step_times import GpuClocks, gpu_clocks
from tests.see.doctor.recorded_nvml import RecordedNvml, change, recorded

UUID = "6b7c7fe4-8142-0545-2c8a-7f46d9b5fdea"


class CountingNvml(RecordedNvml):
    """Finds a GPU by its UUID, as the driver does, and counts the questions for its clock."""

    asked = 0

    def nvmlDeviceGetHandleByUUID(self, uuid):
        names = [one["nvmlDeviceGetUUID"]["value"] for one in self.record["devices"]]
        if uuid not in names:
            raise pynvml.NVMLError_NotFound
        return names.index(uuid)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        self.asked += 1
        return self._answer(handle, "nvmlDeviceGetClockInfo", (kind,))


@pytest.fixture
def clock(monkeypatch):
    """Return a function that sets the time, for a process whose GPU has a UUID."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(gpu_clocks.time, "monotonic", lambda: now.seconds)
    properties = SimpleNamespace(uuid=UUID)
    monkeypatch.setattr(gpu_clocks.torch.cuda, "get_device_properties", lambda device: properties)

    def pass_by(seconds):
        now.seconds += seconds

    return pass_by


def test_a_gpu_at_work_tells_its_clock_and_that_it_is_at_its_power_limit(clock):
    nvml = CountingNvml(recorded("h200_at_work"))
    assert GpuClocks("cuda:0", nvml).read() == {"share": 1785 / 1980, "reasons": 4.0}


def test_the_driver_is_asked_every_ten_seconds(clock):
    nvml = CountingNvml(recorded("h200_at_work"))
    clocks = GpuClocks("cuda:0", nvml)
    clocks.read()
    change(nvml.record, 0, nvmlDeviceGetClockInfo__1=990)
    clock(9.0)
    assert clocks.read()["share"] == 1785 / 1980
    clock(1.0)
    assert clocks.read()["share"] == 0.5
    assert nvml.asked == 2


def test_a_driver_that_refuses_is_not_asked_again(clock):
    record = change(recorded("h200_at_work"), 0, nvmlDeviceGetClockInfo__1="NVMLError_NotSupported")
    clocks = GpuClocks("cuda:0", nvml := CountingNvml(record))
    assert clocks.read() is None
    clock(20.0)
    assert clocks.read() is None
    assert nvml.asked == 1


def test_without_the_package_nothing_is_known(clock, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert GpuClocks("cuda:0").read() is None


def test_a_gpu_that_the_driver_does_not_know_by_its_uuid_has_no_clock(clock):
    record = change(recorded("h200_at_work"), 0, nvmlDeviceGetUUID="GPU-0")
    assert GpuClocks("cuda:0", CountingNvml(record)).read() is None
