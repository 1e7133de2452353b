"""Law 2 where an epoch's position is easily lost: batch samplers of changing length, evaluations in
hooks.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler, WeightedRandomSampler

from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import RunStopped
from ddpkit.types import Stage
from tests.recipes import (
    QUIET,
    EvaluatesAsItIs,
    Killed,
    Regression,
    assert_same,
    linear,
    points,
    seen_in,
    sgd,
    weights,
)

DATA = points(20)


class Growing(BatchSampler):
    """More batches in each epoch."""

    def __init__(self):
        super().__init__(SequentialSampler(DATA), 4, drop_last=False)
        self.epoch = 1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 2 * self.epoch

    def __iter__(self):
        return iter([[number, number + 3] for number in range(len(self))])


class Learner(EvaluatesAsItIs):
    """Ends as if killed, or asks for a stop, at a place; may evaluate before an epoch begins."""

    ends_at = None
    evaluates = False

    def on_fit_start(self):
        super().on_fit_start()
        if self.evaluates:
            self.evaluate(DATA[:4], test_loader_kwargs={"batch_size": 2})

    def on_stage_start(self, stage, epoch=None):
        if self.evaluates and stage is Stage.TRAIN:
            self.evaluate(DATA[:4], test_loader_kwargs={"batch_size": 2})

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.ends_at == (Stage.TRAIN, self.progress.epoch, self.step):
            raise Killed

    def compute_objectives(self, predictions, batch, stage):
        if stage is Stage.VALID and self.ends_at == (stage, self.progress.epoch):
            raise RunStopped(143, "test")
        return super().compute_objectives(predictions, batch, stage)


def train(folder, kwargs, ends_at=None, evaluates=False, cls=Learner, epochs=3):
    counter = EpochCounter(epochs)
    net = linear()
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    options = {**QUIET, "ckpt_interval_steps": 1}
    brain = cls({"net": net}, sgd(lr=0.05), None, options, checkpointer)
    brain.ends_at = ends_at
    brain.evaluates = evaluates
    try:
        brain.fit(
            counter,
            DATA,
            DATA[:4],
            train_loader_kwargs=kwargs() if callable(kwargs) else kwargs,
        )
    except Killed:
        return None
    return weights(brain), brain.optimizer_step, seen_in(DATA, brain.trained_on)


@pytest.mark.slow
@pytest.mark.parametrize("ends_at", [(Stage.TRAIN, 2, 3), (Stage.TRAIN, 3, 5)], ids=str)
def test_a_batch_sampler_with_more_batches_in_later_epochs_goes_on_where_it_was(tmp_path, ends_at):
    def kwargs():
        return {"batch_sampler": Growing()}

    expected = train(tmp_path / "whole", kwargs)
    assert train(tmp_path / "killed", kwargs, ends_at) is None
    found = train(tmp_path / "killed", kwargs)
    assert found[1] == expected[1] == 12
    assert_same(found[0], expected[0])
    assert found[2] == expected[2][-len(found[2]) :]


@pytest.mark.slow
def test_an_evaluation_before_an_epoch_leaves_its_position_alone(tmp_path):
    kwargs = {"batch_size": 4, "shuffle": True}
    expected = train(tmp_path / "whole", kwargs, evaluates=True)
    assert train(tmp_path / "killed", kwargs, (Stage.TRAIN, 2, 3), evaluates=True) is None
    found = train(tmp_path / "killed", kwargs, evaluates=True)
    assert found[1] == expected[1] == 15
    assert_same(found[0], expected[0])
    assert found[2] == expected[2][-len(found[2]) :]


class Chooses(Learner):
    """Draws one sample only, another in each epoch."""

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN:
            self.sampler.weights = torch.eye(len(DATA), dtype=torch.float64)[epoch]


@pytest.mark.costly
def test_what_a_sampler_draws_from_may_be_set_as_an_epoch_begins(tmp_path):
    Chooses.sampler = WeightedRandomSampler([1.0] * len(DATA), 8)
    *_, seen = train(tmp_path, {"sampler": Chooses.sampler, "batch_size": 4}, cls=Chooses)
    assert seen == [[epoch] * 4 for epoch in (1, 1, 2, 2, 3, 3)]


def test_batches_of_a_generator_are_enough_for_one_epoch(tmp_path):
    _, steps, seen = train(tmp_path, {"batch_sampler": ([number] for number in range(3))}, epochs=1)
    assert (steps, seen) == (3, [[0], [1], [2]])


class Saves(Regression):
    """Saves at the end of a test."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is Stage.VALID:
            self.checkpointer.save_checkpoint(meta={"loss": abs(epoch - 2)})
        if stage is Stage.TEST:
            self.checkpointer.save_checkpoint(meta={"loss": 9})


@pytest.mark.costly
def test_a_checkpoint_of_a_test_after_fit_is_not_where_training_goes_on(tmp_path):
    def start():
        counter = EpochCounter(4)
        net = linear()
        checkpointer = Checkpointer(tmp_path, {"net": net, "counter": counter})
        brain = Saves({"net": net}, sgd(lr=0.05), None, QUIET, checkpointer)
        brain.fit(counter, DATA, DATA[:4], train_loader_kwargs={"batch_size": 4})
        return brain

    first = start()
    assert first.optimizer_step == 20
    first.evaluate(DATA[:4], min_key="loss")
    again = start()
    assert (again.optimizer_step, again.trained_on) == (20, [])
