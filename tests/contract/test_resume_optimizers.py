"""A run that goes on with other optimizers, or other settings of them, than its checkpoint's."""

from __future__ import annotations

import functools

import pytest
import torch
import yaml

from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError
from ddpkit.types import Stage
from tests.recipes import Regression, make, points

BEGAN = "with which the checkpoint's run began"
SGD = torch.optim.SGD
ADAM = torch.optim.Adam
ADAMW = torch.optim.AdamW
RADAM = torch.optim.RAdam


class Saving(Regression):
    """Changes the weight decay in every epoch, as a recipe may."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is Stage.TRAIN and self.optimizer.param_groups[0]["lr"] != 0.5:
            self.optimizer.param_groups[0]["weight_decay"] *= 0.5
        self.checkpointer.save_and_keep_only()


class Single(Saving):
    """Has one optimizer without a name."""

    def init_optimizers(self):
        self.optimizer = self.opt_class(self.modules.parameters())
        self.checkpointer.add_recoverable("own", self.optimizer)


def start(folder, opt, epochs, scheduler=None, cls=Saving, **options):
    """Run as a script does that is started again; return the settings it ends with."""
    counter = EpochCounter(epochs)
    brain = make(cls, opt=opt, folder=folder, recoverables={"counter": counter}, **options)
    brain.scheduler_class = scheduler
    brain.fit(counter, points(8), train_loader_kwargs={"batch_size": 2})
    return brain.optimizer.param_groups[0]


def of(kind, **settings):
    return functools.partial(kind, **{"lr": 0.01, **settings})


@pytest.mark.corner
@pytest.mark.parametrize(
    ("before", "now"),
    [(ADAMW, ADAM), (ADAM, ADAMW), (ADAMW, SGD), (SGD, ADAMW), (ADAM, RADAM), (RADAM, ADAM)],
)
def test_another_class_of_optimizer_is_refused_before_training(tmp_path, before, now):
    start(tmp_path, of(before), 1)
    with pytest.raises(CheckpointError) as caught:
        start(tmp_path, of(now), 2)
    words = str(caught.value)
    assert (
        f"'opt_class' was of the class {before.__name__}, and is now of the class {now.__name__}"
    ) in words
    assert f"Go on with {before.__name__}. --resume_with_new=optimizer goes on with" in words
    assert "Or begin anew from the weights alone" in words
    assert "--init_from=" in words
    assert "--resume=never" in words
    start(tmp_path, of(before), 2)


def test_an_own_subclass_with_the_same_settings_goes_on(tmp_path, caplog):
    class Own(ADAMW):
        pass

    start(tmp_path, of(ADAMW), 1)
    start(tmp_path, of(Own), 2)
    assert BEGAN not in caplog.text


@pytest.mark.costly
def test_settings_that_have_no_effect_are_told_in_one_line(tmp_path, caplog):
    start(tmp_path, of(ADAMW), 1)
    group = start(tmp_path, of(ADAMW, weight_decay=0.9, betas=[0.9, 0.99], eps=1e-6), 2)
    (words,) = [one.getMessage() for one in caplog.records if BEGAN in one.getMessage()]
    told = "(betas [0.9, 0.999] -> [0.9, 0.99], eps 1e-08 -> 1e-06, weight_decay 0.01 -> 0.9)"
    assert words.startswith(
        f"The optimizer 'opt_class' has other settings than those {BEGAN} {told}, without effect"
    )
    assert (group["eps"], group["betas"]) == (1e-8, (0.9, 0.999))
    caplog.clear()
    start(tmp_path, of(ADAMW), 3)
    assert BEGAN not in caplog.text


def test_an_optimizer_without_a_name_is_told_too(tmp_path, caplog):
    start(tmp_path, of(SGD, momentum=0.5), 1, cls=Single)
    start(tmp_path, of(SGD, momentum=0.9), 2, cls=Single)
    assert (
        f"The optimizer 'optimizer' has other settings than those {BEGAN} (momentum 0.5 -> 0.9)"
    ) in caplog.text


def one_cycle(optimizer, _):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=100)


@pytest.mark.parametrize(
    ("kind", "given"),
    [(ADAMW, {}), (SGD, {"momentum": 0.9, "weight_decay": 0.1})],
)
def test_what_a_schedule_and_a_recipe_change_is_no_change_of_the_script(
    tmp_path,
    caplog,
    kind,
    given,
):
    for epochs in (1, 2, 3):
        group = start(tmp_path, of(kind, **given), epochs, one_cycle)
    assert group["lr"] != 0.01
    assert group["weight_decay"] < 0.05
    assert BEGAN not in caplog.text


@pytest.mark.costly
def test_of_a_checkpoint_of_an_earlier_version_nothing_is_told(tmp_path, caplog):
    start(tmp_path, of(ADAMW), 1)
    (file,) = tmp_path.glob("CKPT+*/brain.ckpt")
    state = yaml.safe_load(file.read_text())
    del state["settings"]
    file.write_text(yaml.safe_dump({**state, "rates": {"opt_class": [0.01]}}))
    start(tmp_path, of(ADAMW, weight_decay=0.9), 2, ckpt_verify="off")
    assert BEGAN not in caplog.text
    start(tmp_path, of(ADAMW, lr=0.5, weight_decay=0.9), 3)
    assert "(lr 0.01 -> 0.5)" in caplog.text
