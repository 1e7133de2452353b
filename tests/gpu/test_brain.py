"""The Brain on GPUs: these run where a GPU is present; several processes need as many GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpkit.brain import Brain

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("train_on_gpus.py")


class Classifier(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0].to(self.device, non_blocking=True))

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.cross_entropy(predictions.float(), batch[1].to(self.device))


def make_data(samples=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 6, generator=generator, dtype=dtype)
    return list(zip(inputs, torch.randint(0, 3, (samples,), generator=generator), strict=True))


def make_net(dtype=torch.float32):
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def train(dtype=torch.float32, **options):
    brain = Classifier(
        {"net": make_net(dtype)},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        run_opts={"noprogressbar": True, **options},
    )
    data = make_data(dtype=dtype)
    brain.fit(range(1, 4), data, data[:20], train_loader_kwargs={"batch_size": 16, "shuffle": True})
    return brain, {name: value.cpu() for name, value in brain.raw_modules.state_dict().items()}


def test_the_device_is_found():
    brain, _ = train()
    assert brain.device == "cuda:0"
    assert next(brain.modules.parameters()).device == torch.device("cuda:0")


def test_gpu_follows_cpu_in_float64():
    _, on_cpu = train(torch.float64, device="cpu")
    _, on_gpu = train(torch.float64)
    torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=1e-9)


def test_data_parallel_follows_one_device():
    """Statistics of BatchNorm are per replica, so the comparison is exact on one GPU only."""
    _, alone = train(torch.float64)
    brain, replicated = train(torch.float64, data_parallel_backend=True)
    assert isinstance(brain.modules.net, nn.DataParallel)
    assert not any(name.startswith("net.module") for name in replicated)
    if torch.cuda.device_count() == 1:
        torch.testing.assert_close(replicated, alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_reduced_precision_trains(precision):
    brain, weights = train(precision=precision, eval_precision=precision)
    assert all(torch.isfinite(value).all() for value in weights.values() if value.is_floating_point())
    assert brain.scaler.is_enabled() == (precision == "fp16")
    assert 0 < brain.optimizer_step <= 12


def test_fp16_skips_what_overflows_and_adapts():
    class Exploding(Classifier):
        def compute_objectives(self, predictions, batch, stage):
            loss = super().compute_objectives(predictions, batch, stage)
            return loss * float("inf") if self.step == 2 else loss

    brain = Exploding(
        {"net": make_net()},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        run_opts={"noprogressbar": True, "precision": "fp16"},
    )
    before = brain.scaler.get_scale()
    brain.fit([1], make_data(), train_loader_kwargs={"batch_size": 16})
    assert brain.scaler.get_scale() < before
    assert brain.optimizer_step == 3
    assert brain.nonfinite_count == 0


def test_nothing_waits_for_the_gpu_in_a_training_step_but_the_finite_check():
    """``set_sync_debug_mode`` raises at a host synchronisation: forward and backward must not make one."""
    brain, _ = train()
    batch = [part.cuda() for part in torch.utils.data.default_collate(make_data(16))]
    brain.modules.train()
    brain.progress.window.closes = False
    brain.fit_batch(batch)  # warm up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        brain.fit_batch(batch)
        brain.progress.meter.append(brain.fit_batch(batch), 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_ddp_over_nccl(processes, tmp_path):
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs, found {torch.cuda.device_count()}")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        str(SCRIPT),
        str(tmp_path / "weights.pt"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=dict(os.environ))
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    _, alone = train(torch.float64)
    torch.testing.assert_close(weights, alone, rtol=0, atol=1e-9)
