"""A training that does not get better ends, says why, and goes on with more patience."""

from __future__ import annotations

import pytest

from ddpkit import Stage, parts
from ddpkit.checkpoints import Checkpointer
from ddpkit.control.failure import is_shown_without_traceback
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from ddpkit.parts import EarlyStopping
from tests.recipes import QUIET, Killed, Regression, SavesAfterValidation, linear, points, sgd

DATA = points(4)


class Scored(SavesAfterValidation):
    """Logs a score for each epoch, from a list."""

    scores: tuple[float, ...] = ()
    epoch = 0

    def compute_forward(self, batch, stage):
        if stage is Stage.VALID:
            self.log("score", self.scores[self.epoch - 1])
        return super().compute_forward(batch, stage)

    def on_stage_start(self, stage, epoch=None):
        self.epoch = epoch


def epochs(scores, folder=None, limit=None, **arguments):
    """Return how many epochs were trained in all, and the part."""
    net = linear()
    counter = EpochCounter(limit or len(scores))
    part = EarlyStopping(**{"metric": "score", **arguments})
    checkpointer = None
    if folder is not None:
        checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = Scored({"net": net}, sgd(), {}, QUIET, checkpointer, parts=[part])
    brain.scores = scores
    result = brain.fit(counter, DATA, DATA)
    return counter.current, result.reason, part


@pytest.mark.parametrize(
    ("arguments", "scores", "trained"),
    [
        ({"patience": 2}, (5, 4, 4, 4, 1), 4),
        ({"patience": 2}, (5, 4, 4, 3, 3, 3, 1), 6),
        ({"patience": 1, "mode": "max"}, (1, 2, 3, 3, 9), 4),
        ({"patience": 1, "min_change": 0.5}, (5, 4, 3.6, 1), 3),
        ({"patience": 1, "warmup": 3}, (5, 6, 7, 4, 4, 1), 5),
        ({"patience": 2}, (float("nan"), 5, float("nan"), float("inf"), 1), 4),
        ({"patience": 3}, (3, 2, 1), 3),
    ],
)
def test_the_training_ends_when_the_score_has_not_become_better(arguments, scores, trained):
    found, reason, _ = epochs(scores, **arguments)
    assert found == trained
    assert reason == ("early_stop" if trained < len(scores) else "epochs")


class SavesScores(Scored):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is Stage.VALID:
            self.checkpointer.save_checkpoint({"score": self.logged["score"], "epoch": epoch})


def test_of_equal_epochs_the_newest_is_the_best_as_of_checkpoints(tmp_path):
    net = linear()
    part = EarlyStopping("score", patience=4)
    checkpointer = Checkpointer(tmp_path, {"net": net})
    brain = SavesScores({"net": net}, sgd(), {}, QUIET, checkpointer, parts=[part])
    brain.scores = (5, 4, 6, 4, 7)
    brain.fit(EpochCounter(5), DATA, DATA)
    assert (part.best, part.best_epoch, part.waited) == (4.0, 4, 3)
    assert checkpointer.find_checkpoint(min_key="score").meta["epoch"] == part.best_epoch


def on_ranks():
    return epochs((5, 4, 4, 4, 1), patience=2)[:2]


@pytest.mark.costly
def test_all_ranks_end_together(ranks):
    assert ranks.run(on_ranks, world_size=2) == [(4, "early_stop")] * 2


@pytest.mark.costly
def test_a_run_that_has_stopped_says_why_and_goes_on_with_more_patience(tmp_path, caplog):
    caplog.set_level("INFO")
    scores = (5, 4, 4, 4, 4, 1)
    assert epochs(scores, tmp_path, patience=2)[:2] == (4, "early_stop")
    caplog.clear()
    assert epochs(scores, tmp_path, patience=2)[:2] == (4, "early_stop")
    said = " ".join(caplog.text.split())
    assert "Nothing is trained: score has not become better in 2 validations" in said
    assert "its best was 4, last in epoch 4" in said
    assert "Give more patience than 2" in said
    found, reason, part = epochs(scores, tmp_path, patience=4)
    assert (found, reason) == (6, "epochs")
    assert (part.best, part.best_epoch, part.waited) == (1.0, 6, 0)


class Dies(Scored):
    """Dies before it validates in an epoch of a call of fit."""

    dies_in = None
    call = 0

    def on_stage_start(self, stage, epoch=None):
        super().on_stage_start(stage, epoch)
        if stage is Stage.VALID and self.dies_in == (self.call, epoch):
            raise Killed


