"""The Brain on GPUs, in one process: these run where a GPU is present. Several processes are in
``test_ddp.py``.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpkit import optim
from ddpkit.batch import PaddedBatch
from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.optim import making
from tests.training import test_late_steps as late_steps

pytestmark = pytest.mark.gpu


class Classifier(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0].to(self.device, non_blocking=True))

    def compute_objectives(self, predictions, batch, stage):
        # Half precision is taken to float32 here; float64 stays what it is.
        wide = predictions if predictions.dtype is torch.float64 else predictions.float()
        return nn.functional.cross_entropy(wide, batch[1].to(self.device, non_blocking=True))


def make_data(samples=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 6, generator=generator, dtype=dtype)
    return list(zip(inputs, torch.randint(0, 3, (samples,), generator=generator), strict=True))


def make_net(dtype=torch.float32, norm=nn.BatchNorm1d):
    """Return a model whose norm has three values per channel and sample, so that one sample has a
    variance, too.
    """
    torch.manual_seed(11)
    parts = (
        nn.Linear(6, 24, bias=False),
        nn.Unflatten(1, (8, 3)),
        norm(8),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    return nn.Sequential(*parts).to(dtype)


def group_norm(channels):
    """Make a norm of every sample by itself: the same however a batch is divided."""
    return nn.GroupNorm(2, channels)


def train(dtype=torch.float32, samples=64, norm=nn.BatchNorm1d, scale=None, **options):
    brain = Classifier(
        {"net": make_net(dtype, norm)},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        run_opts={"noprogressbar": True, **options},
    )
    if scale is not None and brain.scaler.is_enabled():
        brain.scaler = torch.amp.GradScaler("cuda", init_scale=scale)
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
    """On all GPUs that there are; with one, ``nn.DataParallel`` hands the batch through."""
    _, alone = train(torch.float64, norm=group_norm)
    brain, replicated = train(torch.float64, norm=group_norm, data_parallel_backend=True)
    assert isinstance(brain.modules.net, nn.DataParallel)
    assert len(brain.modules.net.device_ids) == torch.cuda.device_count()
    assert not any(name.startswith("net.module") for name in replicated)
    torch.testing.assert_close(replicated, alone, rtol=0, atol=1e-9)


def test_data_parallel_with_statistics_per_replica_trains():
    _, weights = train(torch.float64, data_parallel_backend=True)
    assert all(
        torch.isfinite(value).all() for value in weights.values() if value.is_floating_point()
    )


class Noting(nn.Module):
    """Notes in which dtype it is given what a linear layer before it has computed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.seen = []

    def forward(self, x):
        output = self.layer(x)
        self.seen.append((output.dtype, output.device.index))  # replicas share the list
        return output


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_data_parallel_computes_in_the_precision_that_was_asked_for_on_every_gpu(precision, dtype):
    brain = Classifier(
        {"net": Noting()},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        run_opts={"noprogressbar": True, "precision": precision, "data_parallel_backend": True},
    )
    brain.fit([1], make_data(), train_loader_kwargs={"batch_size": 16})
    assert set(brain.raw_modules.net.seen) == {
        (dtype, device) for device in range(torch.cuda.device_count())
    }


def test_another_gpu_than_the_first_is_the_current_one_and_has_all_the_memory():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, found {torch.cuda.device_count()}")
    before = torch.cuda.current_device(), torch.cuda.memory_allocated(0)
    try:
        brain, _ = train(torch.float64, device="cuda:1")
        assert (brain.device, torch.cuda.current_device()) == ("cuda:1", 1)
        assert torch.cuda.memory_allocated(0) == before[1]
        replicated, _ = train(torch.float64, device="cuda:1", data_parallel_backend=True)
        assert replicated.modules.net.device_ids[0] == 1
    finally:
        torch.cuda.set_device(before[0])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_reduced_precision_trains(precision):
    brain, weights = train(precision=precision, eval_precision=precision)
    assert all(
        torch.isfinite(value).all() for value in weights.values() if value.is_floating_point()
    )
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


