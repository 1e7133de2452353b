"""What the Brain gives to a checkpointer, and several Brains with one."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from ddpkit.run.resuming import read_brain_file
from ddpkit.types import Stage

DATA = [torch.full((1, 2), float(x)) for x in range(4)]


class Stop(Exception):
    """The run is killed."""


class Small(Brain):
    stop_at = None

    def compute_forward(self, batch, stage):
        return self.modules.model(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.pow(2).mean()

    def fit_batch(self, batch):
        if self.optimizer_step == self.stop_at:
            raise Stop
        return super().fit_batch(batch)


class Saving(Small):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage == Stage.TEST:
            self.checkpointer.save_checkpoint(name="test")


def brain(checkpointer, model, kind=Small, **opts):
    return kind(
        modules={"model": model},
        opt_class=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        run_opts={"device": "cpu", "noprogressbar": True, **opts},
        checkpointer=checkpointer,
    )


def make(folder):
    torch.manual_seed(1)
    model, counter = nn.Linear(2, 1), EpochCounter(2)
    return model, counter, Checkpointer(folder, {"model": model, "counter": counter})


def registered(checkpointer):
    return {name: checkpointer.recoverables[name] for name in ("brain", "ranks")}


def run(folder, stop_at=None, others=1):
    """Train one of several Brains that were made with one checkpointer, killed where told."""
    model, counter, checkpointer = make(folder)
    first = brain(checkpointer, model, ckpt_interval_steps=1)
    kept = [brain(checkpointer, model) for _ in range(others)]
    first.stop_at = stop_at
    with contextlib.suppress(Stop):
        first.fit(counter, DATA)
    assert len(kept) == others
    return first.optimizer_step, model.weight.detach().clone(), checkpointer


def test_another_brain_on_the_checkpointer_does_not_take_the_place_of_the_one_that_trains(tmp_path):
    whole = run(tmp_path / "whole", others=0)
    _, _, checkpointer = run(tmp_path / "killed", stop_at=6)
    state = read_brain_file(checkpointer.find_checkpoint().path)
    assert (state["step"], state["optimizer_step"], state["fit"]) == (2, 6, 1)
    steps, weight, _ = run(tmp_path / "killed")
    assert steps == whole[0] == 8
    assert torch.equal(weight, whole[1])


def test_a_brain_that_evaluates_in_between_gives_the_place_back(tmp_path):
    model, _, checkpointer = make(tmp_path)
    first, second = brain(checkpointer, model, Saving), brain(checkpointer, model, Saving)
    first.fit([1], DATA)
    checkpointer.save_checkpoint(name="one")
    second.evaluate(DATA)
    assert registered(checkpointer)["brain"] is second
    first.fit([1], DATA)
    assert registered(checkpointer) == {"brain": first, "ranks": first._rank_states}
    hook = checkpointer.custom_load_hooks["ranks"]
    saved = checkpointer.save_checkpoint(name="two")
    assert read_brain_file(saved.path)["fit"] == 2
    assert read_brain_file(saved.path)["optimizer_step"] == 8
    first.evaluate(DATA)
    assert checkpointer.custom_load_hooks["ranks"] is hook, "who stands there is not registered again"


def test_scaler_and_average_are_the_own_ones_too(tmp_path):
    model, _, checkpointer = make(tmp_path)
    first, second = (brain(checkpointer, model, ema_decay=0.5) for _ in range(2))
    for one in (first, second):
        one.scaler = torch.amp.GradScaler("cpu", enabled=True)
    for one in (first, second, first):
        one._take_checkpointer()
        taken = checkpointer.recoverables
        assert [taken[name] for name in ("brain", "ema", "scaler")] == [one, one.ema, one.scaler]


def test_two_brains_are_not_trained_with_one_checkpointer(tmp_path):
    """Both would call theirs the first call of fit, and a script that is started again could not tell whose it is."""
    model, counter, checkpointer = make(tmp_path)
    first, second = brain(checkpointer, model), brain(checkpointer, model)
    first.fit(counter, DATA)
    before = model.weight.detach().clone()
    with pytest.raises(ConfigError, match="Checkpointer of its own, with a folder of its own"):
        second.fit(counter, DATA)
    assert torch.equal(model.weight, before)
    assert second._fits == 0
    first.fit(EpochCounter(1), DATA)
    with pytest.raises(ConfigError, match="another Brain has trained"):
        brain(checkpointer, model).fit(counter, DATA)


def test_one_brain_per_fold_each_with_a_folder_of_its_own(tmp_path):
    """One Checkpointer, whose folder is set for each; also where debugging sets it."""
    model, _, checkpointer = make(tmp_path / "0")
    for fold in range(3):
        checkpointer.checkpoints_dir = tmp_path / str(fold)
        checkpointer.checkpoints_dir.mkdir(exist_ok=True)
        one = brain(checkpointer, model)
        one.fit(EpochCounter(1), DATA)
        assert one.optimizer_step == len(DATA)
    checkpointer.checkpoints_dir = tmp_path / "1"
    with pytest.raises(ConfigError, match="another Brain has trained"):
        one.fit(EpochCounter(1), DATA)
    for _ in range(2):
        brain(checkpointer, model, debug=True).fit(EpochCounter(1), DATA)


def test_a_scaler_of_the_recipe_that_comes_later_stays(tmp_path):
    model, _, checkpointer = make(tmp_path)
    one, own = brain(checkpointer, model), torch.amp.GradScaler("cpu", enabled=True)
    one.scaler = torch.amp.GradScaler("cpu", enabled=True)
    checkpointer.add_recoverable("scaler", own)
    one._take_checkpointer()
    assert checkpointer.recoverables["scaler"] is own


def test_after_a_failure_another_brain_takes_the_run_over(tmp_path):
    """As a script does that tries again by itself."""
    model, counter, checkpointer = make(tmp_path)
    first = brain(checkpointer, model, ckpt_interval_steps=1)
    first.stop_at = 6
    with pytest.raises(Stop):
        first.fit(counter, DATA)
    second = brain(checkpointer, model)
    second.fit(counter, DATA)
    assert second.optimizer_step == 8


class Verifying(Small):
    """Evaluates another Brain in the middle of its own training."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.checkpointer.save_checkpoint()
        self.hparams.other[0].evaluate(DATA)


