"""Real ranks against one process: verdicts that hold and that do not, and the causes that are
named.
"""

from __future__ import annotations

import io
import os
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from ddpkit.brain import run_of
from ddpkit.dataloader import LoopedLoader
from ddpkit.distributed import get_world_size
from ddpkit.errors import ConfigError
from ddpkit.parity import causes
from ddpkit.parity.causes import Diagnosis
from ddpkit.parity.check import record, try_step
from ddpkit.parity.side import Side
from ddpkit.types import Stage
from tests.needs import needs_torch
from tests.rank_pool import RankPoolError
from tests.recipes import Regression, assert_same, make, points, sgd, weights

TIGHT = 1e-9


class OwnForward(nn.BatchNorm1d):
    def forward(self, input):  # noqa: A002 -- torch's name
        return super().forward(input)


class Codebook(nn.Module):
    """Moves a buffer by the rows it sees, and uses it: what ranks do not share."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4, dtype=torch.float64))

    def forward(self, rows):
        if self.training:
            self.centre.mul_(0.5).add_(rows.detach().mean(0))
        return rows - self.centre.clone()


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows):
        return rows


class RunningMean(nn.Module):
    """Normalises by the mean of past batches, which it holds in plain attributes."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(4, dtype=torch.float64)
        self.count = 0
        # written: no, compared: no
        self.expanded = torch.ones(1).expand(4)
        self.edges = torch.eye(4).to_sparse()

    def forward(self, rows):
        if self.training:
            self.count += 1
            self.mean = self.mean + (rows.detach().mean(0) - self.mean) / self.count
        return rows - self.mean


NETS = {
    "plain": list,
    "batch norm": lambda: [nn.BatchNorm1d(4)],
    "layer norm": lambda: [nn.LayerNorm(4)],
    "spectral norm": lambda: [nn.utils.spectral_norm(nn.Linear(4, 4))],
    "own batch norm": lambda: [OwnForward(4)],
    "both batch norms": lambda: [OwnForward(4), nn.BatchNorm1d(4)],
    "codebook": lambda: [Codebook()],
    "running mean": lambda: [RunningMean()],
    "unused": lambda: [Unused()],
    "dropout": lambda: [nn.Dropout(0.25), nn.BatchNorm1d(4)],
}


class Imaginary(nn.Module):
    """Its gradient has no real part."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1, dtype=torch.complex128))

    def forward(self, rows):
        return (rows.to(torch.complex128) @ self.weight).imag


def net(kind):
    torch.manual_seed(0)
    if kind == "imaginary":
        return Imaginary()
    if kind == "line":
        return nn.Sequential(nn.Linear(3, 1)).double()
    return nn.Sequential(nn.Linear(3, 4), *NETS[kind](), nn.Tanh(), nn.Linear(4, 1)).double()


# ------------------------------------------------------------------------------------------ recipes


class Sum(Regression):
    def compute_objectives(self, predictions, batch, stage):
        return (predictions - batch[1]).square().sum()


class Root(Regression):
    """Grows with the root of the batch."""

    def compute_objectives(self, predictions, batch, stage):
        return F.mse_loss(predictions, batch[1]) * len(predictions) ** 0.5


class TokenMean(Regression):
    def compute_objectives(self, predictions, batch, stage):
        weight = 0.2 + batch[1].sigmoid()
        return ((predictions - batch[1]).square() * weight).sum() / weight.sum()


class TokenSum(Regression):
    def compute_objectives(self, predictions, batch, stage):
        weight = 0.2 + batch[1].sigmoid()
        return ((predictions - batch[1]).square() * weight).sum(), weight.sum()


class PaddedFrames(Regression):
    """Masks the padding in the loss, and shows it to the model."""

    def compute_forward(self, batch, stage):
        lengths = (batch[0][:, 0].abs() * 4).long() + 1
        self.mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return self.modules.net((batch[0][:, None] * self.mask[..., None]).flatten(0, 1)).view(
            self.mask.shape
        )

    def compute_objectives(self, predictions, batch, stage):
        return ((predictions - batch[1]).square() * self.mask).sum(), self.mask.sum()


class Contrastive(Regression):
    """Every other sample of the batch is a negative."""

    def compute_objectives(self, predictions, batch, stage):
        return F.cross_entropy(predictions @ batch[1].T, torch.arange(len(predictions)))


class Centred(Regression):
    """The model looks across the batch."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0] - batch[0].mean(0))