@contextlib.contextmanager
def syncs():
    """Note the warnings of ``set_sync_debug_mode``: one for each time that the host waits for the
    GPU.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        found = []
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            found += [one for one in caught if "synchronizing CUDA operation" in str(one.message)]


class Syncs(Classifier):
    """Counts, in every call of ``fit_batch`` (forward, backward, and the optimizer step), how often
    the host waits.
    """

    def on_fit_start(self):
        super().on_fit_start()
        self.syncs = []

    def fit_batch(self, batch):
        with syncs() as found:
            result = super().fit_batch(batch)
        self.syncs.append(len(found))
        return result


class SyncsOfSums(Syncs):
    """Returns sums and counts; the counts where ``count_on`` says."""

    count_on = "cpu"

    def compute_objectives(self, predictions, batch, stage):
        labels = batch[1].to(self.device, non_blocking=True)
        return nn.functional.cross_entropy(
            predictions.float(),
            labels,
            reduction="sum",
        ), self.count(batch)

    def count(self, batch):
        return (
            torch.ones_like(batch[1])
            if self.count_on == "cpu"
            else torch.ones(16, device=self.device)
        ).sum()


def waits(kind=Syncs, opt=torch.optim.Adam, **options):
    """Return how often each batch of the second epoch waited; in the first one memory and kernels
    are made.
    """
    brain = kind(
        {"net": make_net()},
        opt,
        run_opts={"noprogressbar": True, **options},
    )
    brain.fit([1, 2], make_data(), train_loader_kwargs={"batch_size": 16})
    return brain.syncs[4:]


def test_waits_are_counted():
    with syncs() as found:
        torch.ones(2, device="cuda").sum().item()
        torch.ones(2).to("cuda")
    assert len(found) == 2


@pytest.mark.parametrize("kind", [Syncs, SyncsOfSums])
def test_a_step_that_is_not_fused_waits_for_the_gpu_once_for_the_norm(kind, monkeypatch):
    """Forward, backward and micro-batches that do not step wait for nothing; fp16's scaler waits
    once more.
    """
    one_by_one = functools.partial(torch.optim.Adam, fused=False)
    assert waits(kind, one_by_one) == [1, 1, 1, 1]
    assert waits(kind, one_by_one, grad_accumulation_factor=2) == [0, 1, 0, 1]
    assert waits(kind, one_by_one, precision="bf16") == [1, 1, 1, 1]
    assert waits(kind, one_by_one, precision="fp16") == [2, 2, 2, 2]
    monkeypatch.setattr(SyncsOfSums, "count_on", "cuda")
    assert waits(kind, one_by_one, grad_accumulation_factor=2) == [0, 1, 0, 1]


@pytest.mark.parametrize("kind", [Syncs, SyncsOfSums])
def test_a_fused_step_waits_for_nothing_but_under_fp16(kind, monkeypatch):
    """Waiting for the norm of the step before, which torch does not count, is a wait for what is
    long there.
    """
    assert waits(kind) == [0, 0, 0, 0]
    assert waits(kind, grad_accumulation_factor=2) == [0, 0, 0, 0]
    assert waits(kind, precision="bf16") == [0, 0, 0, 0]
    assert waits(kind, precision="fp16") == [1, 1, 1, 1]
    monkeypatch.setattr(SyncsOfSums, "count_on", "cuda")
    assert waits(kind, grad_accumulation_factor=2) == [0, 0, 0, 0]


@pytest.mark.parametrize("name", late_steps.KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_grad_norm": 0.3},
        {"kind": late_steps.Looking},
        {"kind": late_steps.Sums},
        {"ema_decay": 0.9},
    ],
    ids=str,
)
def test_steps_that_are_looked_at_later_have_the_bits_of_those_that_are_read_first(
    monkeypatch,
    name,
    options,
):
    found = []
    for kinds in ((), ("cuda",)):
        for module in (optim, making):
            monkeypatch.setattr(module, "GPUS", kinds)
        brain = late_steps.fit(late_steps.KINDS[name], device="cuda", **options)
        found.append(late_steps.told(brain))
    assert found[0] == found[1]
    assert any(brain.open) is ("ema_decay" not in options)


def test_opt_class_is_fused_and_goes_on_from_a_checkpoint_that_was_not(tmp_path):
    def fit(epochs, **options):
        net = make_net()
        counter = EpochCounter(epochs)
        checkpointer = Checkpointer(tmp_path, {"net": net, "counter": counter})
        options = {"noprogressbar": True, "ckpt_interval_steps": 1, **options}
        brain = Classifier(
            {"net": net},
            torch.optim.AdamW,
            run_opts=options,
            checkpointer=checkpointer,
        )
        brain.fit(counter, make_data(), train_loader_kwargs={"batch_size": 16})
        [group] = brain.optimizer.param_groups
        return group["fused"], {one["step"].device.type for one in brain.optimizer.state.values()}

    assert fit(1, device="cpu") == (None, {"cpu"})
    assert fit(2) == (True, {"cuda"})
    assert fit(3, device="cpu") == (None, {"cpu"})


class OfSums(Classifier):
    """Every sample stands for as many tokens as its class says."""

    def compute_objectives(self, predictions, batch, stage):
        labels = batch[1].to(self.device)
        wide = predictions if predictions.dtype is torch.float64 else predictions.float()
        losses = nn.functional.cross_entropy(wide, labels, reduction="none")
        return (losses * labels).sum(), labels.sum()


def fit_sums(epochs=2, scaler=None, **options):
    brain = OfSums(
        {"net": make_net(options.pop("dtype", torch.float32))},
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        run_opts={"noprogressbar": True, "grad_accumulation_factor": 2, **options},
    )
    if scaler is not None:
        brain.scaler = scaler
    data = make_data(dtype=next(brain.modules.parameters()).dtype)
    brain.fit(range(1, epochs + 1), data, train_loader_kwargs={"batch_size": 16})
    return brain, {name: value.cpu() for name, value in brain.raw_modules.state_dict().items()}


def test_sums_and_counts_follow_cpu_in_float64():
    _, on_cpu = fit_sums(dtype=torch.float64, device="cpu")
    _, on_gpu = fit_sums(dtype=torch.float64)
    torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=1e-9)


def test_sums_and_counts_with_a_loss_scale():
    """The scaler unscales, then the count divides: with a scale at which nothing overflows, as in
    full precision.
    """
    _, full = fit_sums()
    brain, scaled = fit_sums(precision="fp16", scaler=torch.amp.GradScaler("cuda", init_scale=16.0))
    assert brain.optimizer_step == 4, "none was skipped"
    torch.testing.assert_close(scaled["net.0.weight"], full["net.0.weight"], rtol=0, atol=2e-3)


def test_sums_and_counts_find_their_loss_scale():
    """The scale begins at 65536 and halves at each overflow: after at most 16 of the 40 steps none
    is skipped.
    """
    brain, _ = fit_sums(epochs=20, precision="fp16")
    assert brain.scaler.is_enabled()
    assert brain.optimizer_step >= 24


def test_data_parallel_with_batches_of_changing_length():
    """Sequences of another length in every batch, and a last batch smaller than the number of
    GPUs.
    """

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
            torch.randn(size, length, 3, generator=generator).double()
            for size, length in ((8, 5), (8, 9), (1, 2))
        ]
        brain.fit([1, 2], batches, train_loader_kwargs={"batch_size": None})
        assert not any("module" in name for name in brain.raw_modules.state_dict())
        return {name: value.cpu() for name, value in brain.raw_modules.state_dict().items()}

    torch.testing.assert_close(weights(data_parallel_backend=True), weights(), rtol=0, atol=1e-9)


class Pairs:
    """Data that loader workers can be given, in batches that move themselves."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return {"x": self.samples[index][0], "y": self.samples[index][1]}


