"""Gradients in one process: clipping, accumulation, what is not finite, and recipes that take steps
themselves.
"""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from ddpkit.brain import Brain
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError, NonFiniteLossError
from ddpkit.types import Stage
from tests.recipes import (
    QUIET,
    FrontAndNet,
    Gan,
    Killed,
    Mortal,
    Regression,
    SpeechBrainFitBatch,
    assert_same,
    gan_modules,
    linear,
    make,
    points,
    sgd,
    weights,
)


def flat_change(brain, before):
    return torch.cat([(value - before[name]).flatten() for name, value in weights(brain).items()])


def assert_close(found, expected, tolerance=1e-12):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance)


# ----------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("max_grad_norm", [-1, 0, None, -0.5])
def test_no_norm_no_clipping(max_grad_norm):
    """The step is exactly lr times the negative gradient, neither turned round nor zeroed nor
    scaled.
    """
    data = [(100 * x, y) for x, y in points(4)]
    brain = make(opt=sgd(lr=1.0), max_grad_norm=max_grad_norm)
    twin = linear()
    before = weights(brain)
    inputs = torch.stack([x for x, _ in data])
    targets = torch.stack([y for _, y in data])
    nn.functional.mse_loss(twin(inputs), targets).backward()
    expected = -torch.cat([p.grad.flatten() for p in twin.parameters()])
    assert expected.norm() > 100
    brain.fit([1], data, train_loader_kwargs={"batch_size": 4})
    torch.testing.assert_close(flat_change(brain, before), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", ["one group", "vectors apart", "two optimizers", "two groups"])
def test_all_groups_of_all_optimizers_are_clipped_together(case):
    class Grouped(Regression):
        def init_optimizers(self):
            net = self.modules.net
            if case == "two optimizers":
                self.optimizers_dict = {
                    "first": torch.optim.SGD([net.bias], lr=1.0),
                    "second": torch.optim.SGD([net.weight], lr=1.0),
                }
            elif case == "two groups":
                groups = [{"params": [net.bias]}, {"params": [net.weight]}]
                self.optimizers_dict = {"all": torch.optim.SGD(groups, lr=1.0)}
            else:
                super().init_optimizers()

    data = [(1000 * x, y) for x, y in points(4)]
    brain = make(
        Grouped,
        opt=sgd(lr=1.0),
        max_grad_norm=0.25,
        remove_vector_weight_decay=case == ("vectors apart"),
    )
    before = weights(brain)
    brain.fit([1], data, train_loader_kwargs={"batch_size": 4})
    assert float(flat_change(brain, before).norm()) == pytest.approx(0.25, rel=1e-6)


def test_small_gradients_are_left_alone():
    free = make(max_grad_norm=None)
    clipped = make(max_grad_norm=1e6)
    for brain in (free, clipped):
        brain.fit([1, 2], points(6))
    assert_same(weights(clipped), weights(free))


# ------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize(("samples", "factor"), [(5, 2), (5, 8), (8, 3), (7, 2), (9, 2)])
def test_the_short_window_is_stepped_with_the_right_divisor(samples, factor):
    """Windows of ``factor`` batches of two, the last shorter: each is one batch of all its
    samples.
    """
    data = points(samples)
    batch = 2
    accumulated = make(grad_accumulation_factor=factor)
    joined = make()
    accumulated.fit([1, 2], data, train_loader_kwargs={"batch_size": batch})
    joined.fit([1, 2], data, train_loader_kwargs={"batch_size": batch * factor})
    assert (
        accumulated.optimizer_step
        == joined.optimizer_step
        == 2 * math.ceil(samples / (batch * factor))
    )
    assert_close(weights(accumulated), weights(joined))


@pytest.mark.parametrize(("samples", "factor"), [(4, 1), (8, 2), (10, 4), (6, 9)])
def test_an_overridden_fit_batch_has_its_short_window_stepped(samples, factor):
    data = points(samples)
    kwargs = {"batch_size": 2}
    own = make(SpeechBrainFitBatch, grad_accumulation_factor=factor)
    default = make(grad_accumulation_factor=factor)
    for brain in (own, default):
        brain.fit([1, 2], data, data, train_loader_kwargs=kwargs)
    assert own.optimizer_step == default.optimizer_step == 2 * math.ceil(samples / 2 / factor)
    assert_close(weights(own), weights(default))
    assert [entry[:2] for entry in own.losses] == [entry[:2] for entry in default.losses]
    assert [entry[2] for entry in own.losses] == pytest.approx(
        [entry[2] for entry in default.losses]
    )


class PlainStream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


@pytest.mark.parametrize("cls", [Regression, SpeechBrainFitBatch])
@pytest.mark.parametrize("factor", [1, 2, 4, 9])
def test_a_stream_has_its_short_window_stepped(factor, cls):
    data = points(10)
    kwargs = {"batch_size": 2}
    streamed = make(cls, grad_accumulation_factor=factor)
    mapped = make(grad_accumulation_factor=factor)
    streamed.fit([1, 2], PlainStream(data), train_loader_kwargs=kwargs)
    mapped.fit([1, 2], data, train_loader_kwargs=kwargs)
    assert streamed.optimizer_step == mapped.optimizer_step == 2 * math.ceil(5 / factor)
    assert_close(weights(streamed), weights(mapped))


class DirectSteps(Regression):
    """Accumulates under no_sync and steps the optimizer itself, leaving gradients behind that are
    not its own.
    """

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
            self.optimizer.step()
            self.optimizer_step += 1
            self.optimizer.zero_grad()
            # as a GAN's generator loss leaves in the discriminator
            for parameter in self.modules.parameters():
                parameter.grad = torch.full_like(parameter, 1e3)
        return loss.detach()

    def on_fit_batch_start(self, batch, should_step):
        raise AssertionError("not called: fit_batch is overridden")


def test_gradients_that_a_recipe_leaves_behind_are_not_stepped_on():
    class Cleaning(DirectSteps):
        def fit_batch(self, batch):
            if self.step % self.grad_accumulation_factor == 1:
                self.optimizer.zero_grad()
            return super().fit_batch(batch)

    brain = make(Cleaning, grad_accumulation_factor=2)
    default = make(grad_accumulation_factor=2, max_grad_norm=None)
    for each in (brain, default):
        each.fit([1, 2], points(8), train_loader_kwargs={"batch_size": 2})
    assert brain.optimizer_step == default.optimizer_step == 4
    assert_close(weights(brain), weights(default))


def test_no_sync_is_left_clean_by_an_exception():
    brain = make(grad_accumulation_factor=2)
    data = points(4)
    brain.fit([], data)
    with pytest.raises(ZeroDivisionError), brain.no_sync():
        raise ZeroDivisionError
    with brain.no_sync(), brain.no_sync(use=False):
        pass
    other = make(grad_accumulation_factor=2)
    for each in (brain, other):
        each.fit([1], data)
    assert_same(weights(brain), weights(other))


# --------------------------------------------------------------------------------------- not finite


def with_nan(number, *bad, value=float("nan")):
    data = points(number)
    return [(x if k not in bad else torch.full_like(x, value), y) for k, (x, y) in enumerate(data)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped_and_counted(value, caplog):
    counted = []

    class Counting(Regression):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            counted.append((self.nonfinite_count, self.optimizer_step, stage_loss))

    brain = make(Counting)
    without = make(Counting)
    with caplog.at_level(logging.WARNING, logger="ddpkit"):
        brain.fit([1, 2], with_nan(6, 1, 4, value=value))
    without.fit([1, 2], [pair for k, pair in enumerate(points(6)) if k not in (1, 4)])
    assert_same(weights(brain), weights(without))
    assert [entry[:2] for entry in counted] == [(2, 4), (2, 8), (0, 4), (0, 8)]
    assert all(math.isfinite(entry[2]) for entry in counted)
    assert "epoch 1, batch 2, after optimizer step 1" in caplog.text


@pytest.mark.parametrize("patience", [0, 1, 3])
def test_when_patience_is_exhausted_the_step_is_named(patience):
    brain = make(nonfinite_patience=patience)
    with pytest.raises(NonFiniteLossError, match=r"epoch 1.*nonfinite_patience=") as caught:
        brain.fit([1], with_nan(9, 2, 3, 4, 5, 6))
    assert f"epoch 1, batch {3 + patience}, after optimizer step 2" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert all(torch.isfinite(value).all() for value in weights(brain).values())


def test_patience_starts_again_with_every_epoch():
    brain = make(nonfinite_patience=2)
    brain.fit([1, 2, 3], with_nan(5, 0, 4))
    assert brain.optimizer_step == 9


def test_patience_goes_on_where_a_run_is_resumed_in_the_middle_of_an_epoch(tmp_path):
    """Two steps that are not finite were skipped before the stop: the third is one too many."""

    def fit(dies_at=None):
        counter = EpochCounter(1)
        options = {"nonfinite_patience": 2, "ckpt_interval_steps": 1}
        brain = make(Mortal, folder=tmp_path, recoverables={"counter": counter}, **options)
        brain.dies_at = dies_at
        brain.fit(counter, with_nan(9, 0, 2, 5, 6))

    with pytest.raises(Killed):
        fit(dies_at=(1, 5))
    with pytest.raises(
        NonFiniteLossError,
        match=r"3 steps of epoch 1.*batch 6, after optimizer "
        r"step 3",
    ):
        fit()


def test_a_window_with_one_bad_batch_is_skipped_whole():
    brain = make(grad_accumulation_factor=2)
    brain.fit([1], with_nan(6, 2))
    other = make(grad_accumulation_factor=2)
    other.fit([1], [pair for k, pair in enumerate(points(6)) if k not in (2, 3)])
    assert brain.optimizer_step == other.optimizer_step == 2
    assert_same(weights(brain), weights(other))


def test_skip_nonfinite_grads_drops_single_gradients(caplog):
    class Poisoned(Regression):
        def optimizers_step(self):
            if self.step == 2:
                self.modules.net.bias.grad.fill_(float("nan"))
            super().optimizers_step()

    brain = make(Poisoned, skip_nonfinite_grads=True)
    with caplog.at_level(logging.WARNING, logger="ddpkit"):
        brain.fit([1], points(3))
    assert (brain.optimizer_step, brain.nonfinite_count) == (3, 0)
    assert "net.bias" in caplog.text
    assert "net.weight" not in caplog.text


# ----------------------------------------------------------------------------------------- averages


class Given(Brain):
    """The loss of a batch is the mean of its numbers."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch.new_zeros(1, 3).double())

    def compute_objectives(self, predictions, batch, stage):
        return batch.mean() + 0.0 * predictions.sum()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.told = [*getattr(self, "told", []), stage_loss]


def test_means_are_weighted_by_samples():
    numbers = torch.tensor([1.0, 1.0, 1.0, 1.0, 5.0])
    kwargs = {"batch_size": 4}
    brain = make(Given)
    brain.fit([1], numbers, numbers, train_loader_kwargs=kwargs, valid_loader_kwargs=kwargs)
    assert brain.told == pytest.approx([1.8, 1.8])
    assert brain.evaluate(numbers, test_loader_kwargs=kwargs) == pytest.approx(1.8)


def test_gradients_are_weighted_by_samples():
    """Batches of 4 and 1 in one window count as one batch of 5."""
    data = points(5)
    brain = make(grad_accumulation_factor=3)
    joined = make()
    brain.fit([1], data, train_loader_kwargs={"batch_size": 4})
    joined.fit([1], data, train_loader_kwargs={"batch_size": 5})
    assert_close(weights(brain), weights(joined))


def test_losses_that_are_not_finite_are_in_neither_sum_nor_count(caplog):
    numbers = torch.tensor([float("nan"), float("nan"), 2.0, 2.0, float("inf"), 5.0])
    brain = make(Given, nonfinite_patience=9)
    with caplog.at_level(logging.WARNING, logger="ddpkit"):
        brain.fit([1], numbers, numbers)
    assert brain.told == pytest.approx([3.0, 3.0])
    assert brain.evaluate(numbers) == pytest.approx(3.0)
    assert "3 batches had a loss that is not finite" in caplog.text


def test_update_average_leaves_out_what_is_not_finite():
    brain = make()
    brain.step = 4
    assert brain.update_average(torch.tensor(5.0), 1.0) == 2.0
    assert brain.update_average(float("nan"), 1.0) == 1.0


# ------------------------------------------------------------------------------- several optimizers


@pytest.mark.parametrize("factor", [1, 3])
def test_a_gans_two_updates(factor):
    """Direct steps are the recipe's own affair: a bare loop gives the same weights, whatever the
    options say.
    """
    data = points(6)
    brain = Gan(gan_modules(), None, None, {**QUIET, "grad_accumulation_factor": factor})
    brain.fit([1, 2], data, data, train_loader_kwargs={"batch_size": 2})
    bare = Gan(gan_modules(), None, None, QUIET)
    bare.init_optimizers()
    for _ in range(2):
        for start in (0, 2, 4):
            inputs, targets = zip(*data[start : start + 2], strict=True)
            bare.fit_batch((torch.stack(inputs), torch.stack(targets)))
    assert_same(weights(brain), weights(bare))
    assert brain.optimizer_step == 6


class Alternating(FrontAndNet):
    """Trains one of two modules per step, through freeze_optimizers."""

    def init_optimizers(self):
        self.optimizers_dict = {
            name: torch.optim.SGD(self.modules[name].parameters(), lr=0.1)
            for name in ("front", "net")
        }

    def freeze_optimizers(self, optimizers):
        name = "front" if self.optimizer_step % 2 == 0 else "net"
        return {name: optimizers[name]}

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.moments = [*getattr(self, "moments", []), weights(self)]


def test_freeze_optimizers_chooses_who_steps():
    torch.manual_seed(4)
    modules = {"front": nn.Linear(3, 3).double(), "net": linear(), "idle": linear()}
    brain = Alternating(modules, None, None, QUIET)
    before = weights(brain)
    brain.fit([1], points(4))
    for number, after in enumerate(brain.moments):
        moved = {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])}
        assert moved == {"front" if number % 2 == 0 else "net"}
        before = after
    assert brain.optimizer_step == 4


class Scaled(Alternating):
    """Freezes one of two, under a scaler whose scale doubles after every second step."""

    def __init__(self, *args, growth_interval, **kwargs):
        super().__init__(*args, **kwargs)
        is_on = growth_interval is not None
        self.scaler = torch.amp.GradScaler(
            "cpu",
            1024.0,
            growth_interval=growth_interval or 1,
            enabled=is_on,
        )

    def freeze_optimizers(self, optimizers):
        return {"front": optimizers["front"]}


class Twice(Scaled):
    """Steps one optimizer twice in a window, while the gradients of the other wait."""

    def fit_batch(self, batch):
        for _ in range(2):
            loss = self.compute_objectives(self.compute_forward(batch, None), batch, None)
            self.backward(loss)
            self.optimizers_step()
        return loss.detach()


class Late(Scaled):
    """The optimizer that steps has no gradients in the first batches."""

    def compute_forward(self, batch, stage):
        return self.modules.net(self.modules.front(batch[0]) if self.step > 3 else batch[0])


@pytest.mark.parametrize("cls", [Scaled, Twice, Late])
def test_gradients_of_frozen_optimizers_do_not_shift_the_scale(cls):
    """In powers of two, so that the bits are those without a scaler."""
    found = []
    for interval in (None, 2):
        torch.manual_seed(4)
        modules = {"front": nn.Linear(3, 3).double(), "net": linear()}
        brain = cls(modules, None, None, QUIET, growth_interval=interval)
        brain.fit([1], points(9))
        found.append(weights(brain))
    assert brain.scaler.get_scale() > 1024.0
    assert_same(*found)


def test_optimizers_without_gradients_stay_out_of_it():
    brain = Alternating({"front": nn.Linear(3, 3).double(), "net": linear()}, None, None, QUIET)
    brain.freeze_optimizers = lambda optimizers: {}
    brain.fit([1], points(2))
    assert brain.optimizer_step == 0


def test_an_optimizer_class_that_gives_none_is_refused():
    with pytest.raises(ConfigError, match="opt_class must return an optimizer, got a NoneType"):
        make(opt=lambda parameters: None).fit(EpochCounter(1), points(2))


def test_the_accumulation_that_follows_is_no_contradiction_the_next_time():
    """A recipe reads what the sizes have come to; the option stays as it was given, so that other
    sizes may be given.
    """
    brain = make(global_batch_size=6, micro_batch_size=2)
    data = points(12)
    for _ in range(2):
        brain.fit([1], data)
        assert (brain.grad_accumulation_factor, brain.run_opts.grad_accumulation_factor) == (3, 1)
    brain.run_opts.micro_batch_size = 1
    brain.fit([1], data)
    assert brain.grad_accumulation_factor == 6
