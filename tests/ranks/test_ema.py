"""Averaged weights on real ranks: the same average as in one process, and the same file."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.types import Stage
from tests.recipes import QUIET, Poisoned, assert_same, points, sgd, world_size

DECAY = 0.8


class Recipe(Poisoned):
    """A normalised network; one poisoned step per epoch; saves after validation, by all ranks."""

    bad_steps = (3,)
    dies_at = None

    def compute_forward(self, batch, stage):
        if stage is Stage.TRAIN and self.dies_at == (self.progress.epoch, self.optimizer_step):
            raise InterruptedError
        return super().compute_forward(batch, stage)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is Stage.VALID:
            self.losses.append(stage_loss)
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})


def train(folder, *, epochs=2, dies_at=None, seed=7):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    frozen = nn.Linear(2, 2).requires_grad_(requires_grad=False).double()
    counter = EpochCounter(epochs)
    options = {
        **QUIET,
        "ema_decay": DECAY,
        "evaluate_ema": True,
        "ckpt_interval_steps": 2 if dies_at else 0,
    }
    checkpointer = Checkpointer(folder, {"net": net, "frozen": frozen, "counter": counter})
    brain = Recipe({"net": net, "frozen": frozen}, sgd(momentum=0.9), None, options, checkpointer)
    brain.losses = []
    brain.dies_at = dies_at
    kwargs = {"batch_size": 12 // world_size(), "shuffle": True}
    try:
        brain.fit(counter, points(60), points(6, seed=8), train_loader_kwargs=kwargs)
    except InterruptedError:
        return None
    saved = checkpointer.find_checkpoint()
    tested = brain.evaluate(points(7, seed=9))
    own = {name: value.clone() for name, value in brain.raw_modules.state_dict().items()}
    return {
        "average": {name: value.clone() for name, value in brain.ema.state_dict().items()},
        "file": torch.load(saved.paramfiles["ema"], weights_only=True),
        "weights": own,
        "losses": [*brain.losses, tested],
    }


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=0,
            atol=1e-10,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 2])
def test_the_average_is_that_of_one_process(ranks, tmp_path, world):
    expected = train(tmp_path / "one")
    assert expected["average"]["n_averaged"] == 8  # of ten steps two had no finite gradient
    results = ranks.run(train, tmp_path / "many", world_size=world)
    for found in results:
        assert_same(found["average"], results[0]["average"])
        assert_same(found["file"], found["average"])
        assert_close(found["average"], expected["average"])
        assert_close(found["weights"], expected["weights"])
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    assert list(results[0]["file"]) == list(expected["file"])
    assert not torch.equal(expected["average"]["net.0.weight"], expected["weights"]["net.0.weight"])


@pytest.mark.slow
def test_a_run_of_two_processes_continues_the_average_of_one_and_the_other_way_round(
    ranks,
    tmp_path,
):
    expected = train(tmp_path / "whole")
    assert train(tmp_path / "one", dies_at=(2, 6)) is None
    for found in ranks.run(train, tmp_path / "one", world_size=2):
        assert_close(found["average"], expected["average"])
        assert found["losses"][-1] == pytest.approx(expected["losses"][-1], rel=1e-10)


def interrupted_and_resumed(folder):
    train(folder, dies_at=(2, 6))
    return train(folder, seed=8)


@pytest.mark.slow
def test_a_resumed_average_is_bit_identical_on_every_rank(ranks, tmp_path):
    whole = ranks.run(train, tmp_path / "whole", world_size=2)
    resumed = ranks.run(interrupted_and_resumed, tmp_path / "killed", world_size=2)
    for found, expected in zip(resumed, whole, strict=True):
        assert_same(found["average"], expected["average"])
        assert_same(found["weights"], expected["weights"])
        assert found["losses"][-1] == expected["losses"][-1]
    assert train(tmp_path / "killed", epochs=2)["losses"] == pytest.approx(
        whole[0]["losses"][-1:],
        rel=1e-10,
    )