class Padded(Classifier):
    """Reads a padded batch, and notes where each batch was when it came."""

    def compute_forward(self, batch, stage):
        self.came_on = {*getattr(self, "came_on", ()), batch.x.data.device.type}
        batch = batch.to(self.device, non_blocking=True)
        return super().compute_forward((batch.x.data, batch.y), stage)

    def compute_objectives(self, predictions, batch, stage):
        return super().compute_objectives(predictions, (batch.x.data, batch.y.data), stage)


def fit_padded(samples=256, **options):
    brain = Padded(
        {"net": make_net(torch.float64)},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        run_opts={"noprogressbar": True, **options},
    )
    data = Pairs(make_data(samples, torch.float64))
    loader = {"batch_size": 16, "shuffle": True, "num_workers": 2, "collate_fn": PaddedBatch}
    brain.fit([1, 2, 3], data, data, train_loader_kwargs=loader, valid_loader_kwargs=loader)
    return brain, {name: value.cpu() for name, value in brain.raw_modules.state_dict().items()}


def test_batches_that_are_moved_ahead_are_there_when_a_step_comes_and_change_no_bit():
    usual, expected = fit_padded()
    ahead, weights = fit_padded(prefetch_to_device=True)
    assert (usual.came_on, ahead.came_on) == ({"cpu"}, {"cuda"})
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_a_batch_is_not_overwritten_while_a_slow_step_still_reads_it():
    """The copy of a later batch may get the memory of an earlier one, once that was used, and not
    before.
    """
    from ddpkit.training.device_prefetch import moved_ahead

    device = torch.device("cuda")
    batches = (torch.full((1 << 20,), float(number)).pin_memory() for number in range(50))
    sums = []
    for batch in moved_ahead(batches, device):
        torch.cuda._sleep(2_000_000)  # cycles: about a millisecond in which the host runs ahead
        sums.append(batch.mean())
    assert torch.stack(sums).tolist() == [float(number) for number in range(50)]


