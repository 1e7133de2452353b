"""The rehearsal: verdicts that hold and that do not, the causes, what is left unchanged, and what is refused."""

from __future__ import annotations

import logging
import math
import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ddpkit.dataloader import LoopedLoader
from ddpkit.errors import ConfigError, DdpkitError, ParityError
from ddpkit.parity import require_one_process
from ddpkit.parity_report import Comparison
from ddpkit.types import Stage
from tests.contract.recipes import Regression, assert_same, make, points, weights

TIGHT = 1e-9


def net(*middle, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=bias), *middle, nn.Tanh(), nn.Linear(4, 1)).double()


def rehearse(cls=Regression, module=None, *, samples=44, world_size=2, batch_size=4, windows=3, brain=None, **opts):
    brain = make(cls, net=net() if module is None else module, **opts) if brain is None else brain
    kwargs = {"batch_size": batch_size, "shuffle": True}
    return brain.rehearse(points(samples), world_size, kwargs, windows=windows)


# ------------------------------------------------------------------------------------------- it holds


@pytest.mark.parametrize("middle", [None, nn.BatchNorm1d(4), nn.LayerNorm(4), nn.utils.spectral_norm(nn.Linear(4, 4))])
@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_clean_model_holds_to_rounding(world_size, factor, middle):
    """Also where the last window is short, and a rank has no sample left."""
    samples = 5 * 2 * world_size + (3 if world_size == 2 else 2)
    module = net(*([] if middle is None else [middle]))
    report = rehearse(
        module=module, samples=samples, world_size=world_size, batch_size=2, grad_accumulation_factor=factor
    )
    assert report.holds, report
    assert report.kinds == ()
    assert max(row.relative for row in report.rows) < TIGHT
    assert {row.parameter for row in report.rows} == {f"net.{name}" for name, _ in module.named_parameters()}
    assert report.num_windows == math.ceil(6 / factor)
    assert report.windows == ((0, 1, 5) if factor == 1 else (0, 1))
    assert report.samples == 2 * world_size * factor


class Counting(Regression):
    """Tells what each pretended rank was given."""

    calls = ()

    def on_fit_batch_start(self, batch, should_step):
        window = self.progress.window
        self.calls.append((self.rank, len(batch[0]), window.count, window.scale, should_step, self.step))


def test_the_ranks_get_what_real_ranks_get():
    Counting.calls = []
    assert rehearse(Counting, samples=17, world_size=3, batch_size=2, windows=2).holds
    first = [(rank, 2, 2, 1.0, True, 1) for rank in range(3)]
    last = [(0, 2, 2, 6 / 5, True, 3), (1, 2, 2, 6 / 5, True, 3), (2, 1, 1, 3 / 5, True, 3)]
    joined = [(0, 6, 6, 1.0, True, 1), (0, 5, 5, 1.0, True, 3)]
    seen = [call for call in Counting.calls if call[1] < 5]
    assert seen == [*first, *last, *first]  # once more for the notes
    assert [call for call in Counting.calls if call[1] >= 5] == [joined[0], joined[0], *joined]


def test_the_joined_batch_is_that_of_one_process():
    """Same positions of the same shuffled order, as a run of one process with the joined batch sees them."""
    brain = make(net=net())
    brain.rehearse(points(24), 3, {"batch_size": 2, "shuffle": True}, windows=1)
    joined = [batch for batch in brain.trained_on if len(batch) == 6]
    alone = make(net=net())
    alone.fit(range(1, 2), points(24), train_loader_kwargs={"batch_size": 6, "shuffle": True})
    assert torch.equal(joined[-1], alone.trained_on[-1])


@pytest.mark.parametrize(
    "options",
    [
        {"global_batch_size": 10},
        {"global_batch_size": 12, "micro_batch_size": 2},
        {"loss_weighting": "batches"},
    ],
)
def test_batch_options(options):
    assert rehearse(world_size=3, **options).holds


