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
    """Keeps the checkpoint with the lowest score, and the newest; the scores are given."""

    named = False

    def compute_forward(self, batch, stage):
        return self.modules.model(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.pow(2).mean()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage == Stage.TRAIN:
            meta = {"score": self.hparams.scores[epoch - 1], "who": self.hparams.who}
            name = f"epoch{epoch}" if self.named else None
            self.checkpointer.save_and_keep_only(meta=meta, min_keys=["score"], name=name)


class Named(Scored):
    """Saves under names that the next run uses, too."""

    named = True


def train(folder, who, scores, resume, kind=Scored):
    counter, model = EpochCounter(len(scores)), nn.Linear(2, 1)
    brain = kind(
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


@pytest.mark.filterwarnings("ignore")
def test_the_checkpoint_that_a_run_was_told_to_start_from_stays(tmp_path):
    """The same command needs it again; and so does a run that goes on by itself in between."""
    train(tmp_path, "a", [1.0, 2.0], "auto")
    named = next(path for path in sorted(tmp_path.glob("CKPT+*")) if "score: 2.0" in (path / "CKPT.yaml").read_text())
    of_a = [("a", 1.0), ("a", 2.0)]
    assert train(tmp_path, "b", [0.0, 0.0, 5.0, 6.0], str(named)) == [*of_a, ("b", 5.0), ("b", 6.0)]
    assert train(tmp_path, "b", [0.0, 0.0, 5.0, 6.0, 4.0], "auto") == [*of_a, ("b", 4.0)]
    assert (named / "CKPT.yaml").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_name_that_the_run_has_taken_over_counts_as_its_own(tmp_path):
    train(tmp_path, "a", [4.0, 3.0], "never", Named)
    train(tmp_path, "b", [4.0, 3.0, 2.0], "never", Named)
    assert sorted(path.name for path in tmp_path.glob("CKPT+*")) == ["CKPT+epoch3"]


# ------------------------------------------------------------------------------------ what is said of the start


def said(caplog, row):
    """Return what the blocks say, the newest last."""
    lines = [line.strip() for record in caplog.records for line in record.getMessage().splitlines()]
    return [line.removeprefix(row).strip() for line in lines if line.startswith(row)]


def brain_of(kind, folder, **given):
    model = nn.Linear(2, 1)
    checkpointer = Checkpointer(folder, {"model": model}, **given)
    return kind(
        modules={"model": model},
        opt_class=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        run_opts={"device": "cpu", "noprogressbar": True},
        checkpointer=checkpointer,
    )


class Plain(Scored):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        pass


class NoRecovery(Plain):
    def on_fit_start(self):
        self.init_optimizers()


class Averaging(Plain):
    def on_evaluate_start(self, max_key=None, min_key=None):
        super().on_evaluate_start(max_key, min_key)


def test_what_the_block_says_of_weights_is_what_was_loaded(tmp_path, caplog):
    caplog.set_level("INFO")
    data = [torch.ones(1, 2)] * 2
    saved = Checkpointer(tmp_path, {"model": nn.Linear(2, 1)}).save_checkpoint().path  # of no Brain
    brain_of(Plain, tmp_path, allow_partial_load=True).fit([1], data)
    assert said(caplog, "start ")[-1].startswith(f"from {saved}: ")
    brain_of(NoRecovery, tmp_path).fit([1], data)
    assert said(caplog, "start ")[-1] == f"no checkpoint was loaded, of 1 in {tmp_path}"
    brain_of(Plain, tmp_path, allow_partial_load=True).evaluate(data)
    assert said(caplog, "weights ")[-1] == f"from {saved}"
    brain_of(Averaging, tmp_path, allow_partial_load=True).evaluate(data)
    assert said(caplog, "weights ")[-1] == f"from {saved}; Averaging.on_evaluate_start may have changed them"
