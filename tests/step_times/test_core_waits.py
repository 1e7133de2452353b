"""The kernel's count of the time in which a thread waits for a core."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from ddpkit.step_times import CoreWaits, core_waits


def test_the_share_is_of_the_time_since_the_last_call(tmp_path, monkeypatch):
    seconds = iter([10.0, 12.0, 13.0])
    monkeypatch.setattr(core_waits, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    counted = tmp_path / "schedstat"
    counted.write_text("5000000 1000000000 3\n")
    waits = CoreWaits(counted)
    counted.write_text("5000000 1500000000 4\n")
    assert waits.share() == pytest.approx(0.25)
    assert waits.share() == 0.0


def test_a_kernel_that_does_not_count_tells_of_no_waits(tmp_path):
    waits = CoreWaits(tmp_path / "none")
    time.sleep(0.001)
    assert waits.share() == 0.0
