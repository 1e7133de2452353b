"""What a recipe freezes, sets free, leaves out of its checkpoints or does in the wrong place, and a
restart.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from ddpkit.base import dump_plain_yaml
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from ddpkit.types import Stage
from tests.recipes import (
    QUIET,
    EvaluatesAsItIs,
    Killed,
    Mortal,
    Regression,
    assert_same,
    linear,
    make,
    points,
    sgd,
    weights,
)

DATA = points(12)
KWARGS = {"batch_size": 2, "shuffle": True}


class Freezing(Mortal):
    """Freezes and sets free a part of its model when an epoch begins, and not again later."""

    plan: ClassVar = {}  # epoch -> whether the head is trained from then on

    def compute_forward(self, batch, stage):
        return self.modules.head(torch.tanh(self.modules.net(batch[0])))

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN and epoch in self.plan and self.step == 0:
            for parameter in self.modules.head.parameters():
                parameter.requires_grad_(self.plan[epoch])

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})


def run(folder, plan, dies_at=None, **options):
    net = linear()
    counter = EpochCounter(4)
    head = nn.Linear(1, 1).double()
    checkpointer = Checkpointer(folder, {"net": net, "head": head, "counter": counter})
    run_opts = {**QUIET, "ckpt_interval_steps": 2, **options}
    brain = Freezing({"net": net, "head": head}, sgd(momentum=0.9), None, run_opts, checkpointer)
    brain.plan = plan
    brain.dies_at = dies_at
    if dies_at is None:
        brain.fit(counter, DATA, train_loader_kwargs=KWARGS)
    else:
        with pytest.raises(Killed):
            brain.fit(counter, DATA, train_loader_kwargs=KWARGS)
    return brain


PLANS = {
    "frozen": {2: False},
    "frozen and free": {1: False, 3: True},
    "twice": {2: False, 3: True, 4: False},
}


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("dies_at", [(3, 1), (3, 5), (4, 3)])
@pytest.mark.parametrize("plan", PLANS)
def test_what_was_frozen_in_an_earlier_epoch_is_frozen_after_a_restart(tmp_path, plan, dies_at):
    plan = PLANS[plan]
    whole = run(tmp_path / "whole", plan)
    run(tmp_path / "killed", plan, dies_at)
    resumed = run(tmp_path / "killed", plan)
    assert_same(weights(resumed), weights(whole))
    flags = [
        [one.requires_grad for one in brain.modules.parameters()] for brain in (resumed, whole)
    ]
    assert flags[0] == flags[1]


@pytest.mark.costly
def test_what_the_script_freezes_otherwise_from_the_start_counts(tmp_path):
    """Only what has changed since training began is taken from a checkpoint."""
    run(tmp_path, {}, dies_at=(3, 1))
    net = linear()
    head = nn.Linear(1, 1).double()
    net.requires_grad_(False)
    before = net.weight.clone()
    counter = EpochCounter(4)
    checkpointer = Checkpointer(
        tmp_path,
        {"net": net, "head": head, "counter": counter},
        allow_partial_load=True,
    )
    brain = Freezing({"net": net, "head": head}, None, None, QUIET, checkpointer)
    brain.init_optimizers = lambda: None
    brain.on_fit_start()
    assert not torch.equal(net.weight, before), "it was recovered"
    assert not net.weight.requires_grad


class FreezingByOption(Freezing):
    """Freezes a part of its model at every start, if its option says so."""

    freezes = True

    def on_fit_start(self):
        super().on_fit_start()
        if self.freezes:
            self.modules.head.requires_grad_(False)


def test_what_a_recipe_freezes_at_every_start_follows_its_options(tmp_path):
    net = linear()
    head = nn.Linear(1, 1).double()
    for freezes, epochs in ((True, 2), (False, 3)):
        counter = EpochCounter(epochs)
        checkpointer = Checkpointer(tmp_path, {"net": net, "head": head, "counter": counter})
        brain = FreezingByOption({"net": net, "head": head}, sgd(), None, QUIET, checkpointer)
        brain.freezes = freezes
        head.requires_grad_(True)
        brain.fit(counter, DATA, train_loader_kwargs=KWARGS)
        assert head.weight.requires_grad is not freezes


@pytest.mark.costly
def test_of_a_checkpoint_that_does_not_tell_nothing_is_frozen(tmp_path, monkeypatch):
    """An earlier ddpkit has made it; and the script sets a part free between two calls of fit."""

    def script(folder, dies_at=None):
        net = linear()
        head = nn.Linear(1, 1).double()
        counters = [EpochCounter(2), EpochCounter(3)]
        recoverables = {"net": net, "head": head, "one": counters[0], "two": counters[1]}
        brain = Freezing(
            {"net": net, "head": head},
            sgd(),
            None,
            QUIET,
            Checkpointer(folder, recoverables),
        )
        head.requires_grad_(False)
        brain.fit(counters[0], DATA, train_loader_kwargs=KWARGS)
        head.requires_grad_(True)
        brain.dies_at = dies_at
        brain.fit(counters[1], DATA, train_loader_kwargs=KWARGS)
        return weights(brain)

    def without_flags(state):
        return dump_plain_yaml({name: value for name, value in state.items() if name != "trained"})

    whole = script(tmp_path / "whole")
    assert_same(script(tmp_path / "whole"), whole)
    monkeypatch.setattr("ddpkit.base.dump_plain_yaml", without_flags)
    with pytest.raises(Killed):
        script(tmp_path / "killed", (3, 1))
    monkeypatch.undo()
    assert_same(script(tmp_path / "killed"), whole)


def train_on_ranks(folder, plan, dies_at):
    return weights(run(folder, plan, dies_at))


@pytest.mark.slow
def test_ranks_average_what_is_trained_after_a_restart(tmp_path, ranks):
    plan = PLANS["frozen and free"]
    whole, same = ranks.run(train_on_ranks, tmp_path / "whole", plan, None)
    assert_same(same, whole)
    ranks.run(train_on_ranks, tmp_path / "killed", plan, (4, 1))
    for resumed in ranks.run(train_on_ranks, tmp_path / "killed", plan, None):
        assert_same(resumed, whole)


class Forgetful(Regression):
    """Has two optimizers, and gives the checkpointer one."""

    holder = None

    def init_optimizers(self):
        parameters = list(self.modules.parameters())
        self.first, self.second = (
            torch.optim.SGD([one], lr=0.1, momentum=0.9) for one in parameters
        )
        self.optimizers_dict = {"first": self.first, "second": self.second}
        self.checkpointer.add_recoverable("first", self.first)
        if self.holder is not None:
            self.holder.inner = {"second": self.second}
            hooks = {"custom_save_hook": lambda *_: None, "custom_load_hook": lambda *_: None}
            self.checkpointer.add_recoverable("holder", self.holder, **hooks)


class Holder:
    """Has an optimizer among its attributes."""


@pytest.mark.parametrize("holder", [None, Holder()])
def test_an_optimizer_that_no_checkpoint_holds_is_told(tmp_path, caplog, holder):
    brain = make(Forgetful, folder=tmp_path)
    brain.holder = holder
    brain.on_fit_start()
    lines = [
        record.getMessage() for record in caplog.records if "optimizer(s)" in record.getMessage()
    ]
    assert [line.split(":")[0] for line in lines] == (
        ["The checkpointer saves nothing of the optimizer(s) second"] if holder is None else []
    )


class Evaluating(Regression):
    """Evaluates inside of fit."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage is Stage.VALID:
            self.checkpointer.save_and_keep_only(
                meta={"loss": float(epoch)},
                min_keys=["loss"],
                num_to_keep=9,
            )
            self.evaluate(DATA, min_key="loss", test_loader_kwargs={"batch_size": 4})