class LossInside(Brain):
    """Its compiled module returns the loss: an output of CUDA graphs, which the next step
    overwrites.
    """

    def compute_forward(self, batch, stage):
        loss = self.modules.net(batch[0].to(self.device), batch[1].to(self.device))
        self.log("loss again", loss)
        return loss

    def compute_objectives(self, predictions, batch, stage):
        return predictions


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_net(norm=group_norm)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.net(x), labels)


# of the compiler, on GPUs that have them
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize(
    "compiles",
    [{"compile_mode": "reduce-overhead"}, {"compile_mode": "default"}],
)
def test_losses_that_cuda_graphs_compute_are_reported_as_without(compiles):
    def fit(**options):
        brain = LossInside(
            {"net": WithLoss()},
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            run_opts={"noprogressbar": True, "max_grad_norm": 0.0, **options},
        )
        data = make_data()
        loader = {"batch_size": 16}
        return brain.fit(
            [1, 2, 3],
            data,
            data,
            train_loader_kwargs=loader,
            valid_loader_kwargs=loader,
        )

    usual = fit()
    compiled = fit(compile=True, **compiles)
    assert compiled.train_loss == pytest.approx(usual.train_loss, rel=1e-4)
    assert compiled.valid_loss == pytest.approx(usual.valid_loss, rel=1e-4)
    assert compiled.logged["train"]["loss again"] == pytest.approx(usual.train_loss, rel=1e-4)


def test_the_benchmark_of_gpus_runs():
    path = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    words = [sys.executable, str(path), "--rows", "small", "moved", "checkpoint"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stderr
    rows = {line[:32].strip(): line[32:].split() for line in done.stdout.splitlines()[2:]}
    assert rows["small, fp32"][-1] == "same"
    waits = float(rows["small, read later"][-4])
    assert waits < 0.05, "only now and then a step asks for the losses"