def two_calls(folder=None, dies_in=None):
    """Pretrain and fine-tune with one Brain; return the epochs of each call, and the part."""
    net = linear()
    part = EarlyStopping("score", patience=2)
    counters = [EpochCounter(6), EpochCounter(6)]
    checkpointer = None
    if folder is not None:
        named = {"net": net, "first": counters[0], "second": counters[1]}
        checkpointer = Checkpointer(folder, named)
    brain = Dies({"net": net}, sgd(), {}, QUIET, checkpointer, parts=[part])
    brain.dies_in = dies_in
    for brain.call, scores in enumerate([(1, 2, 3), (9, 8, 8, 8)], 1):
        brain.scores = scores
        try:
            brain.fit(counters[brain.call - 1], DATA, DATA)
        except Killed:
            break
    return [counter.current for counter in counters], part.best, part.best_epoch


def test_a_further_call_of_fit_counts_anew():
    assert two_calls() == ([3, 4], 8.0, 4)


@pytest.mark.costly
@pytest.mark.parametrize("dies_in", [(1, 2), (2, 1), (2, 3), (2, 4)])
def test_calls_of_fit_that_go_on_from_a_checkpoint_end_as_if_nobody_had_killed_them(
    tmp_path, dies_in
):
    two_calls(tmp_path, dies_in)
    assert two_calls(tmp_path) == ([3, 4], 8.0, 4)
    assert two_calls(tmp_path) == ([3, 4], 8.0, 4)


class SavesBetweenSteps(Regression):
    """Saves in each validation, also where one ends the training inside of an epoch."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage is Stage.VALID:
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})


def stopped_inside(folder, *, dies=False):
    """End a call of fit in a validation between two steps; train on with the same counter."""
    net = linear()
    counter = EpochCounter(3)
    stops = EarlyStopping(patience=1, min_change=100.0)
    asked = [parts.ValidationSchedule(every_steps=3), stops]
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = SavesBetweenSteps({"net": net}, sgd(), {}, QUIET, checkpointer, parts=asked)
    rows = points(20)
    each = {"batch_size": 2, "shuffle": True}
    brain.fit(counter, rows, DATA, train_loader_kwargs=each)
    first = counter.current, brain.optimizer_step
    if dies:
        return None
    result = brain.fit(counter, rows, DATA, train_loader_kwargs=each)
    return first, counter.current, result.optimizer_steps, net.weight.tolist()


@pytest.mark.costly
def test_a_call_of_fit_that_has_ended_inside_of_an_epoch_ends_there_after_a_kill_too(tmp_path):
    whole = stopped_inside(tmp_path / "whole")
    assert whole[:3] == ((1, 6), 2, 12)
    stopped_inside(tmp_path / "killed", dies=True)
    assert stopped_inside(tmp_path / "killed") == whole
    assert stopped_inside(tmp_path / "whole")[1:] == whole[1:]


def test_the_loss_of_the_validation_needs_no_log():
    part = EarlyStopping(patience=1)
    net = linear()
    brain = Scored({"net": net}, sgd(lr=0.0), {}, QUIET, parts=[part])
    brain.scores = (0,) * 9
    assert brain.fit(range(1, 10), DATA, DATA).epochs == 2
    assert part.best == pytest.approx(brain.progress.valid_loss)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "least"}, "mode='least'"),
        ({"patience": 0}, "patience=0 must be a whole number >= 1"),
        ({"patience": 1.5}, "patience=1.5"),
        ({"min_change": -1}, "min_change=-1"),
        ({"min_change": "small"}, "min_change='small' must be a number"),
        ({"warmup": -1}, "warmup=-1"),
        ({"metric": 3}, "metric=3 is no name"),
        ({"metric": ""}, "metric='' is no name"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        EarlyStopping(**arguments)


def test_a_score_that_is_not_logged_is_named_with_those_that_are():
    with pytest.raises(ConfigError, match="'accuracy' was not logged.*has logged score"):
        epochs((1, 2), metric="accuracy")
    with pytest.raises(
        ConfigError, match=r"has logged score\. Did you mean 'score'\? Call"
    ) as found:
        epochs((1, 2), metric="scor")
    assert is_shown_without_traceback(found.value)
