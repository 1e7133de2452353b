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


def train(dtype=torch.float32, samples=64, **options):
    brain = Classifier(
        {"net": make_net(dtype)},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        run_opts={"noprogressbar": True, **options},
    )
    data = make_data(samples, dtype=dtype)
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


class OfSums(Classifier):
    """Every sample stands for as many tokens as its class says."""

    def compute_objectives(self, predictions, batch, stage):
        labels = batch[1].to(self.device)
        losses = nn.functional.cross_entropy(predictions.float(), labels, reduction="none")
        return (losses * labels).sum(), labels.sum()


def fit_sums(**options):
    brain = OfSums(
        {"net": make_net(options.pop("dtype", torch.float32))},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        run_opts={"noprogressbar": True, "grad_accumulation_factor": 2, **options},
    )
    data = make_data(dtype=next(brain.modules.parameters()).dtype)
    brain.fit([1, 2], data, train_loader_kwargs={"batch_size": 16})
    return brain, {name: value.cpu() for name, value in brain.raw_modules.state_dict().items()}


def test_sums_and_counts_follow_cpu_in_float64():
    _, on_cpu = fit_sums(dtype=torch.float64, device="cpu")
    _, on_gpu = fit_sums(dtype=torch.float64)
    torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=1e-9)


def test_sums_and_counts_with_a_loss_scale():
    """The scaler unscales, then the count divides: the weights are near those of full precision."""
    _, full = fit_sums()
    brain, scaled = fit_sums(precision="fp16")
    assert brain.scaler.is_enabled()
    assert brain.optimizer_step > 0
    torch.testing.assert_close(scaled["net.0.weight"], full["net.0.weight"], rtol=0, atol=3e-2)


def test_data_parallel_with_batches_of_changing_length():
    """Sequences of another length in every batch, and a last batch smaller than the number of GPUs."""

    class Sequences(Brain):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch.to(self.device)).mean(dim=(1, 2))

        def compute_objectives(self, predictions, batch, stage):
            return predictions.square().mean()

    def weights(**options):
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        brain = Sequences(
            {"net": net},
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            run_opts={"noprogressbar": True, **options},
        )
        generator = torch.Generator().manual_seed(1)
        batches = [
            torch.randn(size, length, 3, generator=generator).double() for size, length in ((8, 5), (8, 9), (1, 2))
        ]
        brain.fit([1, 2], batches, train_loader_kwargs={"batch_size": None})
        assert not any("module" in name for name in brain.raw_modules.state_dict())
        return {name: value.cpu() for name, value in brain.raw_modules.state_dict().items()}

    torch.testing.assert_close(weights(data_parallel_backend=True), weights(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("samples", [64, 63, 50])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_ddp_over_nccl(processes, samples, tmp_path):
    """Also with remainders, where a rank may repeat a sample that counts in no statistic."""
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
        str(samples),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=dict(os.environ))
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    _, alone = train(torch.float64, samples)
    torch.testing.assert_close(weights, alone, rtol=0, atol=1e-9)
