"""A profile of a GPU, the memory of one that is full, and how fast it computes."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch import nn

from ddpkit.brain import Brain
from ddpkit.train_logger import set_run_log

pytestmark = pytest.mark.gpu


class Wide(Brain):
    full_at = None

    def compute_forward(self, batch, stage):
        if self.step == self.full_at:
            torch.empty(1 << 50, dtype=torch.uint8, device=self.device)
        return self.modules.net(batch[0].to(self.device))

    def compute_objectives(self, predictions, batch, stage):
        return predictions.float().square().mean()


def wide(folder, **options):
    net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    return Wide(
        {"net": net},
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        hparams={"output_folder": str(folder)},
        run_opts={"noprogressbar": True, **options},
    )


def train(brain):
    data = [(torch.randn(512),) for _ in range(64 * 40)]
    brain.fit([1], data, train_loader_kwargs={"batch_size": 64})


def test_the_table_has_the_time_of_kernels_by_operation(tmp_path, caplog):
    caplog.set_level("INFO")
    train(wide(tmp_path, profile_training=True, profile_warmup=2, profile_steps=3))
    (text,) = [one for one in caplog.messages if one.startswith("Profile of 3 batches")]
    assert "What took the device's time, the largest first:" in text
    assert "aten::addmm" in text
    assert "aten::mm" in text
    assert "forward " in text


def test_a_full_gpu_leaves_a_snapshot_with_the_lines_of_python(tmp_path, caplog):
    brain = wide(tmp_path, memory_snapshot_on_oom=True)
    brain.full_at = 3
    with pytest.raises(torch.OutOfMemoryError):
        train(brain)
    (text,) = [one for one in caplog.messages if one.startswith("Memory of rank 0 on cuda")]
    assert "  allocated " in text
    assert "  the device has " in text
    assert "net.0.weight (2048, 512) float32: 4.00 MiB" in text
    path = tmp_path / "profiler_logs" / "oom_rank0.pickle"
    assert list(path.parent.iterdir()) == [path]
    found = pickle.loads(path.read_bytes())
    frames = [frame for trace in found["device_traces"] for one in trace for frame in one["frames"]]
    assert any(frame["filename"] == __file__ for frame in frames)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_known_gpu_has_its_share_of_the_peak(precision, tmp_path):
    set_run_log(tmp_path / "metrics.jsonl")
    try:
        train(wide(tmp_path, precision=precision, measure_steps="all", count_flops=True))
    finally:
        set_run_log(None)
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = list(map(json.loads, lines))
    (flops,) = [one for one in events if one["event"] == "flops"]
    # The first layer needs no gradient of its input.
    assert flops["per_step"] == 2 * 64 * 512 * 2048 * (2 + 3)
    speed = [one for one in events if one["event"] == "speed"]
    known = {"NVIDIA H200": {"bf16": 989.4e12, "fp32": 67e12}}.get(flops["device"])
    if known is not None:
        assert flops["peak_per_second"] == pytest.approx(known[precision])
        assert all(0 < one["mfu"] < 1 for one in speed[1:])