def test_another_brain_is_not_evaluated_inside_of_a_training_with_the_same_checkpointer(tmp_path):
    model, counter, checkpointer = make(tmp_path)
    first, second = brain(checkpointer, model, Verifying), brain(checkpointer, model)
    first.hparams.other = [second]
    with pytest.raises(ConfigError, match="inside fit of another Brain with the same Checkpointer"):
        first.fit(counter, DATA)
    assert registered(checkpointer)["brain"] is first
    first.hparams.other = [brain(None, model)]
    first.fit(counter, DATA)


# ------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("name", ["brain", "ranks"])
def test_a_recoverable_of_the_recipe_keeps_its_name(tmp_path, name):
    model = nn.Linear(2, 1)
    checkpointer = Checkpointer(tmp_path, {name: model})
    with pytest.raises(ConfigError, match=f"of type Linear, is named '{name}'.*another name"):
        brain(checkpointer, model)
    assert checkpointer.recoverables == {name: model}


def test_the_gradient_scaler_does_not_take_the_place_of_a_recipe_s_scaler(tmp_path):
    normaliser, model = nn.Linear(2, 2), nn.Linear(2, 1)
    checkpointer = Checkpointer(tmp_path, {"scaler": normaliser})
    one = brain(checkpointer, model)  # without a gradient scaler both can be
    assert checkpointer.recoverables["scaler"] is normaliser
    one.scaler = torch.amp.GradScaler("cpu", enabled=True)
    with pytest.raises(ConfigError, match="named 'scaler', and so is the gradient scaler of precision="):
        one._register_with(checkpointer)
    assert checkpointer.recoverables["scaler"] is normaliser
    checkpointer.add_recoverable("scaler", torch.amp.GradScaler("cpu", enabled=True))
    one._register_with(checkpointer)
    assert checkpointer.recoverables["scaler"] is one.scaler
