"""The record of allocations: torch's own functions where they are there, and nothing where they are
not.
"""

from __future__ import annotations

import pytest
import torch

from ddpkit.compat import record_memory_history, stop_memory_history, write_memory_history


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    calls = []
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda **given: calls.append(given),
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    return calls


def test_torch_is_asked_to_record_to_write_and_to_stop(gpu, tmp_path):
    assert record_memory_history("cuda:1")
    write_memory_history("cuda:1", tmp_path / "snapshot.pickle")
    stop_memory_history("cuda:1")
    assert gpu[1:] == [str(tmp_path / "snapshot.pickle"), {"enabled": None}]


@pytest.mark.parametrize("missing", ["_record_memory_history", "_dump_snapshot"])
def test_a_torch_without_the_functions_records_nothing(gpu, missing, monkeypatch, tmp_path):
    monkeypatch.delattr(torch.cuda.memory, missing)
    assert not record_memory_history("cuda:1")
    write_memory_history("cuda:1", tmp_path / "snapshot.pickle")
    assert not [one for one in gpu if "max_entries" in one]


def test_a_torch_with_other_arguments_records_nothing(gpu, monkeypatch):
    def record(enabled):
        gpu.append(enabled)

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    assert not record_memory_history("cuda:1")
    assert not gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at what is said without a GPU")
@pytest.mark.parametrize("device", ["cpu", "cuda:0", "mps", "meta"])
def test_where_there_is_no_such_device_nothing_is_recorded(device):
    assert not record_memory_history(device)
    stop_memory_history(device)
