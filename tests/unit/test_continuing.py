"""Several runs in one folder: what each keeps, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.types import Stage


class Scored(Brain):
    """Keeps the one checkpoint with the lowest score; the scores are given."""

    def compute_forward(self, batch, stage):
        return self.modules.model(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.pow(2).mean()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage == Stage.TRAIN:
            meta = {"score": self.hparams.scores[epoch - 1], "who": self.hparams.who}
            self.checkpointer.save_and_keep_only(meta=meta, min_keys=["score"])


def train(folder, who, scores, resume):
    counter, model = EpochCounter(len(scores)), nn.Linear(2, 1)
    brain = Scored(
        modules={"model": model},
        opt_class=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        hparams={"scores": scores, "who": who},
        run_opts={"device": "cpu", "noprogressbar": True, "resume": resume},
        checkpointer=Checkpointer(folder, {"model": model, "counter": counter}),
    )
    brain.fit(counter, [torch.ones(1, 2)] * 2)
    return sorted((ckpt.meta["who"], ckpt.meta["score"]) for ckpt in brain.checkpointer.list_checkpoints())


@pytest.mark.filterwarnings("ignore")
def test_retention_leaves_the_checkpoints_of_another_run_alone(tmp_path):
    """Run A's best is better than all of B's, and deletes none of them; A's stays, also where B's is better."""
    assert train(tmp_path, "a", [1.0, 2.0], "auto") == [("a", 1.0), ("a", 2.0)]  # the best and the newest
    assert train(tmp_path, "b", [9.0, 7.0, 8.0], "never") == [("a", 1.0), ("a", 2.0), ("b", 7.0), ("b", 8.0)]
    # B goes on: the newest are its own, and what it keeps is chosen among those
    assert train(tmp_path, "b", [9.0, 7.0, 8.0, 6.0], "auto") == [("a", 1.0), ("a", 2.0), ("b", 6.0)]


def test_a_run_that_goes_on_counts_what_came_before(tmp_path):
    assert train(tmp_path, "a", [1.0, 2.0], "auto") == [("a", 1.0), ("a", 2.0)]
    assert train(tmp_path, "b", [1.0, 2.0, 0.5], "auto") == [("b", 0.5)]
