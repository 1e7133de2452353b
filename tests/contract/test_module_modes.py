"""What ``on_stage_start`` sets to training or evaluation mode stays so for the stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpkit.types import Stage
from tests.recipes import EvaluatesAsItIs, Killed, Regression, make, points

KWARGS = {"batch_size": 4}


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1)).double()


class Modes(Regression):
    """Notes in which mode the batches found the parts of the model."""

    parts = None
    found: list

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.found = []

    def compute_forward(self, batch, stage):
        norm, dropout, _ = self.modules.net
        self.found.append((stage.name, norm.training, dropout.training))
        return super().compute_forward(batch, stage)


class Holds(Modes):
    """Holds the statistics still in training, and drops out in validation."""

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN:
            self.modules.net[0].eval()
        else:
            self.modules.net[1].train()


def fit(brain, epochs=2):
    return brain.fit(
        range(1, epochs + 1),
        points(8),
        points(4),
        train_loader_kwargs=KWARGS,
        valid_loader_kwargs=KWARGS,
    )


def test_a_part_that_the_hook_sets_is_in_that_mode_in_each_epoch():
    brain = make(Holds, net=net())
    before = brain.modules.net[0].running_mean.clone()
    fit(brain)
    assert (
        brain.found == [("TRAIN", False, True), ("TRAIN", False, True), ("VALID", False, True)] * 2
    )
    assert torch.equal(brain.modules.net[0].running_mean, before), "batch statistics have moved"


def test_a_resume_in_the_middle_of_an_epoch_sets_it_again(tmp_path):
    class Dies(Holds):
        dies = True

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            if self.dies and self.optimizer_step == 1:
                self.checkpointer.save_checkpoint(end_of_epoch=False)
                raise Killed

    with pytest.raises(Killed):
        fit(make(Dies, net=net(), folder=tmp_path), 1)
    again = make(Dies, net=net(), folder=tmp_path)
    again.dies = False
    fit(again, 1)
    assert again.found == [("TRAIN", False, True), ("VALID", False, True)]


class EvaluatesFirst(EvaluatesAsItIs, Holds):
    def on_stage_start(self, stage, epoch=None):
        super().on_stage_start(stage, epoch)
        if stage is Stage.TRAIN:
            self.evaluate(points(4), test_loader_kwargs=KWARGS)
            self.predict(points(4), loader_kwargs=KWARGS)


def test_an_evaluation_inside_of_the_hook_leaves_the_modes_as_they_were():
    brain = make(EvaluatesFirst, net=net())
    fit(brain, 1)
    test = ("TEST", False, True)
    predicted = ("TEST", False, False)
    assert brain.found == [test, predicted, *[("TRAIN", False, True)] * 2, ("VALID", False, True)]


class SetsAll(Modes):
    def on_stage_start(self, stage, epoch=None):
        self.modules.train(stage is not Stage.TRAIN)


def test_a_hook_that_sets_the_whole_model_to_the_other_mode_is_told(caplog):
    brain = make(SetsAll, net=net())
    fit(brain)
    assert (
        brain.found == [("TRAIN", True, True), ("TRAIN", True, True), ("VALID", False, False)] * 2
    )
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [words.partition(",")[0] for words in told] == [
        "on_stage_start has set all modules to evaluation mode",
        "on_stage_start has set all modules to training mode",
    ]


class Replaces(Modes):
    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.VALID:
            self.modules["late"] = nn.Dropout()
            self.modes = self.modules
            self.modules = nn.ModuleDict({"net": net(), "late": nn.Dropout()})
        elif epoch == 2:
            self.modules = self.modes


def test_modules_that_the_hook_puts_in_their_place_are_in_the_mode_of_the_stage():
    brain = make(Replaces, net=net())
    fit(brain)
    assert (
        brain.found == [("TRAIN", True, True), ("TRAIN", True, True), ("VALID", False, False)] * 2
    )


class Adds(Modes):
    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.VALID:
            self.modules["late"] = nn.Dropout()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.late = self.modules["late"].training if stage is Stage.VALID else None


def test_a_module_that_comes_in_a_validation_is_evaluated():
    brain = make(Adds, net=net())
    fit(brain, 1)
    assert brain.late is False


class HeldBefore(Modes):
    def on_fit_start(self):
        super().on_fit_start()
        self.modules.net[0].eval()


def test_statistics_that_were_held_before_the_epoch_are_told_of_once(caplog):
    fit(make(HeldBefore, net=net()))
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(told) == 1
    assert told[0].startswith(
        "These layers were in evaluation mode before the epoch: net.0. Each epoch begins with"
    )


def test_a_pretrained_model_that_comes_in_evaluation_mode_is_trained_without_a_word(caplog):
    brain = make(Modes, net=net().eval())
    fit(brain, 1)
    assert brain.found == [("TRAIN", True, True), ("TRAIN", True, True), ("VALID", False, False)]
    assert [one for one in caplog.records if one.levelname == "WARNING"] == []