class MeanOfMeans(Regression):
    """Claims to return a sum, and returns a mean."""

    def compute_objectives(self, predictions, batch, stage):
        return F.mse_loss(predictions, batch[1]), len(predictions)


class Masked(Regression):
    """Divides by the number of targets above one, of which a rank may have none."""

    def compute_objectives(self, predictions, batch, stage):
        mask = (batch[1] > 1).double()
        return ((predictions - batch[1]).square() * mask).sum() / mask.sum()


class Positive(Regression):
    """A mean over the positive targets, which is 0 where there are none."""

    def compute_objectives(self, predictions, batch, stage):
        mask = batch[1] > 0
        return ((predictions - batch[1]).square() * mask).sum() / mask.sum().clamp(min=1)


class NotANumber(Regression):
    """Is wrong on any number of processes."""

    def compute_objectives(self, predictions, batch, stage):
        return (predictions - predictions).sum().sqrt() * torch.inf


class UnderLaunchers(Regression):
    """Computes something else on several processes."""

    def compute_forward(self, batch, stage):
        return super().compute_forward(batch, stage) * get_world_size()


class Outside(Regression):
    def init_optimizers(self):
        self.extra = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.optimizer = torch.optim.SGD([*self.modules.parameters(), self.extra], lr=0.1)
        self.optimizers_dict = {"all": self.optimizer}

    def compute_objectives(self, predictions, batch, stage):
        return F.mse_loss(predictions * self.extra, batch[1])


class Partly(Regression):
    def compute_forward(self, batch, stage):
        return self.modules.net[0](batch[0]).mean(1, keepdim=True)


class Checkpointed(Regression):
    def compute_forward(self, batch, stage):
        return checkpoint(self.modules.net, batch[0], use_reentrant=False)


class FunctionalNoise(Regression):
    def compute_forward(self, batch, stage):
        rows = F.dropout(batch[0] + 0.1 * torch.randn_like(batch[0]), 0.1) * torch.rand(1)
        return self.modules.net(
            rows[torch.randperm(len(rows))] * 0.0 + rows * torch.bernoulli(torch.full((3,), 0.7))
        )


class ForeignNoise(Regression):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0] * np.random.rand())  # noqa: NPY002 -- users do


class LateNoise(Regression):
    """It is drawn in every step, and makes a difference in the last one only."""

    def compute_forward(self, batch, stage):
        drawn = torch.rand(())
        return self.modules.net(batch[0] * (1 + drawn if self.step > 5 else 1))


class Shrinking(Regression):
    """Changes the weights itself: every step is compared from the same ones all the same."""

    def fit_batch(self, batch):
        loss = super().fit_batch(batch)
        self.modules.net[0].weight.data.mul_(0.5)
        return loss


class Adversarial(Regression):
    """Two optimizers that step one after the other in each batch, through optimizers_step and by
    themselves.
    """

    def init_optimizers(self):
        self.optimizers_dict = {
            "net": torch.optim.SGD(self.modules.net.parameters(), lr=0.1),
            "critic": torch.optim.SGD(self.modules.critic.parameters(), lr=0.1),
        }

    def freeze_optimizers(self, optimizers):
        return {"critic": optimizers["critic"]}

    def fit_batch(self, batch):
        made = self.modules.net(batch[0])
        scale = self.progress.window.scale
        critic_loss = (self.modules.critic(batch[1]) - self.modules.critic(made.detach())).mean()
        (critic_loss * scale).backward()
        self.optimizers_step()
        self.modules.critic.requires_grad_(False)
        loss = self.modules.critic(made).square().mean()
        self.modules.critic.requires_grad_(True)
        (loss * scale).backward()
        self.optimizers_dict["net"].step()
        self.optimizers_dict["net"].zero_grad()
        return loss.detach()


