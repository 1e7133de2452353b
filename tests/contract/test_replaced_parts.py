"""Modules, hparams, checkpointer and others that a recipe assigns: every part of the run has the
new one.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpkit.checkpoints import Checkpointer
from ddpkit.ema import WeightAverage
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from ddpkit.train_logger import TrainLogger
from ddpkit.types import Stage
from tests.recipes import Regression, assert_same, linear, make, points, sgd, weights

KWARGS = {"batch_size": 4}


def fit(brain, epochs=2, **given):
    return brain.fit(range(1, epochs + 1), points(8), train_loader_kwargs=KWARGS, **given)


def other():
    return nn.ModuleDict({"net": linear(seed=1)})


def as_given(**options):
    brain = make(net=linear(seed=1), **options)
    fit(brain)
    return brain


# ------------------------------------------------------------------------------------------ modules


@pytest.mark.parametrize("form", [nn.ModuleDict, dict])
def test_other_modules_are_averaged_and_evaluated_as_given_ones(form):
    options = {"ema_decay": 0.5, "evaluate_ema": True}
    brain = make(**options)
    expected = as_given(**options)
    brain.modules = form(other())
    fit(brain)
    assert_same(weights(brain), weights(expected))
    assert_same(brain.ema.state_dict(), expected.ema.state_dict())
    test = {"test_loader_kwargs": KWARGS}
    assert brain.evaluate(points(4), **test) == expected.evaluate(points(4), **test)


def test_an_average_of_other_modules_of_the_recipe_is_left_alone():
    teacher = other()
    brain = make()
    brain.ema = WeightAverage(teacher, 0.5)
    brain.modules = other()
    assert brain.ema.modules is teacher


def test_a_module_dict_stays_the_same_object_and_goes_to_the_device():
    brain = make()
    given = other()
    brain.modules = given
    assert brain.modules is given
    brain.modules = {"net": linear(seed=2)}
    assert isinstance(brain.modules, nn.ModuleDict)
    assert next(brain.modules.parameters()).device == torch.device(brain.device)


@pytest.mark.parametrize("wrong", [None, 3, {"net": "a text"}])
def test_what_is_no_modules_is_refused_and_changes_nothing(wrong):
    brain = make()
    before = brain.modules
    with pytest.raises(ConfigError, match="modules"):
        brain.modules = wrong
    assert brain.modules is before


def test_modules_for_validations_alone_may_be_put_in_and_out():
    class Averages(Regression):
        """Keeps an average of its own, and validates with it."""

        def on_stage_start(self, stage, epoch=None):
            if stage is Stage.VALID:
                self.trained, self.modules = self.modules, copy.deepcopy(self.modules)
                nn.init.zeros_(self.modules.net.weight)
                nn.init.zeros_(self.modules.net.bias)

        def on_stage_end(self, stage, stage_loss, epoch=None):
            super().on_stage_end(stage, stage_loss, epoch)
            if stage is Stage.VALID:
                self.modules = self.trained

    brain = make(Averages, ema_decay=0.5)
    plain = make(ema_decay=0.5)
    for one in (brain, plain):
        fit(one, valid_set=points(4), valid_loader_kwargs=KWARGS)
    assert_same(weights(brain), weights(plain))
    assert_same(brain.ema.state_dict(), plain.ema.state_dict())
    found = [loss for stage, _, loss in brain.losses if stage == "VALID"]
    expected = float(torch.stack([y for _, y in points(4)]).square().mean())
    assert found == [pytest.approx(expected)] * 2


def test_modules_are_not_replaced_in_a_training_batch():
    class Late(Regression):
        def compute_forward(self, batch, stage):
            self.modules = other()
            return super().compute_forward(batch, stage)

    with pytest.raises(ConfigError, match="modules was assigned in a training batch"):
        fit(make(Late))


def test_an_optimizer_of_the_modules_before_is_told_of():
    class Late(Regression):
        def on_fit_start(self):
            super().on_fit_start()
            self.modules = other()

    with pytest.raises(ConfigError, match="Late: nothing is trained"):
        fit(make(Late))
    brain = make()
    fit(brain)
    brain.modules = other()
    with pytest.raises(ConfigError, match="Regression: nothing is trained"):
        fit(brain)


# ------------------------------------------------------------------------------------------ hparams


class Logs(Regression):
    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        self.log("value", loss, per_step=True)
        return loss


class Keeps(TrainLogger):
    def __init__(self):
        self.steps = []

    def log_step(self, values, step):
        self.steps.append(step)


@pytest.mark.parametrize("form", [dict, SimpleNamespace, "attribute"])
@pytest.mark.parametrize("several", [False, True])
def test_another_logger_is_given_the_values_of_steps(form, several):
    first = Keeps()
    second = Keeps()
    brain = make(Logs, hparams={"train_logger": first})
    new = [second, Keeps()] if several else second
    if form == "attribute":
        brain.hparams.train_logger = second
    else:
        brain.hparams = form(train_logger=new)
    fit(brain)
    assert first.steps == []
    assert second.steps


def test_the_note_of_a_stop_goes_to_the_folder_of_the_other_hparams(tmp_path):
    from ddpkit.brain import run_of

    brain = make(hparams={"output_folder": tmp_path / "first"})
    brain.hparams = {"output_folder": tmp_path / "second"}
    assert run_of(brain).stop._folder() == tmp_path / "second"


# -------------------------------------------------------------------- checkpointer, scaler, average


@pytest.mark.costly
def test_a_checkpointer_that_is_assigned_saves_the_whole_run(tmp_path):
    class Saves(Regression):
        dies = True

        def on_stage_end(self, stage, stage_loss, epoch=None):
            self.checkpointer.save_checkpoint()
            if self.dies and epoch == 2:
                raise ZeroDivisionError

    def assembled(folder):
        net = linear()
        counter = EpochCounter(3)
        brain = make(Saves, net=net, opt=sgd(momentum=0.9), ema_decay=0.5, ckpt_errors="warn")
        brain.checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
        return brain, counter

    def run(folder, *, dies):
        brain, counter = assembled(folder)
        brain.dies = dies
        brain.fit(counter, points(8), train_loader_kwargs=KWARGS)
        return brain

    whole = run(tmp_path / "whole", dies=False)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "died", dies=True)
    again = run(tmp_path / "died", dies=False)
    assert again.optimizer_step == whole.optimizer_step == 6
    assert_same(weights(again), weights(whole))
    assert_same(again.ema.state_dict(), whole.ema.state_dict())
    assert again.checkpointer.on_error == "warn"


def test_debugging_saves_into_a_temporary_folder_of_the_assigned_one(tmp_path):
    brain = make(debug=True)
    brain.checkpointer = Checkpointer(tmp_path, {"net": brain.modules.net})
    assert brain.checkpointer.checkpoints_dir != tmp_path
    brain.debug = False
    fit(brain)
    assert brain.checkpointer.checkpoints_dir == tmp_path


def test_a_checkpointer_after_the_first_training_has_the_optimizer_too(tmp_path):
    brain = make(folder=tmp_path / "first")
    fit(brain)
    brain.checkpointer = second = Checkpointer(tmp_path / "second", {"net": brain.modules.net})
    assert {"net", "brain", "ranks", "optimizer"} <= second.recoverables.keys()
    brain.checkpointer = None
    assert fit(brain, 3).newest_checkpoint is None


def test_another_checkpointer_inside_of_fit_is_refused(tmp_path):
    class Late(Regression):
        def on_fit_start(self):
            super().on_fit_start()
            self.checkpointer = Checkpointer(tmp_path / "second")

    with pytest.raises(ConfigError, match="checkpointer was assigned inside of fit"):
        fit(make(Late, folder=tmp_path / "first"))
    with pytest.raises(ConfigError, match="is not a ddpkit.checkpoints.Checkpointer"):
        make().checkpointer = {}


def test_an_average_that_is_assigned_is_saved(tmp_path):
    brain = make(folder=tmp_path)
    for _ in range(2):
        brain.ema = WeightAverage(brain.modules, 0.5)
    assert brain.checkpointer.recoverables["ema"] is brain.ema


def test_a_scaler_that_is_assigned_is_saved(tmp_path):
    brain = make(folder=tmp_path)
    for _ in range(2):
        brain.scaler = torch.amp.GradScaler("cpu", enabled=True)
    assert brain.checkpointer.recoverables["scaler"] is brain.scaler


@pytest.mark.parametrize("name", ["opt_class", "scheduler_class"])
def test_what_makes_the_optimizers_is_assigned_before_they_are_made(name):
    brain = make()
    setattr(
        brain,
        name,
        sgd(lr=0.2) if name == "opt_class" else torch.optim.lr_scheduler.ConstantLR,
    )
    fit(brain)
    setattr(brain, name, getattr(brain, name))
    with pytest.raises(ConfigError, match=f"{name} was assigned after fit has made the optimizers"):
        setattr(brain, name, sgd())
