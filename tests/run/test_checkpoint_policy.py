"""What a run keeps in its folder, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpkit.brain import Brain, run_of
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.run.brain_file import EVALUATED, read_brain_file
from ddpkit.types import Stage
from tests.reading_blocks import block_rows
from tests.recipes import Squares


class Scored(Squares):
    """Keeps the checkpoint with the lowest score, and the newest; the scores are given."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage == Stage.TRAIN:
            meta = {"score": self.hparams.scores[epoch - 1], "who": self.hparams.who}
            self.checkpointer.save_and_keep_only(meta=meta, min_keys=["score"])


def train(folder, who, scores, resume):
    counter = EpochCounter(len(scores))
    model = nn.Linear(2, 1)
    brain = Scored(
        modules={"net": model},
        opt_class=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        hparams={"scores": scores, "who": who},
        run_opts={"device": "cpu", "noprogressbar": True, "resume": resume},
        checkpointer=Checkpointer(folder, {"model": model, "counter": counter}),
    )
    brain.fit(counter, [torch.ones(1, 2)] * 2)
    return sorted(
        (ckpt.meta["who"], ckpt.meta["score"]) for ckpt in brain.checkpointer.list_checkpoints()
    )


def test_a_run_that_begins_anew_does_not_count_what_was_there_and_leaves_it(tmp_path):
    """Run A's best is better than all of B's, and deletes none of them; A's stays, also where B's
    is better.
    """
    # the best and the newest
    assert train(tmp_path, "a", [1.0, 2.0], "auto") == [("a", 1.0), ("a", 2.0)]
    assert train(tmp_path, "b", [9.0, 7.0, 8.0], "never") == [("b", 7.0), ("b", 8.0)]
    assert train(tmp_path, "b", [9.0, 7.0, 8.0, 6.0], "auto") == [("b", 6.0)]
    [aside] = tmp_path.glob("earlier-*")
    assert sorted(one.meta["score"] for one in Checkpointer(aside).list_checkpoints()) == [1.0, 2.0]


def test_a_run_that_goes_on_counts_what_came_before(tmp_path):
    assert train(tmp_path, "a", [1.0, 2.0], "auto") == [("a", 1.0), ("a", 2.0)]
    assert train(tmp_path, "b", [1.0, 2.0, 0.5], "auto") == [("b", 0.5)]


@pytest.mark.parametrize(
    ("options", "seconds", "batches", "is_due"),
    [
        ({"ckpt_interval_minutes": 1.0}, 59.0, 99, False),
        ({"ckpt_interval_minutes": 1.0}, 60.0, 1, True),
        ({"ckpt_interval_steps": 3}, 99.0, 2, False),
        ({"ckpt_interval_steps": 3}, 1.0, 3, True),
        ({"ckpt_interval_minutes": 0.0}, 99.0, 99, False),
    ],
)
def test_intervals_are_of_minutes_and_of_batches(options, seconds, batches, is_due):
    brain = Brain(run_opts={"device": "cpu", "noprogressbar": True, **options})
    assert run_of(brain).policy.save_if_due(seconds, batches) is is_due


# --------------------------------------------------------------------------- savers of another kind


class Averaged(Scored):
    """Saves once more when it has been evaluated, as recipes do with averaged weights."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage == Stage.TEST:
            self.checkpointer.save_checkpoint(meta={"score": 0.5, "who": "test"})


def process(folder, kind, scores, *, test_only=False, **given):
    counter = EpochCounter(len(scores))
    model = nn.Linear(2, 1)
    brain = kind(
        modules={"net": model},
        opt_class=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        hparams={"scores": scores, "who": "a"},
        run_opts={"device": "cpu", "noprogressbar": True, "test_only": test_only},
        checkpointer=Checkpointer(folder, {"model": model, "counter": counter}, **given),
    )
    data = [torch.ones(1, 2)] * 2
    brain.fit(counter, data)
    if test_only:
        brain.evaluate(data, min_key="score")
    return brain


def scores_in(checkpointer):
    return sorted(each.meta["score"] for each in checkpointer.list_checkpoints())


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("partly", [False, True])
def test_what_a_process_saves_that_only_evaluates_does_not_disturb_the_training(tmp_path, partly):
    """It has no optimizer to save and no place in the training; and it would be the newest."""
    process(tmp_path, Averaged, [1.0, 2.0], allow_partial_load=partly)
    tested = process(tmp_path, Averaged, [1.0, 2.0], test_only=True, allow_partial_load=partly)
    assert scores_in(tested.checkpointer) == [0.5, 1.0, 2.0]
    brain = process(tmp_path, Averaged, [1.0, 2.0, 3.0, 4.0], allow_partial_load=partly)
    assert brain.optimizer_step == 8
    recovered = run_of(brain).policy.run_state.recovered
    assert recovered.name < tested.checkpointer.find_checkpoint(min_key="score").path.name
    last = brain.checkpointer.find_checkpoint()
    assert (last.meta["score"], read_brain_file(last.path)["optimizer_step"]) == (4.0, 8)
    assert EVALUATED not in read_brain_file(last.path)
    best = brain.checkpointer.find_checkpoint(min_key="score")
    assert best.meta["score"] == 0.5
    tested = process(tmp_path, Averaged, [], test_only=True)
    assert tested.checkpointer.last_loaded == best.path


# ------------------------------------------------------------------------ what is said of the start


def said(caplog, row):
    """Return what the blocks say, the newest last."""
    blocks = [
        block_rows(one.getMessage()) for one in caplog.records if one.name == "ddpkit.run.preflight"
    ]
    return [rows[row] for rows in blocks if row in rows]


def brain_of(kind, folder, **given):
    model = nn.Linear(2, 1)
    checkpointer = Checkpointer(folder, {"model": model}, **given)
    return kind(
        modules={"net": model},
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
    assert said(caplog, "start")[-1].startswith(f"from {saved}: ")
    brain_of(NoRecovery, tmp_path).fit([1], data)
    assert said(caplog, "start")[-1] == (
        f"from scratch: no checkpoint in {tmp_path} was loaded (--resume=auto)"
    )
    brain_of(Plain, tmp_path, allow_partial_load=True).evaluate(data)
    assert said(caplog, "weights")[-1] == f"from {saved}"
    brain_of(Averaging, tmp_path, allow_partial_load=True).evaluate(data)
    assert said(caplog, "weights")[-1] == f"from {saved}"
