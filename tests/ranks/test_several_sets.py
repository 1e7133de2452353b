"""Several training sets at once on real ranks: one training on any number, also after a kill."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.dataloader import JointSets, MixedSets
from ddpkit.distributed import gather_objects
from ddpkit.epoch_loop import EpochCounter
from tests.recipes import QUIET, Killed, linear, points, sgd, weights

CLOSE = {"rtol": 0, "atol": 1e-10}


def rows(size, seed):
    return [
        {"id": 1000 * seed + number, "x": x, "y": y}
        for number, (x, y) in enumerate(points(size, seed=seed))
    ]


def mixed():
    sets = {"few": rows(5, 1), "many": rows(23, 2)}
    return MixedSets(sets, {"few": 1, "many": 2}, until=37, set_key="set", seed=4)


def joint():
    sets = {"few": rows(5, 1), "many": rows(37, 2)}
    return JointSets(sets, {"few": 1, "many": 2}, seed=4)


class Learner(Brain):
    """Fits a line to several sets; notes the ids of each step, and dies where it is told to."""

    dies_at = None

    def on_stage_start(self, stage, epoch=None):
        self.epoch = epoch

    def on_fit_batch_start(self, batch, should_step):
        if self.dies_at == (self.epoch, self.step):
            raise Killed
        if self.progress.window.count:
            parts = [batch] if "id" in batch else batch.values()
            ids = [number for part in parts for number in part["id"].tolist()]
            self.noted.append((self.epoch, self.optimizer_step, ids))

    def loss(self, part):
        return nn.functional.mse_loss(self.modules.net(part["x"]), part["y"], reduction="none")

    def compute_forward(self, batch, stage):
        if "id" in batch:
            factor = torch.tensor([2.0 if name == "few" else 1.0 for name in batch["set"]])
            return (self.loss(batch)[:, 0] * factor).mean()
        return self.loss(batch["few"]).mean() + 0.3 * self.loss(batch["many"]).mean()

    def compute_objectives(self, predictions, batch, stage):
        return predictions


def train(folder, make, dies_at=None, more=()):
    counter = EpochCounter(2)
    net = linear()
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    options = {**QUIET, "ckpt_interval_steps": 1, "global_batch_size": 6, **dict(more)}
    brain = Learner({"net": net}, sgd(momentum=0.9), None, options, checkpointer)
    brain.dies_at = dies_at
    brain.noted = []
    try:
        brain.fit(counter, make())
    except Killed:
        return None
    steps = {}
    for epoch, step, ids in (one for noted in gather_objects(lambda: brain.noted) for one in noted):
        steps.setdefault((epoch, step), []).extend(ids)
    return {place: sorted(ids) for place, ids in steps.items()}, weights(brain)


def assert_close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **CLOSE)


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize("make", [mixed, joint])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_sets_are_the_same_training_on_any_number_of_processes(
    ranks, tmp_path, make, world
):
    [(steps, expected)] = ranks.run(train, tmp_path / "one", make, world_size=1)
    for found, trained in ranks.run(train, tmp_path / "more", make, world_size=world):
        assert found == steps, "the same samples in each step"
        assert_close(trained, expected)
    assert len(steps) == 14 if make is mixed else 8
    assert {len(ids) for ids in steps.values()} == ({6, 1} if make is mixed else {18, 3})


@pytest.mark.costly
@pytest.mark.parametrize("make", [mixed, pytest.param(joint, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2, 1),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(1, 3, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_inside_an_epoch_with_the_same_samples(
    ranks, tmp_path, make, before, after
):
    [(steps, expected)] = ranks.run(train, tmp_path / "whole", make, world_size=1)
    killed = ranks.run(train, tmp_path / "killed", make, (2, 2), world_size=before)
    assert killed == [None] * before
    for found, trained in ranks.run(train, tmp_path / "killed", make, world_size=after):
        assert found == {place: ids for place, ids in steps.items() if place in found}
        assert 0 < len(found) < len(steps) / 2, "it went on inside the second epoch"
        assert_close(trained, expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"virtual_ranks": 6}, {"micro_batch_size": 1}])
def test_several_sets_in_small_batches_and_on_virtual_ranks(ranks, tmp_path, options):
    results = [
        ranks.run(train, tmp_path / str(world), mixed, None, options, world_size=world)
        for world in (1, 2)
    ]
    [[(steps, expected)], more] = results
    for found, trained in more:
        assert found == steps
        assert_close(trained, expected)
