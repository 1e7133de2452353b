"""The snapshot that shows who has taken the memory."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from ddpkit.parts.events import PartEvents
from ddpkit.parts.memory_snapshots import MemorySnapshots
from tests.recipes import make, points
from tests.run.test_memory_report import Full, pretend_gpu, report_of

FULL = torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def gpu(monkeypatch):
    return pretend_gpu(monkeypatch)


def brain_of(folder):
    return SimpleNamespace(hparams=SimpleNamespace(output_folder=str(folder)))


def test_a_cpu_has_no_snapshot_and_the_option_says_so(tmp_path, caplog):
    options = {"memory_snapshot_on_oom": True, "hparams": {"output_folder": str(tmp_path)}}
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        make(Full, **options).fit([1], points(8))
    assert "torch does not record who allocates memory on cpu" in caplog.text
    assert not list(tmp_path.rglob("*.pickle"))


def test_a_profile_alone_says_nothing_where_there_is_no_record(tmp_path, caplog):
    with MemorySnapshots("cpu", warns=False).around_fit(brain_of(tmp_path)):
        pass
    assert not caplog.messages


def test_allocations_are_recorded_and_the_snapshot_lies_beside_the_traces(
    monkeypatch,
    tmp_path,
    caplog,
):
    part = MemorySnapshots("cuda:0", warns=True)
    report = report_of(PartEvents([part]))
    gpu = pretend_gpu(monkeypatch)
    with part.around_fit(brain_of(tmp_path)):
        assert gpu == [{"max_entries": 100_000, "stacks": "python"}]
        report.tell(torch.OutOfMemoryError("CUDA out of memory"))
    assert gpu[1:] == ["dump", {"enabled": None}]
    path = tmp_path / "profiler_logs" / "oom_rank0.pickle"
    assert list(path.parent.iterdir()) == [path]
    assert pickle.loads(path.read_bytes()) == {"segments": []}
    summary, snapshot = caplog.messages
    assert snapshot == (
        f"Memory snapshot of rank 0: {path}\n"
        "Drop it on https://pytorch.org/memory_viz to see who allocated what."
    )
    assert "--memory_snapshot_on_oom" not in summary


def test_a_snapshot_that_cannot_be_written_does_not_hide_the_error(gpu, tmp_path, caplog):
    (tmp_path / "profiler_logs").write_text("in the way")
    part = MemorySnapshots("cuda:0", warns=True)
    with part.around_fit(brain_of(tmp_path)):
        part.on_out_of_memory(FULL)
    assert caplog.messages[-1].startswith("The memory snapshot of rank 0 cannot be written: ")
    assert "dump" not in gpu


def test_recording_ends_with_an_error_and_nothing_is_written_after_it(gpu, tmp_path):
    part = MemorySnapshots("cuda:0", warns=True)
    with pytest.raises(ValueError, match="end"), part.around_fit(brain_of(tmp_path)):
        raise ValueError("end")
    assert gpu[-1] == {"enabled": None}
    part.on_out_of_memory(FULL)
    assert not list(tmp_path.iterdir())
