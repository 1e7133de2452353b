"""What a run says and does when it is started again with something changed, or with nothing left to
do.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter, EpochCounterWithStopper
from ddpkit.experiment import close_experiment, create_experiment_directory
from ddpkit.run_opts import parse_arguments
from ddpkit.train_logger import FileTrainLogger, TensorboardLogger
from ddpkit.types import Stage
from tests.recipes import (
    QUIET,
    Regression,
    SavesAfterValidation,
    assert_same,
    linear,
    points,
    sgd,
    weights,
)


class Flat(SavesAfterValidation):
    """Its metric never improves after the first epoch."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is Stage.VALID:
            self.counter.update_metric(1.0)
        super().on_stage_end(stage, stage_loss, epoch)


def run(folder, counter):
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    cls = Flat if isinstance(counter, EpochCounterWithStopper) else SavesAfterValidation
    brain = cls(
        {"net": net},
        sgd(),
        None,
        QUIET,
        Checkpointer(folder, {"net": net, "counter": counter}),
    )
    brain.counter = counter
    brain.result = brain.fit(counter, points(4), points(2), train_loader_kwargs={"batch_size": 2})
    return brain


def stopper(patience, epochs=9):
    return EpochCounterWithStopper(epochs, patience, 0, "min")


@pytest.mark.costly
def test_a_run_that_was_stopped_early_goes_on_with_more_patience(tmp_path, caplog, capsys):
    caplog.set_level("INFO")
    assert run(tmp_path, counter := stopper(2)).result.reason == "early_stop"
    assert counter.current == 3
    again = run(tmp_path, stopper(2))
    assert (again.result.reason, again.losses) == ("done_before", [])
    assert "To go on, give a larger limit_to_stop." in caplog.text + capsys.readouterr().err
    more = run(tmp_path, counter := stopper(4))
    assert "With limit_to_stop=4 it goes on" in caplog.text + capsys.readouterr().err
    assert (more.result.reason, counter.current) == ("early_stop", 5)
    assert [epoch for name, epoch, _ in more.losses if name == "TRAIN"] == [4, 5]


def test_a_stop_by_the_recipe_itself_stays_a_stop(tmp_path):
    counter = stopper(5)
    counter.current = 3
    counter.best_limit = 2
    counter.should_stop = True
    counter._save(tmp_path / "counter")
    same = stopper(5)
    same._recover(tmp_path / "counter", end_of_epoch=True)
    assert list(same) == []


def test_more_epochs_go_on_where_the_last_has_ended(tmp_path):
    assert run(tmp_path, EpochCounter(1)).optimizer_step == 2
    more = run(tmp_path, EpochCounter(3))
    assert [epoch for name, epoch, _ in more.losses if name == "TRAIN"] == [2, 3]


@pytest.mark.costly
def test_a_run_without_a_seed_goes_on_with_the_seed_of_its_checkpoint(tmp_path, caplog):
    """A process without a seed has another one each time it is started."""
    torch.manual_seed(11)
    whole = run(tmp_path / "whole", EpochCounter(3))
    torch.manual_seed(11)
    run(tmp_path / "parts", EpochCounter(1))
    torch.manual_seed(12)
    rest = run(tmp_path / "parts", EpochCounter(3))
    assert_same(weights(rest), weights(whole))
    assert rest.losses == whole.losses[2:]
    assert "seed" not in caplog.text


def logging_run(folder, resume, monkeypatch):
    """Run as a script with an experiment folder does."""
    recipe = folder.with_suffix(".yaml")
    recipe.write_text("a: 1\n")
    monkeypatch.setattr(sys, "argv", ["train.py", str(recipe), f"--resume={resume}"])
    parse_arguments()
    create_experiment_directory(folder, save_env_desc=False)
    try:
        net = linear()
        counter = EpochCounter(1)
        train_logger = FileTrainLogger(folder / "train_log.txt")
        checkpointer = Checkpointer(folder / "save", {"net": net, "counter": counter})
        hparams = {"train_logger": train_logger}
        brain = Logging({"net": net}, sgd(), hparams, {**QUIET, "resume": resume}, checkpointer)
        brain.fit(counter, points(4), points(2))
        brain.fit([2], points(4), points(2))
    finally:
        close_experiment()


class Logging(Regression):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.hparams.train_logger.log_stats({"epoch": epoch}, {"loss": stage_loss}, verbose=False)


LOGS = {"log.txt", "metrics.jsonl", "train_log.txt"}


def lines(path):
    return len(path.read_text().splitlines())


def test_a_run_that_begins_anew_mixes_its_logs_with_no_others(tmp_path, monkeypatch):
    tmp_path /= "run"
    logging_run(tmp_path, "auto", monkeypatch)
    before = {name: (tmp_path / name).read_text() for name in LOGS}
    logging_run(tmp_path, "never", monkeypatch)
    moved = {path.name: path for path in tmp_path.glob("earlier-*/*")}
    assert moved.keys() == LOGS
    assert {name: path.read_text() for name, path in moved.items()} == before
    assert lines(tmp_path / "train_log.txt") == lines(moved["train_log.txt"]) == 4
    assert (tmp_path / "log.txt").read_text().count("logs of an earlier run were moved to") == 1
    assert len([*tmp_path.glob("earlier-*")]) == 1


@pytest.mark.slow
def test_events_for_tensorboard_begin_anew(tmp_path):
    for _ in range(2):
        logger = TensorboardLogger(tmp_path)
        logger.begin_anew()
        logger.log_stats({"epoch": 1}, {"loss": 1.0})
        logger.begin_anew()
        logger.close()
    assert len(list(tmp_path.glob("events*"))) == 1
    assert len(list(tmp_path.glob("earlier-*/events*"))) == 1


def test_what_is_set_aside_twice_within_a_second_takes_a_free_name(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    checkpointer = Checkpointer(tmp_path, {"net": nn.Linear(1, 1)})
    for _ in range(3):
        checkpointer.save_checkpoint(name="same")
        checkpointer.set_aside(None)
    moved = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/CKPT*"))
    assert moved == ["earlier-now-2/CKPT+same", "earlier-now-3/CKPT+same", "earlier-now/CKPT+same"]