class Tokens(Regression):
    """A mean over the targets above zero, told as a sum and a count."""

    def compute_objectives(self, predictions, batch, stage):
        weight = (batch[1] > 0).double()
        return ((predictions - batch[1]).square() * weight).sum(), weight.sum()


@pytest.mark.parametrize("factor", [1, 2])
def test_sums_with_counts_hold(factor):
    report = rehearse(Tokens, world_size=4, batch_size=2, samples=27, grad_accumulation_factor=factor)
    assert report.holds, report


def test_single_precision_and_autocast_have_tolerances_of_their_own():
    class Single(Regression):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch[0].float())

        def compute_objectives(self, predictions, batch, stage):
            return F.mse_loss(predictions.float(), batch[1].float())

    report = rehearse(Single, net(nn.BatchNorm1d(4)).float())
    assert report.holds, report
    assert {row.tolerance for row in report.rows} == {1e-3}
    report = rehearse(Single, net(nn.BatchNorm1d(4)).float(), precision="bf16")
    assert report.holds, report
    assert {row.tolerance for row in report.rows} == {5e-2}

    class SingleSum(Single):
        def compute_objectives(self, predictions, batch, stage):
            return super().compute_objectives(predictions, batch, stage) * len(predictions)

    assert rehearse(SingleSum, net().float(), precision="bf16").kinds == ("sum loss",)


def test_compiled_modules_are_rehearsed_as_they_are_written():
    assert rehearse(module=net(nn.BatchNorm1d(4)), compile=True).holds


def test_users_samplers_and_ready_made_loaders():
    data = points(23)
    order = list(range(0, 23, 2)) + list(range(1, 23, 2))
    assert make(net=net()).rehearse(data, 3, {"sampler": order, "batch_size": 2}).holds
    assert make(net=net()).rehearse(DataLoader(data, batch_size=2, shuffle=True), 3).holds
    looped = LoopedLoader(DataLoader(data, batch_size=2), 3)
    inner = looped.loader
    assert make(net=net()).rehearse(looped, 3).num_windows == 3
    assert looped.loader is inner, "the user's loader was divided for a pretended rank"


