"""Several sets of a validation or a test, by name: numbers for each, and one that decides."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader

from ddpkit import Stage, parts
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError, DataError
from ddpkit.train_logger import FileTrainLogger, set_run_log
from tests.recipes import (
    QUIET,
    Killed,
    Regression,
    assert_same,
    linear,
    points,
    sgd,
    weights,
    world_size,
)

DATA = points(8)
CLEAN = points(5, seed=9)
NOISY = points(3, seed=8)
SETS = {"clean": CLEAN, "noisy": NOISY}


class Several(Regression):
    dies_in: tuple[str, str, int] | None = None  # hook, set, epoch

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.told = []
        self.saved = 0

    def note(self, hook, stage, epoch, loss=None):
        if stage is not Stage.TRAIN:
            self.told.append((hook, stage.name, self.set_name, epoch, loss))
        if self.dies_in == (hook, self.set_name, epoch):
            raise Killed

    def compute_objectives(self, predictions, batch, stage):
        self.log("size", predictions.detach().abs().mean())
        return super().compute_objectives(predictions, batch, stage)

    def on_stage_start(self, stage, epoch=None):
        assert stage is not Stage.TRAIN or self.set_name is None
        self.note("start", stage, epoch)

    def on_set_end(self, stage, stage_loss, epoch=None):
        self.note("set end", stage, epoch, stage_loss)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.note("end", stage, epoch, stage_loss)
        if stage is Stage.VALID and self.checkpointer is not None:
            self.saved += 1
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])


def brain_of(*parts, folder=None, hparams=None, cls=Several, **options):
    net = linear()
    counter = EpochCounter(2)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter}) if folder else None
    brain = cls({"net": net}, sgd(), hparams or {}, {**QUIET, **options}, checkpointer, parts=parts)
    brain.counter = counter
    return brain


def each():
    return {"batch_size": 2 // world_size()}


def fitted(brain, valid=SETS, size=None):
    kwargs = {"batch_size": size} if size else each()
    try:
        brain.result = brain.fit(
            brain.counter, DATA, valid, train_loader_kwargs=kwargs, valid_loader_kwargs=kwargs
        )
    except Killed:
        return None
    return brain


def test_each_set_has_its_numbers_and_the_first_one_the_end_of_the_validation(tmp_path):
    brain = fitted(brain_of(folder=tmp_path))
    alone = {name: fitted(brain_of(), valid=data) for name, data in SETS.items()}
    losses = {name: [loss for *_, loss in one.told if loss] for name, one in alone.items()}
    assert [told[:3] for told in brain.told[:4]] == [
        ("start", "VALID", "noisy"),
        ("set end", "VALID", "noisy"),
        ("start", "VALID", "clean"),
        ("end", "VALID", "clean"),
    ]
    assert [told[4] for told in brain.told if told[0] == "end"] == losses["clean"]
    assert [told[4] for told in brain.told if told[0] == "set end"] == losses["noisy"]
    assert brain.saved == 2
    assert brain.result.valid_loss == losses["clean"][-1]
    assert brain.result.logged["valid"] == {
        **alone["clean"].result.logged["valid"],
        "noisy/loss": losses["noisy"][-1],
        "noisy/size": alone["noisy"].result.logged["valid"]["size"],
    }


def test_a_test_on_several_sets_is_a_test_on_each():
    brain = brain_of()
    alone = {name: brain.evaluate(data, test_loader_kwargs=each()) for name, data in SETS.items()}
    brain.told.clear()
    assert brain.evaluate(SETS, test_loader_kwargs=each()) == alone
    assert [told[:3] for told in brain.told] == [
        ("start", "TEST", "clean"),
        ("end", "TEST", "clean"),
        ("start", "TEST", "noisy"),
        ("end", "TEST", "noisy"),
    ]
    loader = DataLoader(CLEAN, batch_size=2)
    assert brain.evaluate({"clean": loader}) == {"clean": pytest.approx(alone["clean"])}
    assert brain.set_name is None


def numbers():
    brain = fitted(brain_of(shard_evaluation=True))
    tested = brain.evaluate(SETS, test_loader_kwargs=each())
    return {**brain.result.logged["valid"], **tested}


@pytest.mark.costly
def test_two_ranks_find_the_numbers_of_one(ranks):
    expected = numbers()
    assert set(expected) == {"size", "noisy/size", "noisy/loss", "clean", "noisy"}
    for found in ranks.run(numbers, world_size=2):
        assert found == pytest.approx(expected)


# ------------------------------------------------------------------------------ what decides


class Scores(Several):
    def compute_objectives(self, predictions, batch, stage):
        if stage is Stage.VALID:
            self.log("score", {"clean": self.optimizer_step, "noisy": 1.0}[self.set_name])
        return super().compute_objectives(predictions, batch, stage)


def test_a_stopper_follows_the_first_set_or_the_one_that_its_metric_names():
    first = parts.EarlyStopping("score", mode="max", patience=1)
    assert fitted(brain_of(first, cls=Scores)).result.reason == "epochs"
    assert first.best == 8
    other = parts.EarlyStopping("noisy/score", mode="max", patience=1)
    assert fitted(brain_of(other, cls=Scores)).result.reason == "early_stop"
    assert (other.best, other.waited) == (1, 1)


def test_a_plateau_is_looked_for_on_the_first_set():
    seen = []

    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, loss):
            seen.append(loss)
            super().step(loss)

    brain = brain_of(scheduler_every="epoch")
    brain.scheduler_class = lambda optimizer, _: Plateau(optimizer)
    fitted(brain)
    assert seen == [told[4] for told in brain.told if told[0] == "end"]


# ------------------------------------------------------------------------------ where it is written


def test_logs_and_loggers_name_the_set(tmp_path):
    loggers = [FileTrainLogger(tmp_path / name) for name in ("a.txt", "b.txt")]

    class Reports(Several):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            stats = {f"{stage.name.lower()}_stats": {"loss": stage_loss}}
            if stage is not Stage.TRAIN:
                self.hparams.train_logger.log_stats({"epoch": epoch}, **stats, verbose=False)

    set_run_log(tmp_path / "metrics.jsonl")
    brain = fitted(brain_of(cls=Reports, hparams={"train_logger": loggers}))
    brain.evaluate(SETS)
    set_run_log(None)
    for name in ("a.txt", "b.txt"):
        lines = (tmp_path / name).read_text().splitlines()
        assert len(lines) == 4
        assert "valid loss: " in lines[0]
        assert "valid noisy/loss: " in lines[0]
        assert "test clean/loss: " in lines[2]
        assert "test noisy/loss: " in lines[3]
        assert "test loss" not in lines[2]
    events = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    stages = [(event["stage"], event.get("set")) for event in events if event["event"] == "stage"]
    validation = [("VALID", "noisy"), ("VALID", "clean")]
    epoch = [("TRAIN", None), *validation]
    assert stages == [*epoch, *epoch, ("TEST", "clean"), ("TEST", "noisy")]


# ------------------------------------------------------------------------------ kill, resume


def resumed(folder, dies_in=None, **options):
    schedule = parts.ValidationSchedule(every_steps=3, every_epochs=1)
    brain = brain_of(schedule, folder=folder, ckpt_interval_steps=1, virtual_ranks=2, **options)
    brain.dies_in = dies_in
    brain = fitted(brain, size=1)
    return brain and (weights(brain), brain.told[-2:])


@pytest.mark.costly
@pytest.mark.parametrize(
    ("dies_in", "before", "after"),
    [
        (("set end", "noisy", 1), 1, 1),
        pytest.param(("start", "clean", 1), 1, 1, marks=pytest.mark.slow),
        pytest.param(("end", "clean", 2), 1, 1, marks=pytest.mark.slow),
        pytest.param(("start", "clean", 2), 2, 2, marks=pytest.mark.slow),
        pytest.param(("set end", "noisy", 2), 2, 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_between_two_sets_ends_as_one_that_was_not(
    ranks, tmp_path, dies_in, before, after
):
    (expected, told), *_ = ranks.run(resumed, tmp_path / "whole", world_size=1)
    killed = ranks.run(resumed, tmp_path / "killed", dies_in, world_size=before)
    assert killed == [None] * before
    for found, found_told in ranks.run(resumed, tmp_path / "killed", world_size=after):
        assert_same(found, expected)
        assert [row[:4] for row in found_told] == [row[:4] for row in told]
        assert [row[4] for row in found_told] == pytest.approx([row[4] for row in told])


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("sets", "error", "words"),
    [
        ({}, ConfigError, "valid_set: the dict of sets is empty"),
        ({"": CLEAN}, ConfigError, "valid_set: '' is no name of a set"),
        ({"a/b": CLEAN}, ConfigError, "'a/b' is no name of a set"),
        ([DataLoader(CLEAN)] * 2, DataError, "VALID: .*list of 2 loaders.*give them by name"),
        ({"x": torch.ones(4), "y": torch.ones(4)}, DataError, "VALID: .*keys 'x', 'y'"),
        ({"a": CLEAN, "b": "b.csv"}, DataError, "VALID: .*keys 'a', 'b'"),
        ({"a": CLEAN, "b": []}, DataError, "VALID b: the dataset is empty"),
    ],
)
def test_what_is_no_dict_of_sets_is_refused_before_the_first_batch(sets, error, words):
    brain = brain_of()
    with pytest.raises(error, match=words):
        fitted(brain, valid=sets)
    assert not brain.trained_on


def test_several_training_sets_by_name_are_refused_before_the_first_batch():
    brain = brain_of()
    with pytest.raises(DataError, match="TRAIN: .*dict with the keys 'clean', 'noisy'"):
        brain.fit([1], SETS)
    with pytest.raises(DataError, match="dict with the keys"):
        brain.predict(SETS)
    assert not brain.trained_on
