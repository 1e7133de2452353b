"""`fit` says what it did: the last losses, epochs, optimizer steps, why it ended, and where the
checkpoints are.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

import ddpkit
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter, EpochCounterWithStopper
from ddpkit.types import Stage
from tests.recipes import QUIET, Killed, Regression, linear, make, points, sgd

DATA = points(22)
VALID = points(5, seed=6)


class Saving(Regression):
    """Saves at the end of each epoch under a metric that is given; dies where it is told to."""

    metrics = (3.0, 1.0, 2.0)
    dies_in = None

    def on_stage_start(self, stage, epoch=None):
        if self.dies_in == (stage, epoch):
            raise Killed

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage is Stage.VALID and self.checkpointer is not None:
            meta = {"metric": self.metrics[epoch - 1], "epoch": epoch}
            self.checkpointer.save_and_keep_only(meta=meta, min_keys=["metric"], num_to_keep=3)


def fit(brain, epochs=(1, 2, 3), valid=VALID):
    return brain.fit(epochs, DATA, valid, train_loader_kwargs={"batch_size": 4})


def saving(folder, counter, *, dies_in=None, **run_opts):
    net = linear()
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = Saving({"net": net}, sgd(), None, {**QUIET, **run_opts}, checkpointer)
    brain.dies_in = dies_in
    return brain


def epoch_of(path):
    return (
        None
        if path is None
        else next(
            one.meta["epoch"]
            for one in Checkpointer(path.parent).list_checkpoints()
            if one.path == path
        )
    )


def test_fit_returns_the_last_losses_and_what_was_done():
    brain = make()
    result = fit(brain)
    assert result == ddpkit.FitResult(
        "epochs",
        epochs=3,
        optimizer_steps=18,
        train_loss=brain.losses[-2][2],
        valid_loss=brain.losses[-1][2],
    )
    assert brain.losses[-2][:2] == ("TRAIN", 3)
    assert brain.losses[-1][:2] == ("VALID", 3)
    assert pickle.loads(pickle.dumps(result)) == result
    assert repr(result) == (
        "FitResult(reason='epochs', epochs=3, optimizer_steps=18, "
        f"train_loss={result.train_loss!r}, valid_loss={result.valid_loss!r})"
    )


def test_a_second_call_tells_of_itself():
    brain = make()
    fit(brain)
    again = fit(brain, [1], valid=None)
    assert (again.epochs, again.optimizer_steps, again.valid_loss) == (1, 24, None)
    assert again.train_loss == brain.losses[-1][2]


@pytest.mark.parametrize(
    ("options", "epochs", "expected"),
    [
        ({}, range(1, 3), ("epochs", 2, 12)),
        ({}, EpochCounterWithStopper(2, 5, 0, "min"), ("epochs", 2, 12)),
        ({"optimizer_step_limit": 8}, range(1, 9), ("optimizer_step_limit", 2, 8)),
        ({"debug": True}, range(1, 9), ("debug", 2, 4)),
        ({"test_only": True}, range(1, 9), ("test_only", 0, 0)),
        ({}, range(0), ("epochs", 0, 0)),
    ],
)
def test_fit_says_why_it_ended(options, epochs, expected):
    result = fit(make(**options), epochs)
    assert (result.reason, result.epochs, result.optimizer_steps) == expected
    assert (result.train_loss is None) == (not result.epochs)


def test_fit_says_that_it_stopped_early():
    counter = EpochCounterWithStopper(9, 1, 0, "min")

    class Stopping(Regression):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage is Stage.VALID:
                counter.update_metric(1.0)

    result = fit(make(Stopping), counter)
    assert (result.reason, result.epochs) == ("early_stop", 2)


def test_a_limit_that_was_reached_before_ends_the_next_call():
    brain = make(optimizer_step_limit=6)
    assert fit(brain).reason == "optimizer_step_limit"
    again = fit(brain)
    assert (again.reason, again.epochs, again.optimizer_steps) == ("optimizer_step_limit", 0, 6)


@pytest.mark.costly
def test_a_run_that_is_started_again_tells_of_what_it_still_did(tmp_path):
    with pytest.raises(Killed):
        fit(saving(tmp_path, counter := EpochCounter(3), dies_in=(Stage.TRAIN, 3)), counter)
    resumed = fit(saving(tmp_path, counter := EpochCounter(3)), counter)
    assert (resumed.reason, resumed.epochs, resumed.optimizer_steps) == ("epochs", 1, 18)
    whole = fit(saving(tmp_path / "whole", counter := EpochCounter(3)), counter)
    assert (resumed.train_loss, resumed.valid_loss) == (whole.train_loss, whole.valid_loss)

    done = fit(saving(tmp_path, counter := EpochCounter(3)), counter)
    assert (done.reason, done.epochs, done.optimizer_steps, done.train_loss) == (
        "done_before",
        0,
        18,
        None,
    )
    assert done.newest_checkpoint == resumed.newest_checkpoint


def test_a_call_that_is_done_already_says_so(tmp_path):
    def script(dies_in=None):
        counters = EpochCounter(1), EpochCounter(3)
        brain = saving(tmp_path, counters[0])
        brain.checkpointer.add_recoverable("second", counters[1])
        first = fit(brain, counters[0])
        brain.dies_in = dies_in
        return first, fit(brain, counters[1])

    with pytest.raises(Killed):
        script(dies_in=(Stage.TRAIN, 3))
    first, second = script()
    assert (first.reason, first.epochs, first.optimizer_steps) == ("done_before", 0, 6)
    assert (second.reason, second.epochs, second.optimizer_steps) == ("epochs", 1, 24)


@pytest.mark.corner
@pytest.mark.parametrize("options", [{}, {"ckpt_async": False}, {"ckpt_interval_steps": 2}])
def test_fit_says_where_the_newest_checkpoint_is(tmp_path, options):
    brain = saving(tmp_path, counter := EpochCounter(3), **options)
    result = fit(brain, counter)
    assert epoch_of(result.newest_checkpoint) == 3
    assert f"newest_checkpoint='{result.newest_checkpoint}'" in repr(result)


def test_checkpoints_of_another_run_in_the_folder_are_not_told(tmp_path):
    fit(saving(tmp_path, counter := EpochCounter(2)), counter)
    brain = saving(tmp_path, counter := EpochCounter(1), resume="never")
    brain.metrics = (9.0,)
    result = fit(brain, counter)
    assert epoch_of(result.newest_checkpoint) == 1


def test_the_function_of_the_notebook_page_returns_the_loss():
    page = Path(__file__).parents[2] / "docs/how-to/one-node.md"
    [text] = re.findall(
        r"^def train\(lr\):\n(?:(?: .*)?\n)+",
        page.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    brain = make(optimizer_step_limit=2)
    namespace = {"make_my_brain": lambda lr: brain, "data": DATA}
    exec(text, namespace)
    assert namespace["train"](0.1) == brain.losses[-1][2] > 0