class PastDDP(Regression):
    """Works on the inner module, of which DDP sees nothing, and steps by itself."""

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.raw_modules.net(batch[0]), batch, Stage.TRAIN)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class OldFitBatch(Regression):
    """As recipes write it that have never heard of weights."""

    def fit_batch(self, batch):
        should_step = self.step % self.grad_accumulation_factor == 0
        with self.no_sync(not should_step):
            loss = self.compute_objectives(
                self.compute_forward(batch, Stage.TRAIN),
                batch,
                Stage.TRAIN,
            )
            (loss / self.grad_accumulation_factor).backward()
        if should_step:
            self.optimizers_step()
        return loss.detach()


class OldSum(Sum, OldFitBatch):
    """A sum in such a fit_batch."""


class OldMasked(Masked, OldFitBatch):
    """A mean in such a fit_batch over something that a few samples may have none of."""


class Accumulating(Regression):
    """A fit_batch that weighs its losses in some way, and steps by the library's word or by
    counting.
    """

    weigh = "as it is"
    closes = "by name"
    back = False

    def fit_batch(self, batch):
        factor = self.grad_accumulation_factor
        window = self.progress.window
        closes = self.should_step if self.closes == "by name" else self.step % factor == 0
        with self.no_sync(not closes):
            loss = self.compute_objectives(
                self.compute_forward(batch, Stage.TRAIN),
                batch,
                Stage.TRAIN,
            )
            if self.weigh in {"by factor", "twice"}:
                weighed = loss / factor
            elif self.weigh == "by length":
                # 32 samples on two ranks of four each: 3 micro-batches, and then one
                weighed = loss / (1 if self.step == 4 else factor)
            else:
                weighed = loss
            if self.weigh in {"by scale", "twice"}:
                weighed = weighed * window.scale
            self.backward(weighed) if self.back else weighed.backward()
        if closes:
            self.optimizers_step()
        return loss.detach()


def accumulating(weigh, closes, back):
    return type("Own", (Accumulating,), {"weigh": weigh, "closes": closes, "back": back})