class Noisy(list):
    """Augments with every global stream there is."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + random.random() + np.random.rand() + torch.rand(3, dtype=torch.float64), target  # noqa: NPY002 -- users do


def test_augmentation_is_the_same_on_both_sides():
    assert make(net=net()).rehearse(Noisy(points(24)), 3, {"batch_size": 2}).kinds == ()


# ------------------------------------------------------------------------------------------- it does not


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


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize(
    ("recipe", "kind", "words"),
    [
        (Sum, "sum loss", "is a sum over the batch: the gradients of 3 ranks, which are averaged, are 0.333 times"),
        (Root, "sum loss", r"grows with the batch \(3 ranks' batches joined: 1.73 times\)"),
        (TokenMean, "own weights", r"a mean over something else than samples.* Return \(loss_sum, count\)"),
        (Contrastive, "batch-dependent loss", "in-batch negatives.* whatever the library"),
        (Centred, "batch-dependent model", "changes with the other samples.* whatever the library"),
        (MeanOfMeans, "counted loss", "Return the sum, not a mean"),
        (Masked, "not finite", "of which a rank has none"),
    ],
)
def test_a_cause_is_named(recipe, kind, words, factor):
    report = rehearse(recipe, world_size=3, grad_accumulation_factor=factor)
    assert not report.holds
    assert report.kinds == (kind,), report
    assert str(report).startswith("Parity does not hold: 3 pretended ranks and one process")
    assert re.search(words, report.causes[0].words), report


def test_a_sum_is_named_from_uneven_windows_too():
    report = rehearse(Sum, samples=7, world_size=3, batch_size=4)
    assert report.kinds == ("sum loss",), report


class OwnForward(nn.BatchNorm1d):
    def forward(self, input):  # noqa: A002 -- torch's name
        return super().forward(input)


def test_a_batchnorm_that_is_not_synchronised_is_named():
    report = rehearse(module=net(OwnForward(4)))
    assert report.kinds == ("batch norm",), report
    assert "net.1 (OwnForward)" in report.causes[0].words
    held = net(OwnForward(4), nn.BatchNorm1d(4))
    report = rehearse(module=held)
    assert report.kinds == ("batch norm",), report
    assert "net.2" not in report.causes[0].words


def test_a_batchnorm_in_a_frozen_entry_is_named():
    """DDP leaves an entry without trainable parameters alone, and so its statistics."""

    class Frozen(Regression):
        def compute_forward(self, batch, stage):
            return self.modules.net(self.modules.front(batch[0]))

    front = nn.BatchNorm1d(3).double().requires_grad_(False)
    brain = Frozen({"net": net(), "front": front}, run_opts={"device": "cpu"})
    report = rehearse(brain=brain)
    assert report.kinds == ("batch norm",), report
    assert "front (BatchNorm1d)" in report.causes[0].words
    trained = Frozen({"net": net(), "front": nn.BatchNorm1d(3).double()}, run_opts={"device": "cpu"})
    assert rehearse(brain=trained).holds


def test_a_synchronised_batchnorm_does_not_make_the_model_depend_on_the_batch():
    assert rehearse(Contrastive, net(nn.BatchNorm1d(4))).kinds == ("batch-dependent loss",)


def test_two_causes_are_both_named():
    assert rehearse(Sum, net(OwnForward(4))).kinds == ("batch norm", "sum loss")


def test_a_batch_sampler_joins_nothing_but_batchnorm():
    """One process works on the user's batches one after the other, several ranks on several at once."""

    def with_batches(cls, module, samples=23):
        sampler = BatchSampler(SequentialSampler(range(samples)), 4, drop_last=False)
        return make(cls, net=module).rehearse(points(samples), 3, {"batch_sampler": sampler})

    assert with_batches(Regression, net()).holds
    assert with_batches(OldFitBatch, net(), 24).holds
    assert with_batches(Contrastive, net()).holds, "the batches are the same on any number of processes"
    report = with_batches(Regression, net(nn.BatchNorm1d(4)))
    assert report.kinds == ("batch norm",), report
    assert "batches that are made already" in report.causes[0].words


def test_whole_batches_of_a_dataset_are_not_joined_either():
    batches = [tuple(torch.stack(part) for part in zip(*points(4, seed=seed), strict=True)) for seed in range(5)]
    assert make(net=net()).rehearse(batches, 2, {"batch_size": None}).holds


