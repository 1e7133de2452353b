"""One number for optimizer steps: however often a fit_batch of the recipe's own steps in a window,
it counts once.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import ddpkit
from ddpkit.brain import run_of
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import NonFiniteLossError
from tests.recipes import (
    QUIET,
    Killed,
    Poisoned,
    Regression,
    assert_same,
    linear,
    make,
    points,
    sgd,
)

from .test_schedules import torch_rates

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-fit-batch.md"
SHOWN = {}
for block in re.findall(
    r"^```python\n(.*?)^```",
    PAGE.read_text("utf-8"),
    re.MULTILINE | re.DOTALL,
):
    exec(block, SHOWN)
DECAY = 0.5


class Gan(SHOWN["Gan"]):
    """The page's example; notes its steps and its weights after each batch, and dies where it is
    told to.
    """

    dies_at = None

    def init_optimizers(self):
        super().init_optimizers()
        self.numbers = {"generator": 0, "discriminator": 0}
        self.after = []
        self.told = []

    def optimizers_step(self):
        super().optimizers_step()
        self.numbers[self.turn] += 1

    def fit_batch(self, batch):
        if self.dies_at == (self.progress.epoch, self.step):
            raise Killed
        result = super().fit_batch(batch)
        self.told.append(self.optimizer_step)
        if self.should_step:
            self.after.append([p.detach().clone() for p in self.modules.parameters()])
        return result

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if self.checkpointer is not None:
            self.checkpointer.save_and_keep_only()


def gan(folder=None, counter=None, **options):
    torch.manual_seed(3)
    discriminator = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    modules = {"generator": nn.Linear(3, 1).double(), "discriminator": discriminator}
    saved = None if folder is None else Checkpointer(folder, {**modules, "counter": counter})
    return Gan(modules, sgd(), None, {**QUIET, **options}, saved)


def fit(brain, epochs=(1, 2)):
    return brain.fit(epochs, points(18), train_loader_kwargs={"batch_size": 4, "shuffle": True})


def average_of(states, start):
    """Return the moving average after these states, from the first one on, as PyTorch's own average
    does it.
    """
    average = [one.clone() for one in states[0]] if start is None else start
    for state in states[1:] if start is None else states:
        average = [DECAY * old + (1 - DECAY) * new for old, new in zip(average, state, strict=True)]
    return average


@pytest.mark.parametrize("factor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_optimizers_count_one_step_in_each_window(factor):
    brain = gan(grad_accumulation_factor=factor, ema_decay=DECAY, max_grad_norm=1e-3)
    result = fit(brain)
    number = 5 if factor == 1 else 3
    assert (brain.steps_per_epoch, brain.total_steps, brain.optimizer_step) == (
        number,
        2 * number,
        2 * number,
    )
    assert brain.numbers == {"generator": 2 * number, "discriminator": 2 * number}
    assert result.optimizer_steps == 2 * number
    assert brain.ema.updates == 2 * number
    assert brain.progress.clipped_share == 1.0
    found = brain.ema.state_dict()
    names = [name for name, _ in brain.modules.named_parameters()]
    for name, expected in zip(names, average_of(brain.after, None), strict=True):
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-14)


def test_the_limit_of_steps_lets_both_optimizers_step_so_often():
    brain = gan(optimizer_step_limit=7)
    assert fit(brain, range(1, 9)).reason == "optimizer_step_limit"
    assert brain.total_steps == brain.optimizer_step == 7
    assert brain.numbers == {"generator": 7, "discriminator": 7}


@pytest.mark.slow
@pytest.mark.parametrize("dies_at", [(2, 3), pytest.param((1, 4), marks=pytest.mark.slow)])
def test_a_killed_run_with_two_optimizers_is_the_run_that_was_not_killed(dies_at, tmp_path):
    def script(folder, dies_at=None):
        counter = EpochCounter(3)
        brain = gan(folder, counter, ema_decay=DECAY, ckpt_interval_steps=1)
        brain.dies_at = dies_at
        try:
            fit(brain, counter)
        except Killed:
            assert dies_at is not None
        return brain

    whole = script(tmp_path / "whole")
    script(tmp_path / "killed", dies_at)
    again = script(tmp_path / "killed")
    assert again.optimizer_step == again.total_steps == whole.optimizer_step == 15
    assert again.ema.updates == whole.ema.updates == 15
    assert_same(again.ema.state_dict(), whole.ema.state_dict())
    assert_same(again.modules.state_dict(), whole.modules.state_dict())


class Twice(Regression):
    """Steps twice on each batch, as those do that look for a worse place first."""

    def init_optimizers(self):
        super().init_optimizers()
        self.rates = []

    def fit_batch(self, batch):
        for _ in range(2):
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            loss = self.compute_objectives(
                self.compute_forward(batch, ddpkit.Stage.TRAIN),
                batch,
                ddpkit.Stage.TRAIN,
            )
            self.backward(loss)
            self.optimizers_step()
        return loss.detach()


def test_a_schedule_makes_one_step_for_each_window():
    brain = Twice({"net": linear()}, sgd(), None, QUIET, None, CosineAnnealingLR)
    fit(brain)
    assert brain.optimizer_step == brain.total_steps == 10
    rates = torch_rates(partial(CosineAnnealingLR, T_max=10), 10)
    assert brain.rates == [rate for one in rates for rate in (one, one)]


def test_a_save_in_a_fit_batch_has_the_schedule_and_the_average_of_its_steps(tmp_path):
    class Saving(Twice):
        def fit_batch(self, batch):
            result = super().fit_batch(batch)
            if self.step == 3:
                self.checkpointer.save_checkpoint(end_of_epoch=False, name="inside")
                self.noted = self.optimizer.param_groups[0]["lr"], self.ema.updates
            return result

    net = linear()
    options = {**QUIET, "ema_decay": DECAY}
    brain = Saving(
        {"net": net},
        sgd(),
        None,
        options,
        Checkpointer(tmp_path, {"net": net}),
        CosineAnnealingLR,
    )
    fit(brain, [1])
    assert brain.noted == (pytest.approx(torch_rates(partial(CosineAnnealingLR, T_max=5), 4)[3]), 3)
    assert brain.ema.updates == brain.optimizer_step == 5


def test_steps_that_are_skipped_in_one_window_count_once():
    class Spoilt(Poisoned, Twice):
        """Steps twice with losses that are not finite."""

    brain = Spoilt({"net": linear()}, sgd(), None, {**QUIET, "nonfinite_patience": 2})
    brain.bad_steps = {2, 4}
    fit(brain, [1])
    assert (brain.optimizer_step, brain.nonfinite_count) == (3, 2)
    brain.bad_steps = {2, 3, 4}
    with pytest.raises(
        NonFiniteLossError,
        match="3 steps of epoch 1 had gradients that are not finite",
    ):
        fit(brain, [1])


def test_each_step_of_a_loop_of_the_recipes_own_counts():
    class Own(Regression):
        def _fit_train(self, train_set, epoch, enable):
            self.modules.train()
            for batch in train_set:
                for _ in range(2):
                    outputs = self.compute_forward(batch, ddpkit.Stage.TRAIN)
                    loss = self.compute_objectives(outputs, batch, ddpkit.Stage.TRAIN)
                    self.backward(loss)
                    self.optimizers_step()

    brain = Own({"net": linear()}, sgd(), None, QUIET)
    fit(brain, [1])
    assert brain.optimizer_step == 10


class NothingSteps(Regression):
    """Has an ``optimizers_step`` of its own, and every optimizer is frozen."""

    def freeze_optimizers(self, optimizers):
        return {}

    def optimizers_step(self):
        super().optimizers_step()


def test_a_window_in_which_no_optimizer_steps_is_left_out_once(monkeypatch):
    brain = make(NothingSteps)
    left_out = []
    strategy = run_of(brain).context.strategy
    monkeypatch.setattr(strategy, "leave_step_out", lambda: left_out.append(brain.step))
    brain.fit([1], points(4), train_loader_kwargs={"batch_size": 2})
    assert left_out == [1, 2]
