"""What a window leaves behind: gradients that no step has used, and steps that an interrupted
window has made.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import RunStopped
from ddpkit.types import Stage
from tests.recipes import (
    QUIET,
    EvaluatesAsItIs,
    Killed,
    OptimizerOfEachEntry,
    OwnFitBatch,
    assert_same,
    linear,
    points,
    sgd,
    weights,
)

from .test_predict import handlers_kept


class Gan(OptimizerOfEachEntry):
    """Two optimizers take turns; the generator's loss gives gradients to the discriminator, too."""

    dies_at = None
    dies_in = "the next batch"

    def init_optimizers(self):
        super().init_optimizers()
        self.turn = "judge"

    def freeze_optimizers(self, optimizers):
        return {self.turn: optimizers[self.turn]}

    def on_stage_start(self, stage, epoch=None):
        self.epoch = epoch

    def learn(self, turn, loss):
        self.turn = turn
        self.backward(loss)
        if self.dies_in == turn and self.dies_at == (self.epoch, self.step):
            raise Killed
        if self.step % self.grad_accumulation_factor == 0:
            self.optimizers_step()

    def fit_batch(self, batch):
        if self.dies_in == "the next batch" and self.dies_at == (self.epoch, self.step):
            raise Killed
        if self.step == 1:
            self.at_first = [self.gradient_of("judge"), self.gradient_of("maker")]
        judge = self.modules.judge
        made = self.modules.maker(batch[0])
        self.learn("judge", judge(made.detach()).square().mean() + judge(batch[0]).mean())
        loss = (judge(made) - 1).square().mean()
        self.learn("maker", loss)
        return loss.detach()

    def gradient_of(self, name):
        return self.raw_modules[name].weight.grad

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.checkpointer.save_checkpoint()


def make_gan(folder, cls=Gan, **options):
    torch.manual_seed(7)
    modules = {"judge": linear(), "maker": nn.Linear(3, 3).double()}
    counter = EpochCounter(2)
    checkpointer = Checkpointer(folder, {**modules, "counter": counter})
    options = {**QUIET, "max_grad_norm": 0.0, **options}
    return cls(modules, None, None, options, checkpointer), counter


def train(folder, dies_at=None, **options):
    brain, counter = make_gan(folder, **options)
    brain.dies_at = dies_at
    if dies_at is None:
        brain.fit(counter, points(5))
    else:
        with pytest.raises(Killed):
            brain.fit(counter, points(5))
    return brain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "dies_at"),
    [
        pytest.param(1, (1, 3), id="after a window"),
        pytest.param(2, (2, 2), id="after a window that the epoch has cut short"),
        pytest.param(2, (1, 4), id="after accumulation", marks=pytest.mark.slow),
    ],
)
def test_a_loss_gives_nothing_to_an_optimizer_that_has_stepped(tmp_path, factor, dies_at):
    options = {"grad_accumulation_factor": factor, "ckpt_interval_steps": 1}
    whole = train(tmp_path / "whole", **options)
    train(tmp_path / "killed", dies_at, **options)
    resumed = train(tmp_path / "killed", **options)
    assert_same(weights(resumed), weights(whole))
    assert resumed.optimizer_step == whole.optimizer_step


def test_the_step_of_each_turn_is_that_of_its_own_loss(tmp_path):
    """As with ``requires_grad_(False)`` for the other's forward pass, to the last bit."""

    class Apart(Gan):
        def learn(self, turn, loss):
            super().learn(turn, loss)
            for other in self.raw_modules.keys() - {turn}:
                self.raw_modules[other].zero_grad()

    brains = []
    for cls in (Gan, Apart):
        brain, counter = make_gan(tmp_path / cls.__name__, cls)
        brain.fit(counter, points(5))
        brains.append(brain)
    assert_same(weights(brains[0]), weights(brains[1]))


def test_a_call_begins_without_the_gradients_of_an_interrupted_one(tmp_path):
    brain, counter = make_gan(tmp_path)
    brain.dies_at = (1, 2)
    brain.dies_in = "maker"
    with pytest.raises(Killed):
        brain.fit(counter, points(5))
    assert brain.gradient_of("judge").any(), "of the maker's loss"
    brain.dies_at = None
    counter.current = 0
    brain.fit(counter, points(5))
    assert brain.at_first == [None, None]


def test_gradients_that_wait_for_a_step_on_purpose_are_kept(tmp_path):
    class StepsFirst(Gan):
        """Steps in every third batch, before its backward pass; says with ``no_sync`` that
        gradients wait.
        """

        def fit_batch(self, batch):
            self.turn = "judge"
            if self.step % 3 == 0:
                self.waited = [*getattr(self, "waited", []), self.gradient_of("judge").clone()]
                self.optimizers_step()
            with self.no_sync():
                loss = self.modules.judge(batch[0]).sum()
                loss.backward()
            return loss.detach()

    brain, _ = make_gan(tmp_path, StepsFirst)
    data = points(6)
    brain.fit([1], data)
    inputs = torch.stack([one for one, _ in data])
    expected = [inputs[:2].sum(0, keepdim=True), inputs[2:5].sum(0, keepdim=True)]
    for found, known in zip(brain.waited, expected, strict=True):
        torch.testing.assert_close(found, known)


class Interrupted(OwnFitBatch):
    """Steps in a ``fit_batch`` of its own and dies before that returns; saves as an epoch
    begins.
    """

    dies = True

    def rate(self):
        return self.optimizer.param_groups[0]["lr"]

    def on_stage_start(self, stage, epoch=None):
        if not self.dies:
            before = self.rate()
            self.checkpointer.save_checkpoint()
            self.rates = before, self.rate()

    def fit_batch(self, batch):
        loss = super().fit_batch(batch)
        if self.dies and self.step == 2:
            raise Killed
        return loss


def halving(optimizer, _):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def test_a_call_makes_no_schedule_step_of_the_pass_that_was_interrupted(tmp_path):
    net = linear()
    counter = EpochCounter(1)
    checkpointer = Checkpointer(tmp_path, {"net": net, "counter": counter})
    brain = Interrupted({"net": net}, sgd(), None, QUIET, checkpointer, scheduler_class=halving)
    with pytest.raises(Killed):
        brain.fit(counter, points(4))
    brain.dies = False
    counter.current = 0
    brain.fit(counter, points(4))
    assert brain.rates == (0.05, 0.05)


class Evaluates(EvaluatesAsItIs):
    """Evaluates as a validation begins, and catches what its hook raises; then the validation is
    stopped.
    """

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.VALID:
            with pytest.raises(Killed):
                self.evaluate(points(2))

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is Stage.TEST:
            raise Killed

    def evaluate_batch(self, batch, stage):
        if stage is Stage.VALID:
            raise RunStopped(143, "test")
        return super().evaluate_batch(batch, stage)


def test_a_stop_saves_the_training_after_an_evaluation_whose_failure_was_caught(tmp_path):
    net = linear()
    counter = EpochCounter(1)
    checkpointer = Checkpointer(tmp_path, {"net": net, "counter": counter})
    brain = Evaluates({"net": net}, sgd(), None, QUIET, checkpointer)
    with handlers_kept(), pytest.raises(RunStopped):
        brain.fit(counter, points(3), points(2))
    assert len(checkpointer.list_checkpoints()) == 1