class Codebook(nn.Module):
    """Moves a buffer by the rows it sees, and uses it: what ranks do not share."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4, dtype=torch.float64))

    def forward(self, rows):
        if self.training:
            self.centre.mul_(0.5).add_(rows.detach().mean(0))
        return rows - self.centre.clone()


def test_buffers_that_move_are_told():
    report = rehearse(module=net(Codebook()))
    assert not report.holds
    assert "net.1.centre" in report.causes[0].words


def test_parameters_outside_modules_are_told():
    class Outside(Regression):
        def init_optimizers(self):
            self.extra = nn.Parameter(torch.ones(1, dtype=torch.float64))
            self.optimizer = torch.optim.SGD([*self.modules.parameters(), self.extra], lr=0.1)
            self.optimizers_dict = {"all": self.optimizer}

        def compute_objectives(self, predictions, batch, stage):
            return F.mse_loss(predictions * self.extra, batch[1])

    report = rehearse(Outside)
    assert not report.holds
    assert report.kinds == ("outside modules",)
    assert "optimizer 'all', group 0, parameter 4" in report.causes[0].words
    assert "but real ranks would not" in str(report).splitlines()[0]


def test_parameters_without_a_gradient_are_noted():
    class Partly(Regression):
        def compute_forward(self, batch, stage):
            return self.modules.net[0](batch[0]).mean(1, keepdim=True)

    report = rehearse(Partly)
    assert report.holds
    assert "net.2.weight gets no gradient (2 such in all)" in report.notes[0]
    assert not rehearse(Partly, find_unused_parameters=True).notes


# ------------------------------------------------------------------------------------------- noise


def test_dropout_is_named_and_the_rest_is_proven():
    report = rehearse(module=net(nn.Dropout(0.25), nn.BatchNorm1d(4)))
    assert report.holds, report
    assert report.kinds == ("randomness",)
    assert "net.1 (Dropout, 0.25)" in report.causes[0].words
    assert max(row.relative for row in report.rows) < TIGHT


def test_behind_dropout_a_defect_is_still_found():
    report = rehearse(Sum, net(nn.Dropout(0.25)))
    assert not report.holds
    assert report.kinds == ("randomness", "sum loss")


def test_noise_that_shows_later_is_noticed():
    """It is drawn in every step, and makes a difference in the last one only."""

    class Late(Regression):
        def compute_forward(self, batch, stage):
            drawn = torch.rand(())
            return self.modules.net(batch[0] * (1 + drawn if self.step > 5 else 1))

    report = rehearse(Late)
    assert report.holds, report
    assert report.kinds == ("randomness",)
    assert report.windows[-1] == 5


class FunctionalNoise(Regression):
    def compute_forward(self, batch, stage):
        rows = F.dropout(batch[0] + 0.1 * torch.randn_like(batch[0]), 0.1) * torch.rand(1)
        return self.modules.net(rows[torch.randperm(len(rows))] * 0.0 + rows * torch.bernoulli(torch.full((3,), 0.7)))


def test_functional_noise_is_switched_off():
    report = rehearse(FunctionalNoise)
    assert report.holds, report
    assert "in compute_forward or compute_objectives" in report.causes[0].words


def test_noise_that_cannot_be_switched_off_leaves_parity_unproven():
    class Foreign(Regression):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch[0] * np.random.rand())  # noqa: NPY002 -- users do

    report = rehearse(Foreign)
    assert not report.holds
    assert report.kinds == ("randomness",)
    assert str(report).startswith("Parity is not proven")


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(())], ids=["python", "torch"])
def test_ranks_that_part_by_chance_would_hang(draw):
    """Also where the chance can be switched off for the comparison."""

    class LayerDrop(Regression):
        def compute_forward(self, batch, stage):
            rows = self.modules.net[0](batch[0])
            if draw() < 0.5:
                rows = self.modules.net[1](rows)
            return self.modules.net[3](rows)

    with pytest.raises(ParityError, match=r"rank \d at BatchNorm 'net.1'.* wait for each other there for ever"):
        rehearse(LayerDrop, net(nn.BatchNorm1d(4)), world_size=4)


# ------------------------------------------------------------------------------------------- own fit_batch


class Adversarial(Regression):
    """Two optimizers that step one after the other in each batch, through optimizers_step and by themselves."""

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
        loss = self.modules.critic(made).square().mean()
        (loss * scale).backward()
        self.optimizers_dict["net"].step()
        self.optimizers_dict["net"].zero_grad()
        return loss.detach()


def adversarial(cls=Adversarial, **modules):
    return cls({"net": net(), "critic": nn.Linear(1, 1).double()} | modules, run_opts={"device": "cpu"})


def test_a_recipe_with_two_optimizers_and_its_own_fit_batch_holds():
    brain = adversarial(net=net(nn.BatchNorm1d(4)))
    before = weights(brain)
    report = rehearse(brain=brain, samples=21)
    assert report.holds, report
    assert len(report.rows) == 8
    assert_same(weights(brain), before)


def test_a_defect_in_the_second_step_is_found():
    class Wrong(Adversarial):
        def fit_batch(self, batch):
            loss = self.modules.critic(self.modules.net(batch[0])).square().sum()
            loss.backward()
            self.optimizers_dict["net"].step()
            self.modules.zero_grad()
            return loss.detach()

    assert rehearse(brain=adversarial(Wrong)).kinds == ("sum loss",)


class OldFitBatch(Regression):
    """As recipes write it that have never heard of weights."""

    def fit_batch(self, batch):
        should_step = self.step % self.grad_accumulation_factor == 0
        with self.no_sync(not should_step):
            loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
            (loss / self.grad_accumulation_factor).backward()
        if should_step:
            self.optimizers_step()
        return loss.detach()


@pytest.mark.parametrize("factor", [1, 2])
def test_an_old_fit_batch_counts_small_batches_as_much_as_large_ones(factor):
    assert rehearse(OldFitBatch, samples=40, grad_accumulation_factor=factor).holds, "all batches are full"
    report = rehearse(OldFitBatch, samples=37 if factor == 1 else 53, grad_accumulation_factor=factor)
    assert report.kinds == ("fit_batch",), report
    assert "Call self.backward(loss)" in report.causes[0].words


@pytest.mark.parametrize(
    ("fit_batch", "words"),
    [
        (lambda self, batch: torch.zeros(()), "made no optimizer step in a window of 1 micro-batch"),
        (
            lambda self, batch: (torch.autograd.backward(self.modules.net(batch[0]).mean()), self.optimizers_step())[0],
            r"makes gradients without loss.backward\(\)",
        ),
    ],
)
def test_a_fit_batch_that_cannot_be_rehearsed(fit_batch, words):
    with pytest.raises(ConfigError, match=words):
        rehearse(type("Odd", (Regression,), {"fit_batch": fit_batch}))


# ------------------------------------------------------------------------------------------- errors


class Stream(IterableDataset):
    def __iter__(self):
        return iter(points(8))


@pytest.mark.parametrize(
    ("data", "kwargs", "words"),
    [
        (Stream(), {"batch_size": 2}, "an IterableDataset, which has no positions"),
        (
            points(8),
            {"batch_size": 2, "sampler": DistributedSampler(range(8), num_replicas=2, rank=0)},
            "divided already",
        ),
    ],
)
def test_data_that_cannot_be_rehearsed(data, kwargs, words):
    with pytest.raises(ConfigError, match=f"check_parity cannot rehearse this training set: .*{words}"):
        make(net=net()).rehearse(data, 2, kwargs)


def test_what_is_no_single_process_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="check_parity=1: pretend to be at least 2 ranks"):
        rehearse(world_size=1)
    with pytest.raises(ConfigError, match=r"(?s)data_parallel_backend=True.*python train.py hparams.yaml --check_par"):
        require_one_process(2, data_parallel=True)
    monkeypatch.setattr("ddpkit.parity.get_world_size", lambda: 3)
    with pytest.raises(ConfigError, match=r"(?s)has started 3. Start one:.*hparams.yaml --check_parity=2"):
        require_one_process(2, data_parallel=False)


def test_an_error_of_the_recipe_is_the_recipe_s():
    class Broken(Regression):
        def compute_forward(self, batch, stage):
            raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        rehearse(Broken)


def test_what_fails_on_a_rank_alone_is_a_matter_of_parity():
    with pytest.raises(
        ParityError, match="pretended ranks fails where one process does not, with ValueError: Expected"
    ):
        rehearse(module=net(OwnForward(4)), batch_size=1)


def test_activation_checkpointing():
    """Its second forward pass, inside the joint backward pass, cannot meet anybody."""

    class Checkpointed(Regression):
        def compute_forward(self, batch, stage):
            return checkpoint(self.modules.net, batch[0], use_reentrant=False)

    assert rehearse(Checkpointed).holds
    with pytest.raises(ConfigError, match="Switch checkpointing off for the rehearsal"):
        rehearse(Checkpointed, net(nn.BatchNorm1d(4)))


# ------------------------------------------------------------------------------------------- nothing is changed


def streams():
    legacy = np.random.get_state()  # noqa: NPY002 -- the global stream
    return random.getstate(), tuple(legacy[1]), torch.get_rng_state().tolist()


class Meddling(Regression):
    """Changes what it can in on_stage_start and around a step."""

    def on_stage_start(self, stage, epoch=None):
        self.modules.net[0].requires_grad_(False)
        self.optimizer.param_groups[0]["lr"] = 7.0
        self.max_grad_norm = 1.0

    def fit_batch(self, batch):
        loss = super().fit_batch(batch)
        with torch.no_grad():
            for parameter in self.modules.parameters():
                parameter.mul_(0.5)
        return loss

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        raise AssertionError("what follows a step is not rehearsed")


@pytest.mark.parametrize("recipe", [Regression, Meddling])
def test_nothing_is_changed(recipe, tmp_path):
    module = net(nn.BatchNorm1d(4), nn.Dropout(0.1), nn.utils.spectral_norm(nn.Linear(4, 4)))
    optimizer = lambda parameters: torch.optim.Adam(parameters, lr=0.1)
    trained = make(Regression, net=module, opt=optimizer, folder=tmp_path)
    trained.fit(range(1, 2), points(8), train_loader_kwargs={"batch_size": 4})
    trained.checkpointer.save_checkpoint()
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))

    brain = make(recipe, net=module, opt=optimizer, folder=tmp_path)
    brain.modules.eval()
    marker = module[0].weight.grad = torch.ones_like(module[0].weight)
    before, random_before = weights(brain), streams()
    assert rehearse(brain=brain).kinds
    assert streams() == random_before
    assert_same(weights(brain), before)
    assert module[0].weight.grad is marker
    assert all(one.grad is None for one in list(module.parameters())[1:])
    assert all(one.requires_grad for one in module.parameters())
    assert not any(one.training for one in brain.modules.modules())
    assert all("forward" not in vars(one) for one in brain.modules.modules())
    assert "step" not in vars(brain.optimizer)
    assert brain.checkpointer.recoverables.keys() == {"net", "brain", "ranks", "optimizer"}
    assert (brain.step, brain.optimizer_step, brain.max_grad_norm) == (0, 2, 5.0)
    assert brain.optimizer.param_groups[0]["lr"] == 0.1
    assert {int(state["step"]) for state in brain.optimizer.state.values()} == {2}
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == files


def test_every_window_begins_with_the_same_weights():
    class Shrinking(Regression):
        def fit_batch(self, batch):
            loss = super().fit_batch(batch)
            self.modules.net[0].weight.data.mul_(0.5)
            return loss

    assert rehearse(Shrinking).holds


def test_nothing_is_changed_by_a_rehearsal_that_fails():
    brain = make(Sum, net=net(nn.BatchNorm1d(4)), check_parity=2)
    before, random_before = weights(brain), streams()
    with pytest.raises(ParityError, match="The loss is a sum"):
        brain.fit(range(1, 2), points(16), train_loader_kwargs={"batch_size": 4})
    assert streams() == random_before
    assert_same(weights(brain), before)


def test_a_rehearsal_does_not_change_the_training_that_follows():
    brain, other = (make(net=net(nn.BatchNorm1d(4), nn.Dropout(0.5))) for _ in range(2))
    rehearse(brain=brain)
    for one in (brain, other):
        torch.manual_seed(3)
        one.fit(range(1, 3), points(20), train_loader_kwargs={"batch_size": 4, "shuffle": True})
    assert_same(weights(brain), weights(other))


# ------------------------------------------------------------------------------------------- the option, the report


def test_the_option_rehearses_instead_of_training(caplog):
    caplog.set_level(logging.INFO, "ddpkit")
    brain = make(net=net(), check_parity=2)
    before = weights(brain)
    brain.fit(range(1, 2), points(16), points(4), train_loader_kwargs={"batch_size": 4})
    assert_same(weights(brain), before)
    assert "Parity holds: 2 pretended ranks" in caplog.text
    assert math.isnan(brain.evaluate(points(4)))
    assert "nothing is evaluated" in caplog.text
    assert brain.losses == []


def test_a_failed_rehearsal_is_an_error_that_carries_the_report():
    with pytest.raises(ParityError) as raised:
        make(Sum, net=net(), check_parity=2).fit(range(1, 2), points(16), train_loader_kwargs={"batch_size": 4})
    assert isinstance(raised.value, DdpkitError)
    assert isinstance(raised.value, AssertionError)
    assert "net.2.weight" in str(raised.value)
    assert "differs" in str(raised.value)


def deep():
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(7)), nn.Linear(3, 1)).double()


def test_the_report_lists_the_worst_and_counts_the_rest():
    lines = rehearse(Sum, deep()).text(limit=4).splitlines()
    table = lines[2:8]
    assert table[0].split() == ["parameter", "largest", "difference", "relative", "verdict"]
    assert len({line.index(word) for line, word in zip(table[:5], ["verdict", *["differs"] * 4], strict=True)}) == 1
    assert table[5] == "  and 12 more differ, 0 more are equal"
    assert "  and 6 more are equal" in str(rehearse(module=deep())).splitlines()


def test_a_comparison_is_relative_to_the_gradient_of_the_parameter_with_a_floor():
    comparison = Comparison()
    large, small = torch.tensor([1.0]), torch.tensor([1e-8])
    assert comparison.add({"a": large, "b": small}, {"a": large, "b": 3 * small})  # rounding beside a gradient of 1
    assert not comparison.add({"b": small}, {"b": 3 * small})  # alone it is a difference
    assert comparison.rows()[0].parameter == "b"
    assert not Comparison().add({"a": None}, {"a": large})
    assert not Comparison().add({"a": large * float("nan")}, {"a": large})
    assert not Comparison().add_all([{"a": large}], [{"a": large}, {"a": large}])
    assert Comparison(torch.bfloat16).add({"a": large}, {"a": 1.03 * large})
    assert not Comparison().add({"a": large}, {"a": 1.03 * large})


# ------------------------------------------------------------------------------------------- accumulation


def accumulating(weigh, *, closes, back=False):
    """Make a recipe whose fit_batch weighs its losses in some way, and steps where ``closes`` says so."""

    class Own(Regression):
        def fit_batch(self, batch):
            with self.no_sync(not closes(self)):
                loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
                self.backward(weigh(self, loss)) if back else weigh(self, loss).backward()
            if closes(self):
                self.optimizers_step()
            return loss.detach()

    return Own


def by_modulo(brain):
    return brain.step % brain.grad_accumulation_factor == 0


def by_name(brain):
    return brain.should_step


def by_factor(brain, loss):
    return loss / brain.grad_accumulation_factor


def by_scale(brain, loss):
    return loss * brain.progress.window.scale


def by_length(brain, loss):
    """32 samples on two ranks of four each, in windows of 3: 3 micro-batches, and then one."""
    return loss / (1 if brain.step == 4 else brain.grad_accumulation_factor)


def as_it_is(brain, loss):
    return loss


RIGHT = [(by_factor, by_modulo, False), (by_scale, by_modulo, False), (by_scale, by_name, False)]
RIGHT += [(as_it_is, by_name, True), (as_it_is, by_modulo, True), (by_length, by_name, False)]


@pytest.mark.parametrize(("weigh", "closes", "back"), RIGHT)
def test_a_fit_batch_that_weighs_its_windows_once_holds(weigh, closes, back):
    report = rehearse(accumulating(weigh, closes=closes, back=back), samples=32, grad_accumulation_factor=3)
    assert report.holds, report
    assert report.kinds == ()


@pytest.mark.parametrize(
    ("weigh", "closes", "back", "words"),
    [
        (by_length, by_modulo, False, "corrects the short last window of an epoch twice"),
        (by_factor, by_name, False, "corrects the short last window of an epoch twice, or not at all"),
        (by_factor, by_name, True, "weighs the micro-batches of a window twice.*self.backward weighs the loss already"),
        (by_scale, by_name, True, "weighs the micro-batches of a window twice.*self.backward weighs the loss already"),
        (as_it_is, by_modulo, False, r"or not at all: the gradients of 3 are 3 times .* Call self.backward\(loss\)"),
    ],
)
def test_a_double_correction_is_told(weigh, closes, back, words):
    report = rehearse(accumulating(weigh, closes=closes, back=back), samples=32, grad_accumulation_factor=3)
    assert not report.holds
    assert report.kinds == ("accumulation",), report
    assert re.search(words, report.causes[0].words), report
    assert "but an optimizer step is not that of its samples" in str(report)
