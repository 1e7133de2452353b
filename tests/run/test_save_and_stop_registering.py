"""What the Brain gives to a checkpointer, and that a checkpointer holds the training of one
Brain.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from tests.recipes import Squares

DATA = [torch.full((1, 2), float(x)) for x in range(4)]


def brain(checkpointer, model, kind=Squares, **opts):
    return kind(
        modules={"net": model},
        opt_class=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        run_opts={"device": "cpu", "noprogressbar": True, **opts},
        checkpointer=checkpointer,
    )


def make(folder):
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    counter = EpochCounter(2)
    return model, counter, Checkpointer(folder, {"model": model, "counter": counter})


def test_another_brain_on_the_checkpointer_is_refused_and_changes_nothing(tmp_path):
    """A checkpoint has one place for a training, and a script that is started again could not tell
    whose it is.
    """
    model, counter, checkpointer = make(tmp_path)
    first = brain(checkpointer, model, ckpt_interval_steps=1)
    before = dict(checkpointer.recoverables)
    with pytest.raises(
        ConfigError,
        match="this Checkpointer belongs to another Brain.*its own.*on the same folder",
    ):
        brain(checkpointer, model, ema_decay=0.5)
    assert checkpointer.recoverables == before
    first.fit(counter, DATA)
    assert first.optimizer_step == 8


def test_a_second_brain_evaluates_what_the_first_has_trained_with_a_checkpointer_of_its_own(
    tmp_path,
):
    model, counter, checkpointer = make(tmp_path)
    first = brain(checkpointer, model)
    first.fit(counter, DATA)
    checkpointer.save_checkpoint()
    other, _, second = make(tmp_path)
    other.weight.data.fill_(9.0)
    loss = brain(second, other).evaluate(DATA)
    assert torch.equal(other.weight, model.weight)
    assert loss == first.evaluate(DATA)
    first.fit(EpochCounter(1), DATA)
    assert first.optimizer_step == 12


def test_one_brain_per_fold_each_with_a_checkpointer_of_its_own(tmp_path):
    for fold in range(2):
        model, counter, checkpointer = make(tmp_path / str(fold))
        one = brain(checkpointer, model)
        one.fit(counter, DATA)
        assert one.optimizer_step == 8


class Verifying(Squares):
    """Evaluates another Brain in the middle of its own training."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.hparams.other.evaluate(DATA)


def test_a_brain_without_a_checkpointer_may_be_evaluated_inside_of_a_training(tmp_path):
    model, counter, checkpointer = make(tmp_path)
    first = brain(checkpointer, model, Verifying)
    first.hparams.other = brain(None, model)
    first.fit(counter, DATA)
    assert first.optimizer_step == 8


def test_only_a_checkpointer_is_taken():
    with pytest.raises(
        ConfigError,
        match=r"checkpointer='saves' is not a "
        r"ddpkit\.checkpoints\.Checkpointer",
    ):
        brain("saves", nn.Linear(2, 1))


# ------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("name", ["brain", "ranks"])
def test_a_recoverable_of_the_recipe_keeps_its_name(tmp_path, name):
    model = nn.Linear(2, 1)
    checkpointer = Checkpointer(tmp_path, {name: model})
    with pytest.raises(ConfigError, match=f"'{name}' is reserved for .*; rename your Linear"):
        brain(checkpointer, model)
    assert checkpointer.recoverables == {name: model}


class WithScaler(Squares):
    """Has an enabled scaler, as fp16 on a GPU has."""

    def __init__(self, *args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ddpkit.brain.Precision", fp16_on_a_cpu)
            super().__init__(*args, **kwargs)


def fp16_on_a_cpu(*_):
    from ddpkit.precision import Precision

    found = Precision("fp32", "fp32", "cpu")
    found.scaler = torch.amp.GradScaler("cpu", enabled=True)
    return found


def test_the_gradient_scaler_is_saved_and_does_not_take_the_place_of_a_recipe_s_scaler(tmp_path):
    normaliser = nn.Linear(2, 2)
    model = nn.Linear(2, 1)
    checkpointer = Checkpointer(tmp_path, {"scaler": normaliser})
    with pytest.raises(
        ConfigError,
        match="'scaler' is reserved for the gradient scaler of precision=",
    ):
        brain(checkpointer, model, WithScaler)
    assert checkpointer.recoverables == {"scaler": normaliser}
    brain(checkpointer, model)  # without a gradient scaler both can be
    assert checkpointer.recoverables["scaler"] is normaliser
    checkpointer = Checkpointer(tmp_path)
    one = brain(checkpointer, model, WithScaler)
    assert checkpointer.recoverables["scaler"] is one.scaler
    assert checkpointer.optional_recoverables["scaler"]
