"""Metrics of a recipe that a training epoch counts go on after a resume, on any number of
processes.
"""

from __future__ import annotations

import pytest
import torch

from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError
from ddpkit.metrics import Accuracy, Mean, Sum
from ddpkit.types import Stage
from tests.recipes import QUIET, Killed, Mortal, points

OPTIONS = {**QUIET, "ckpt_interval_steps": 2, "global_batch_size": 6}


class Counting(Mortal):
    """Makes a metric in each stage, resets one of the YAML, and never resets a third."""

    def compute_objectives(self, predictions, batch, stage):
        errors = (predictions - batch[1]).square()
        if stage is Stage.TRAIN:
            self.accuracy.update(
                (errors < 1).long().flatten(),
                torch.ones(len(errors), dtype=torch.long),
            )
            self.hparams.mean.update(errors.mean(), len(errors))
            self.seen.update(torch.tensor(float(len(errors))))
        return errors.mean()

    def on_stage_start(self, stage, epoch=None):
        self.accuracy = Accuracy()
        self.hparams.mean.reset()

    def on_fit_start(self):
        super().on_fit_start()
        self.seen = Sum()
        self.told = []

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.told += [self.accuracy.compute(), self.hparams.mean.compute()]
        if epoch == 1:
            self.seen.reset()  # what it has counted in other epochs is in no checkpoint


def train(folder, dies_at=None):
    torch.manual_seed(3)
    net = torch.nn.Linear(3, 1).double()
    counter = EpochCounter(2)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    hparams = {"mean": Mean()}
    brain = Counting(
        {"net": net},
        lambda of: torch.optim.SGD(of, lr=0.1),
        hparams,
        OPTIONS,
        checkpointer,
    )
    brain.dies_at = dies_at
    try:
        brain.fit(counter, points(40), train_loader_kwargs={"shuffle": True})
    except Killed:
        return None
    return [*brain.told[-2:], brain.seen.compute()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [(2, 2), (2, 1), *(pytest.param(one, marks=pytest.mark.slow) for one in [(1, 1), (2, 3)])],
)
def test_metrics_of_a_training_epoch_go_on(ranks, tmp_path, sizes):
    whole = ranks.run(train, tmp_path / "whole", world_size=sizes[1])[0]
    ranks.run(train, tmp_path / "killed", 12, world_size=sizes[0])
    for found in ranks.run(train, tmp_path / "killed", world_size=sizes[1]):
        assert found == pytest.approx(whole, rel=1e-12)
    assert whole[2] == 40


def test_a_checkpoint_without_metrics_is_told(tmp_path, caplog, monkeypatch):
    # as an earlier version has saved it
    monkeypatch.setattr("ddpkit.run.stage_runner.metrics_of", lambda *_: {})
    train(tmp_path, dies_at=12)
    monkeypatch.undo()
    train(tmp_path)
    assert "no totals of these metrics: seen, accuracy, mean." in caplog.text
    assert "they count the batches after batch 4 only" in caplog.text


def save_a_metric(folder, when):
    checkpointer = Checkpointer(folder)
    if when == "saved":
        checkpointer.recoverables["seen"] = Sum()  # by hand
    try:
        checkpointer.save_checkpoint() if when == "saved" else checkpointer.add_recoverable(
            "seen",
            Sum(),
        )
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("when", ["saved", "added"])
def test_a_metric_that_is_given_to_the_checkpointer_is_refused_on_several_ranks(
    ranks,
    tmp_path,
    when,
):
    assert ranks.run(save_a_metric, tmp_path, when, world_size=1) == [""]
    for message in ranks.run(save_a_metric, tmp_path, when):
        assert "'seen' is a Sum, whose totals are of each rank" in message
        assert "attribute of the Brain" in message