class EvaluatingAsItIs(EvaluatesAsItIs, Evaluating):
    """The same, but nothing is recovered."""


def test_evaluate_does_not_rewind_the_training_that_it_is_called_in(tmp_path):
    brain = make(Evaluating, folder=tmp_path / "refused")
    with pytest.raises(
        ConfigError,
        match=r"evaluate was called inside fit: it would recover a "
        r"checkpoint.*valid_set",
    ):
        brain.fit(EpochCounter(3), DATA, DATA, train_loader_kwargs=KWARGS)
    brain = make(EvaluatingAsItIs, folder=tmp_path / "as it is")
    plain = make(folder=tmp_path / "plain")
    for one in (brain, plain):
        torch.manual_seed(3)
        one.fit(EpochCounter(3), DATA, DATA, train_loader_kwargs=KWARGS)
    assert_same(weights(brain), weights(plain))
    assert [entry[0] for entry in brain.losses] == ["TRAIN", "VALID", "TEST"] * 3


class SavingInside(Regression):
    """Saves after every other batch, as if an epoch were over, or not."""

    options: ClassVar = {}

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.step % 2 == 0:
            self.checkpointer.save_checkpoint(**self.options)


@pytest.mark.parametrize(("options", "is_told"), [({}, True), ({"end_of_epoch": False}, False)])
def test_a_save_that_drops_the_rest_of_an_epoch_is_told(tmp_path, caplog, options, is_told):
    brain = make(SavingInside, folder=tmp_path)
    brain.options = options
    brain.fit(EpochCounter(1), DATA, train_loader_kwargs=KWARGS)
    assert ("end_of_epoch=False" in caplog.text) is is_told