class Noisy(list):
    """Augments with every global stream there is."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + random.random() + np.random.rand() + torch.rand(  # noqa: NPY002 -- users do
            3, dtype=torch.float64
        ), target


# --------------------------------------------------------------------------------------- both sides


def recipe(cls, kind, options):
    if isinstance(cls, tuple):
        cls = accumulating(*cls)
    if cls is Adversarial:
        return cls(
            {"net": net(kind), "critic": nn.Linear(1, 1).double()},
            run_opts={"device": "cpu", **options},
        )
    return make(cls, net=net(kind), opt=sgd(), max_grad_norm=None, **options)


def training_set(kind, samples, batch_size):
    data = points(samples)
    kwargs = {"batch_size": batch_size, "shuffle": True}
    if kind == "augmented":
        data = Noisy(data)
    elif kind == "own order":
        return data, {
            "batch_size": batch_size,
            "sampler": np.random.default_rng(3).permutation(samples),
        }
    elif kind == "ready-made":
        return DataLoader(data, batch_size=batch_size, shuffle=True), {}
    elif kind == "looped":
        return LoopedLoader(DataLoader(data, batch_size=batch_size), 3), {}
    elif kind == "own batches":
        sampler = BatchSampler(SequentialSampler(range(samples)), batch_size, drop_last=False)
        return data, {"batch_sampler": sampler}
    elif kind == "whole batches":
        pairs = [points(batch_size, seed=seed) for seed in range(5)]
        return [tuple(torch.stack(part) for part in zip(*pair, strict=True)) for pair in pairs], {
            "batch_size": None
        }
    elif kind == "unsorted":
        shift = int(os.environ.get("RANK", "-1")) + 1
        data = data[shift:] + data[:shift]
    return data, kwargs


def on_rank(cls, kind, data, options, start):
    train_set, kwargs = training_set(*data)
    found = io.BytesIO()
    brain = recipe(cls, kind, options)
    torch.save(record(Side(brain, run_of(brain), train_set, kwargs, start)), found)
    return found.getvalue()


@pytest.fixture
def check(ranks):
    def run(
        cls=Regression,
        kind="plain",
        *,
        data="points",
        samples=44,
        world_size=2,
        batch_size=4,
        **options,
    ):
        brain = recipe(cls, kind, options)
        data = (data, samples, batch_size)
        side = Side(brain, run_of(brain), *training_set(*data))
        records = ranks.run(
            on_rank,
            cls,
            kind,
            data,
            options,
            try_step(side),
            world_size=world_size,
        )
        return Diagnosis(
            side,
            [torch.load(io.BytesIO(one), weights_only=True) for one in records],
        ).report()

    return run


# ----------------------------------------------------------------------------------------- it holds


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("kind", ["plain", "batch norm", "layer norm", "spectral norm"])
@pytest.mark.parametrize(("world_size", "factor"), [(2, 1), (2, 3), (3, 2)])
def test_a_clean_model_holds_to_rounding(check, world_size, factor, kind):
    """Also where the last window is short, and a rank has no sample left."""
    samples = 5 * 2 * world_size + (3 if world_size == 2 else 2)
    report = check(
        kind=kind,
        samples=samples,
        world_size=world_size,
        batch_size=2,
        grad_accumulation_factor=factor,
    )
    assert report.holds, report
    assert max(report.differences.values()) < TIGHT
    assert set(report.differences) == {f"net.{name}" for name, _ in net(kind).named_parameters()}
    steps = {1: "1, 2, 6", 2: "1, 2, 3", 3: "1, 2"}[factor]
    assert report.compared == (
        f"optimizer steps {steps} of {-(-6 // factor)} in an epoch, {2 * world_size * factor} "
        "samples in the first"
    )


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    "options",
    [
        {"global_batch_size": 10},
        {"global_batch_size": 12, "micro_batch_size": 2},
        {"loss_weighting": "batches"},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
        {"skip_nonfinite_grads": True},
    ],
)
def test_options(check, options):
    assert check(kind="batch norm", world_size=3, **options).holds


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    "data",
    ["augmented", "own order", "ready-made", "looped", "own batches", ("whole batches")],
)
def test_all_ways_of_giving_data(check, data):
    report = check(data=data, samples=23, batch_size=2, world_size=3)
    assert report.holds, report


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("cls", [TokenSum, Shrinking, Adversarial, Checkpointed, Partly])
def test_recipes_that_hold(check, cls):
    report = check(cls, "batch norm", samples=21)
    assert report.holds, report


@pytest.mark.costly
def test_padding_that_only_the_loss_masks_holds_without_a_batch_norm(check):
    report = check(PaddedFrames, samples=21)
    assert report.holds, report


@pytest.mark.costly
def test_tolerances_follow_what_the_model_computes_in(check):
    assert check(precision="bf16").tolerance == 5e-2
    assert check().tolerance == 1e-9


def test_float32_on_a_gpu_is_rough():
    context = SimpleNamespace(enabled=False)
    gradients = {"weight": torch.zeros(1)}
    on_cpu, on_gpu = (
        SimpleNamespace(device=device, training_ctx=context) for device in ("cpu", "cuda:0")
    )
    assert causes.tolerance_of(on_cpu, gradients) == 1e-3
    assert causes.tolerance_of(on_gpu, gradients) == causes.ROUGH


@pytest.mark.costly
def test_parameters_without_a_gradient(check):
    """DDP waits for them, in a check as in a training."""
    assert check(kind="unused", find_unused_parameters=True).holds
    with pytest.raises(RankPoolError, match="find_unused_parameters"):
        check(kind="unused")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layer norm", pytest.param("batch norm", marks=pytest.mark.slow)])
def test_divided_weights_have_the_gradients_of_one_process(check, kind):
    """On three ranks a layer of 4 rows is divided unevenly."""
    given = {"strategy": "fsdp", "fsdp_blocks": "Linear", "grad_accumulation_factor": 2}
    report = check(kind=kind, samples=35, world_size=3, batch_size=2, **given)
    assert report.holds, report
    assert max(report.differences.values()) < TIGHT
    assert set(report.differences) == {f"net.{name}" for name, _ in net(kind).named_parameters()}


# -------------------------------------------------------------------------------------- it does not


CAUSES = [
    (
        Sum,
        "loss",
        (
            r"of 12 samples are 1 \+ 1 times those of 4 and of 8 of them, and not 0\.333 "
            r"\+ 0\.667\."
        ),
    ),
    (Root, "loss", r"are 0\.577 \+ 0\.816 times"),
    (TokenMean, "loss", r"a mean over something else .* Return \(loss_sum, count\)"),
    (Contrastive, "batch-dependent", "in-batch negatives.* whatever the library"),
    (Centred, "batch-dependent", "statistics across samples.* whatever the library"),
    (MeanOfMeans, "loss", "the sum, not a mean, and the number to divide it by"),
    (Masked, "not finite", "of which a rank has none"),
    (
        NotANumber,
        "not finite",
        ("not finite in optimizer step 1. Where it is so on several processes only"),
    ),
]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize(("cls", "cause", "words"), CAUSES)
def test_a_cause_is_named(check, cls, cause, words, factor):
    report = check(cls, world_size=3, grad_accumulation_factor=factor)
    assert not report.holds
    assert report.kind == cause, report
    assert str(report).startswith("Parity does not hold: 3 processes and one with the joined batch")
    assert re.search(words, report.cause), report


@pytest.mark.costly
def test_a_loss_to_which_the_first_rank_adds_nothing_is_told(check):
    # the first four targets are negative
    report = check(Positive, data="looped", samples=40, world_size=3)
    assert (report.kind, "0 + 1 times those of 4 and of 8" in report.cause) == ("loss", True), (
        report
    )


@pytest.mark.costly
@needs_torch("2.13", "gloo sends no complex numbers")
def test_complex_gradients_are_compared_whole(check):
    assert check(Sum, "imaginary").kind == "loss"
    assert check(kind="imaginary").holds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "cause"),
    [
        (Sum, "loss"),
        pytest.param(TokenMean, "loss", marks=pytest.mark.slow),
        pytest.param(Contrastive, "batch-dependent", marks=pytest.mark.slow),
    ],
)
def test_a_cause_is_named_with_more_ranks_than_parameters(check, cls, cause):
    assert check(cls, "line", world_size=5).kind == cause


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    ("cls", "kind", "data", "cause", "words"),
    [
        (
            Regression,
            "own batch norm",
            "points",
            "batch norm",
            r"not over all rows of a step: net.1 \(OwnForward\)\.",
        ),
        (
            Regression,
            "both batch norms",
            "points",
            "batch norm",
            (
                r"all rows of a step: net.1 "
                r"\(OwnForward\)\."
            ),
        ),
        (
            Regression,
            "batch norm",
            "own batches",
            "batch norm",
            ("does not join the batches of a batch_sampler"),
        ),
        (Sum, "own batch norm", "points", "batch norm", ""),
        (Sum, "batch norm", "points", "loss", ""),
        (Contrastive, "batch norm", "points", "batch-dependent", ""),
        (
            PaddedFrames,
            "batch norm",
            "points",
            "batch-dependent",
            ("also that which a BatchNorm sees"),
        ),
        (Regression, "codebook", "points", "batch-dependent", "net.1.centre"),
        (Regression, "running mean", "points", "batch-dependent", "net.1.mean, net.1.count"),
        (PastDDP, "plain", "points", "not averaged", "Rank 1 steps with other gradients"),
        (UnderLaunchers, "plain", "points", "unknown", "do something else under a launcher"),
    ],
)
def test_other_causes_are_named(check, cls, kind, data, cause, words):
    report = check(cls, kind, data=data)
    assert not report.holds
    assert report.kind == cause, report
    assert re.search(words, report.cause), report


@pytest.mark.costly
def test_what_an_optimizer_has_and_no_module_is_averaged_too(check):
    report = check(Outside)
    assert report.holds, report


def test_ranks_with_other_data_are_told_of_it(check):
    with pytest.raises(RankPoolError, match="RankMismatchError"):
        check(data="unsorted")


@pytest.mark.costly
@pytest.mark.parametrize("cls", [Sum, pytest.param(TokenMean, marks=pytest.mark.slow)])
def test_a_cause_is_named_under_fsdp(check, cls):
    report = check(cls, strategy="fsdp")
    assert report.kind == check(cls).kind == "loss", report


@pytest.mark.costly
def test_a_batch_norm_that_the_run_does_not_synchronise_is_named(check):
    report = check(kind="batch norm", sync_batchnorm=False)
    assert report.kind == "batch norm", report
    assert "net.1 (BatchNorm1d)" in report.cause


@pytest.mark.costly
def test_what_the_users_batches_hold_together_is_the_same_everywhere(check):
    assert check(Contrastive, data="own batches").holds


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    ("cls", "kind", "cause"),
    [
        (Regression, "dropout", ""),
        (Sum, "dropout", "loss"),
        (FunctionalNoise, "plain", ""),
        (LateNoise, "plain", ""),
        (ForeignNoise, "plain", "randomness"),
    ],
)
def test_noise_is_switched_off_and_the_rest_is_compared(check, cls, kind, cause):
    report = check(cls, kind)
    assert report.kind == cause, report
    assert report.holds is (not cause)
    assert str(report).startswith("Parity is not proven") is (cls is ForeignNoise)


# ------------------------------------------------------------------------------------ own fit_batch


RIGHT = [
    ("by factor", "by count", False),
    ("by scale", "by count", False),
    ("by scale", ("by name"), False),
]
RIGHT += [
    ("as it is", "by name", True),
    ("as it is", "by count", True),
    ("by length", "by name", False),
]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("kind", ["plain", "spectral norm"])
@pytest.mark.parametrize("own", RIGHT)
def test_a_fit_batch_that_weighs_its_windows_once_holds(check, own, kind):
    report = check(own, kind, samples=32, grad_accumulation_factor=3)
    assert report.holds, report


WRONG = [
    ("by length", "by count", False),  # in the short last window
    ("by factor", "by name", False),
    ("by factor", "by name", True),
    ("by scale", "by name", True),
    ("as it is", "by count", False),
]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("own", WRONG)
def test_a_double_correction_is_told(check, own):
    report = check(own, samples=32, grad_accumulation_factor=3)
    assert not report.holds
    assert report.kind == "fit_batch", report
    assert "weighs its batches twice, not at all" in report.cause, report
    assert "have the same gradients now, but the training is not right" in str(report)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    "own",
    [("twice", "by count", False), ("twice", "by name", False), ("by scale", "by name", True)],
)
def test_a_double_correction_is_told_from_one_uneven_window(check, own):
    """13 samples on two ranks of four are one window, of eight and of five: no even one says that
    the loss is right.
    """
    report = check(own, samples=13, grad_accumulation_factor=2)
    assert report.kind == "fit_batch", report


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("samples", [37, 53, 13, 7])
def test_an_old_fit_batch_counts_small_batches_as_much_as_large_ones(check, samples, factor):
    """Also where the epoch is a single uneven window."""
    report = check(OldFitBatch, samples=samples, grad_accumulation_factor=factor)
    assert report.kind == "fit_batch", report
    assert "Call self.backward(loss)" in report.cause


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("samples", [44, 13])
def test_a_sum_in_an_old_fit_batch_is_a_sum(check, samples, factor):
    assert check(OldSum, samples=samples, grad_accumulation_factor=factor).kind == "loss"


@pytest.mark.costly
def test_micro_batches_without_a_finite_gradient_tell_nothing_of_their_weights(check):
    assert check(OldMasked, world_size=3, grad_accumulation_factor=2).kind == "not finite"


@pytest.mark.costly
def test_an_old_fit_batch_with_full_batches_holds(check):
    assert check(OldFitBatch, samples=48, grad_accumulation_factor=2).holds


class WarmsUp(Regression):
    """Weighs its loss by how far the run has come."""

    def fit_batch(self, batch):
        weight = self.step + self.optimizer_step
        self.backward(
            weight
            * self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        )
        if self.should_step:
            self.optimizers_step()
        return torch.zeros(())


@pytest.mark.costly
def test_a_loss_that_changes_with_the_step_is_no_double_correction(check):
    report = check(WarmsUp, samples=32, grad_accumulation_factor=2)
    assert report.holds, report


# ---------------------------------------------------------------------------------- what is refused


class NoStep(Regression):
    def fit_batch(self, batch):
        return torch.zeros(())


class Broken(Regression):
    def compute_forward(self, batch, stage):
        raise KeyError("no such thing")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(points(8))


@pytest.mark.parametrize(
    ("cls", "train_set", "error", "words"),
    [
        (
            NoStep,
            points(8),
            ConfigError,
            "NoStep.fit_batch made no optimizer step with a gradient in a window of 1",
        ),
        (Broken, points(8), KeyError, "no such thing"),
        (Regression, Stream(), ConfigError, "their samples are not known"),
    ],
)
def test_what_is_wrong_with_the_recipe_alone_is_said_before_anything_is_started(
    cls,
    train_set,
    error,
    words,
):
    brain = recipe(cls, "batch norm", {})
    before = weights(brain)
    with pytest.raises(error, match=words):
        try_step(Side(brain, run_of(brain), train_set, {"batch_size": 2}))
    assert_same(weights(brain), before)


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(ConfigError, match="check_parity expects a number >= 2"):
        make(Regression, check_parity=1)


# ------------------------------------------------------------------------------ the verdict is true


def train(cls, kind, batch_size, samples, factor):
    brain = recipe(cls, kind, {"grad_accumulation_factor": factor})
    brain.fit(
        range(1, 2),
        points(samples),
        train_loader_kwargs={"batch_size": batch_size, "shuffle": True},
    )
    return weights(brain)


@pytest.mark.corner
@pytest.mark.parametrize(
    ("cls", "kind", "holds"),
    [
        pytest.param(Regression, "batch norm", True, marks=pytest.mark.slow),
        (TokenSum, "batch norm", True),
        (Regression, "own batch norm", False),
        pytest.param(TokenMean, "plain", False, marks=pytest.mark.slow),
        pytest.param(Contrastive, "plain", False, marks=pytest.mark.slow),
        (OldFitBatch, "plain", False),  # only because of the last, uneven batch
    ],
)
def test_the_verdict_is_that_of_a_training(check, ranks, cls, kind, holds):
    assert check(cls, kind, samples=29).holds is holds
    several = ranks.run(train, cls, kind, 4, 29, 1, world_size=2)[0]
    one = train(cls, kind, 8, 29, 1)
    distance = max(float((several[name].double() - one[name].double()).abs().max()) for name in one)
    assert distance < 1e-10 if holds else distance > 1e-4
