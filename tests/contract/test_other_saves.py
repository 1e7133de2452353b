"""Checkpoints that are made on request: by a signal, by a failure; and what a run starts from on
request.
"""

from __future__ import annotations

import logging
import os
import re
import signal

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import IterableDataset

from ddpkit.checkpointing import FolderLock
from ddpkit.checkpoints import Checkpointer
from ddpkit.data.stream_position import Reading
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError, FolderInUseError
from ddpkit.types import Stage
from tests.recipes import (
    QUIET,
    Regression,
    SeveralOptimizers,
    assert_same,
    linear,
    points,
    sgd,
    weights,
)

EPOCHS = 3


class Recipe(Regression):
    """Fails at ``fails_at``: (stage, epoch) when a stage begins, or ("TRAIN", epoch, step)."""

    fails_at = signals_at = None
    saves = False

    def on_stage_start(self, stage, epoch=None):
        self.epoch = epoch
        if self.fails_at == (stage.name, epoch):
            raise OSError("the disk with the data is gone")

    def on_fit_batch_start(self, batch, should_step):
        if self.fails_at == ("TRAIN", self.epoch, self.step):
            raise OSError("the disk with the data is gone")
        if self.signals_at == (self.epoch, self.step):
            os.kill(os.getpid(), signal.SIGUSR2)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if self.saves and stage is Stage.VALID:
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})


def recipe(folder, *, fails_at=None, signals_at=None, saves=False, number=20, **options):
    counter = EpochCounter(EPOCHS)
    net = linear()
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = Recipe({"net": net}, sgd(momentum=0.9), None, {**QUIET, **options}, checkpointer)
    brain.fails_at = fails_at
    brain.signals_at = signals_at
    brain.saves = saves
    arguments = {"train_loader_kwargs": {"batch_size": 2, "shuffle": True}}
    return brain, lambda: brain.fit(counter, points(number), points(5), **arguments)


def run(folder, **options):
    brain, fit = recipe(folder, **options)
    if options.get("fails_at") is None:
        fit()
    else:
        with pytest.raises(OSError, match="the disk with the data is gone"):
            fit()
    return brain


def saved_by(brain):
    return yaml.safe_load((brain.checkpointer.find_checkpoint().path / "brain.ckpt").read_text())


def metas(folder):
    return [
        yaml.safe_load((path / "CKPT.yaml").read_text()) for path in sorted(folder.glob("CKPT*"))
    ]


@pytest.mark.costly
def test_a_signal_asks_for_a_checkpoint_and_the_training_goes_on(tmp_path):
    plain = run(tmp_path / "plain")
    asked = run(tmp_path / "asked", signals_at=(2, 3))
    assert_same(weights(asked), weights(plain))
    [meta] = metas(tmp_path / "asked")
    assert meta["brain_intra_epoch_ckpt"]
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    again = run(tmp_path / "asked")
    assert 0 < len(again.trained_on) < len(plain.trained_on)
    assert_same(weights(again), weights(plain))


def test_a_failure_makes_no_checkpoint(tmp_path):
    run(tmp_path, fails_at=("TRAIN", 2, 7))
    assert metas(tmp_path) == []


@pytest.mark.costly
def test_resume_says_what_a_run_starts_from(tmp_path):
    first = run(tmp_path / "a", saves=True)
    [path] = (tmp_path / "a").glob("CKPT*")
    assert run(tmp_path / "a").trained_on == []
    other = run(tmp_path / "b", resume=str(path))
    assert other.trained_on == []
    assert_same(weights(other), weights(first))
    fresh = run(tmp_path / "a", resume="never")
    assert len(fresh.trained_on) == len(first.trained_on)
    [path] = (tmp_path / "a").glob("earlier-*/CKPT*")
    assert other.checkpointer.resume == "auto", "for the fit alone"
    with pytest.raises(CheckpointError, match="it has no CKPT.yaml"):
        run(tmp_path / "b", resume=str(tmp_path / "nowhere"))
    (path / "net.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is damaged: net\.ckpt has 0 bytes"):
        run(tmp_path / "b", resume=str(path))


def test_a_second_run_in_the_folder_is_refused_before_it_trains(tmp_path, monkeypatch):
    def taken(lock):
        raise FolderInUseError("the folder is in use by another run")

    with monkeypatch.context() as patch:
        patch.setattr(FolderLock, "acquire", taken)
        brain, fit = recipe(tmp_path, ckpt_errors="warn")
        with pytest.raises(FolderInUseError):
            fit()
    assert brain.trained_on == []
    assert run(tmp_path).optimizer_step == 30


def test_the_folder_is_held_for_the_whole_fit_and_no_longer(tmp_path):
    seen = []

    class Looking(Recipe):
        def on_fit_batch_start(self, batch, should_step):
            seen.append((tmp_path / ".lock").exists())

    counter = EpochCounter(1)
    net = linear()
    brain = Looking({"net": net}, sgd(), None, QUIET, Checkpointer(tmp_path, {"net": net}))
    brain.fit(counter, points(4))
    assert set(seen) == {True}
    assert not (tmp_path / ".lock").exists()


def test_nothing_outlives_a_window_in_a_frozen_optimizer(tmp_path):
    """Decision 0009: a run that goes on while something is frozen is the run that was not
    stopped.
    """

    class Freezing(SeveralOptimizers):
        def freeze_optimizers(self, optimizers):
            return {
                name: one
                for name, one in optimizers.items()
                if name == "weight" or self.optimizer_step > 12
            }

        def on_fit_batch_start(self, batch, should_step):
            assert self.modules.net.bias.grad is None

    counter = EpochCounter(2)
    net = linear()
    brain = Freezing({"net": net}, None, None, QUIET, Checkpointer(tmp_path, {"net": net}))
    before = net.bias.item()
    brain.fit(counter, points(20), train_loader_kwargs={"batch_size": 2})
    assert net.bias.item() != before


# ----------------------------------------------------------------- saved inside of a training batch


class Inside(Recipe):
    """Saves in a hook of batch 4 of every epoch."""

    hook = "on_fit_batch_end"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        usual = getattr(self, self.hook)

        def saving(*arguments):
            usual(*arguments)
            if self.step == 4:
                self.checkpointer.save_checkpoint(end_of_epoch=False)

        vars(self)[self.hook] = saving


class InsideStart(Inside):
    hook = "on_fit_batch_start"


class InsideOwn(Recipe):
    """Has a fit_batch of its own, and saves in it."""

    def fit_batch(self, batch):
        loss = super().fit_batch(batch)
        if self.step == 4:
            # what a fit_batch that calls nothing of the class above would leave
            self.progress.result = None
            self.checkpointer.save_checkpoint(end_of_epoch=False)
        return loss


def inside(folder, cls, fails_at=None):
    counter = EpochCounter(EPOCHS)
    net = linear()
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = cls({"net": net}, sgd(momentum=0.9), None, QUIET, checkpointer)
    brain.fails_at = fails_at
    try:
        brain.fit(
            counter,
            points(20),
            points(5),
            train_loader_kwargs={"batch_size": 2, "shuffle": True},
        )
    except OSError:
        assert fails_at is not None
    return brain


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("cls", [Inside, InsideStart])
def test_a_save_in_a_hook_of_a_batch_has_all_losses(tmp_path, cls):
    """At its end with that batch, at its start without: the reported mean is that of the whole
    epoch.
    """
    whole = inside(tmp_path / "whole", cls)
    inside(tmp_path / "killed", cls, ("TRAIN", 2, 6))
    again = inside(tmp_path / "killed", cls)
    assert_same(weights(again), weights(whole))
    assert len(again.trained_on) == {Inside: 16, InsideStart: 17}[cls]
    assert again.losses == whole.losses[-len(again.losses) :]


@pytest.mark.costly
def test_a_save_inside_of_an_own_fit_batch_says_what_it_lacks(tmp_path, caplog):
    whole = inside(tmp_path / "whole", InsideOwn)
    inside(tmp_path / "killed", InsideOwn, ("TRAIN", 2, 6))
    with caplog.at_level(logging.WARNING):
        again = inside(tmp_path / "killed", InsideOwn)
    assert_same(weights(again), weights(whole))
    assert again.losses[1:] == whole.losses[3:]
    assert "will be without batch 4" in caplog.text


# -------------------------------------------------------------- whose checkpoints, and what is told


class Rating(Recipe):
    """Saves after every epoch, with a metric that a test gives."""

    metric = 0.0

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage is Stage.VALID:
            self.checkpointer.save_checkpoint(meta={"WER": self.metric + epoch})


def rated(folder, metric, **options):
    counter = EpochCounter(2)
    net = linear()
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = Rating(
        {"net": net},
        sgd(lr=0.1 / (1.0 + metric)),
        None,
        {**QUIET, **options},
        checkpointer,
    )
    brain.metric = metric
    return brain, lambda: brain.fit(
        counter,
        points(6),
        points(5),
        train_loader_kwargs={"batch_size": 2},
    )


def evaluated(brain, **keys):
    brain.evaluate(points(4), **keys)
    return weights(brain)


@pytest.mark.costly
def test_evaluate_takes_no_checkpoint_of_another_run(tmp_path):
    old, fit = rated(tmp_path, 0.0)
    fit()
    best_of_old = evaluated(old, min_key="WER")
    new, fit = rated(tmp_path, 50.0, resume="never")
    fit()
    assert sorted(one.meta["WER"] for one in new.checkpointer.list_checkpoints()) == [51.0, 52.0]
    best_of_new = evaluated(new, min_key="WER")
    assert not torch.equal(best_of_new["net.weight"], best_of_old["net.weight"])
    other, _ = rated(tmp_path, 0.0)  # a process of its own
    assert_same(evaluated(other, min_key="WER"), best_of_new)
    [aside] = tmp_path.glob("earlier-*")
    first = Checkpointer(aside).find_checkpoint(min_key="WER").path
    asked, _ = rated(tmp_path, 0.0, resume=str(first))
    # what is asked for comes before what the script says
    assert_same(evaluated(asked, max_key="WER"), best_of_old)
    again, fit = rated(tmp_path, 50.0)
    fit()
    assert_same(evaluated(again, min_key="WER"), best_of_new)


def test_checkpoints_of_before_are_moved_at_the_first_call_only(tmp_path, caplog):
    brain, fit = rated(tmp_path, 0.0)
    fit()
    brain, fit = rated(tmp_path, 0.0, resume="never")
    with caplog.at_level(logging.WARNING):
        fit()
        assert "Checkpoints that this run does not continue were moved to" in caplog.text
        caplog.clear()
        brain.fit(EpochCounter(1), points(6))
    assert "of before" not in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("step: [3\noptimizer_step: 6\n", "invalid YAML: .* line 2, .*"),
        ("loss: 3\n", "does not say how far the run had come.*"),
    ],
)
def test_a_damaged_brain_file_without_a_manifest_is_named_with_what_to_do(tmp_path, content, words):
    saved = run(tmp_path, saves=True).checkpointer.find_checkpoint().path
    (saved / "manifest.json").unlink()
    # as SpeechBrain writes it
    (saved / "CKPT.yaml").write_text("unixtime: 1.0\nend-of-epoch: true\n")
    (saved / "brain.ckpt").write_text(content)
    file = re.escape(str(saved / "brain.ckpt"))
    hint = "The checkpoint is damaged; delete it or start with --resume=<an older one>."
    with pytest.raises(CheckpointError, match=f"^{file}:? {words} {re.escape(hint)}$"):
        run(tmp_path)


@pytest.mark.costly
def test_the_line_of_a_saved_checkpoint_names_its_epoch(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        run(tmp_path, saves=True, ckpt_interval_steps=7)
    lines = [record.message for record in caplog.records if record.message.startswith("Saved ")]
    for epoch in range(1, EPOCHS + 1):
        for kind in ("an end-of-epoch", "an intra-epoch"):
            assert any(
                line.startswith(f"Saved {kind} checkpoint of epoch {epoch} in ") for line in lines
            ), lines
    caplog.clear()
    with caplog.at_level(logging.INFO):
        Checkpointer(tmp_path / "none").save_checkpoint()
    assert "Saved an end-of-epoch checkpoint in " in caplog.text


def test_a_learning_rate_that_has_no_effect_is_told_once(tmp_path, caplog):
    def start(lr, number=2):
        counter = EpochCounter(number)
        net = linear()
        checkpointer = Checkpointer(tmp_path, {"net": net, "counter": counter})
        brain = Rating({"net": net}, sgd(lr=lr), None, QUIET, checkpointer)
        with caplog.at_level(logging.WARNING):
            brain.fit(counter, points(6), points(5))
        return brain.optimizer.param_groups[0]["lr"]

    assert start(0.1) == 0.1
    assert start(0.1, 3) == 0.1
    assert "settings" not in caplog.text
    assert start(0.3, 4) == 0.1
    assert (
        caplog.text.count("with which the checkpoint's run began (lr 0.1 -> 0.3), without effect")
        == 1
    )


@pytest.mark.costly
def test_the_learning_rate_in_use_is_recorded_so_that_every_start_with_another_one_is_told(
    tmp_path,
    caplog,
):
    def start(lr, number):
        caplog.clear()
        counter = EpochCounter(number)
        net = linear()
        brain = Rating(
            {"net": net},
            sgd(lr=lr),
            None,
            QUIET,
            Checkpointer(tmp_path, {"net": net, "counter": counter}),
        )
        with caplog.at_level(logging.WARNING):
            brain.fit(counter, points(6), points(5))
        (group,) = saved_by(brain)["settings"]["opt_class"]
        return group["lr"], "(lr 0.1 -> 0.5)" in caplog.text

    assert start(0.1, 1) == (0.1, False)
    for number in (2, 3, 4):  # as a requeued job, with the same command
        assert start(0.5, number) == (0.1, True)
    assert start(0.1, 5) == (0.1, False)
    assert "began" not in caplog.text


def test_an_optimizer_that_no_checkpoint_holds_goes_on_with_the_rate_of_the_script(
    tmp_path,
    caplog,
):
    class Forgetful(Rating):
        def init_optimizers(self):
            super().init_optimizers()
            del self.checkpointer.recoverables["optimizer"]

    def start(lr, number):
        counter = EpochCounter(number)
        net = linear()
        checkpointer = Checkpointer(tmp_path, {"net": net, "counter": counter})
        brain = Forgetful({"net": net}, sgd(lr=lr), None, QUIET, checkpointer)
        with caplog.at_level(logging.WARNING):
            brain.fit(counter, points(6), points(5))
        return brain.optimizer.param_groups[0]["lr"], saved_by(brain)["settings"]

    assert start(0.1, 1) == (0.1, {})
    assert start(0.5, 2) == (0.5, {})
    assert "saves nothing of the optimizer(s) opt_class" in caplog.text
    assert "without effect" not in caplog.text


def test_a_module_that_no_checkpoint_holds_is_named(tmp_path, caplog):
    net = linear()
    head = linear()
    modules = {"net": net, "head": head}
    checkpointer = Checkpointer(tmp_path, {"net": net})
    brain = Recipe(modules, sgd(), None, QUIET, checkpointer)
    with caplog.at_level(logging.WARNING):
        brain.fit(EpochCounter(1), points(4))
    assert "no weights of the module(s) head" in caplog.text
    caplog.clear()
    checkpointer = Checkpointer(tmp_path / "b", {"model": torch.nn.ModuleList([net, head])})
    Recipe(modules, sgd(), None, QUIET, checkpointer).fit(EpochCounter(1), points(4))
    assert "no weights" not in caplog.text


class Endless(IterableDataset):
    place = 0

    def __iter__(self):
        for _ in range(6):
            self.place += 1
            yield points(20)[self.place % 20]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize(
    ("persistent", "workers"),
    [(True, 1), pytest.param(False, 1, marks=pytest.mark.slow), (False, 0)],
)
def test_data_that_no_checkpoint_can_ask_is_told(tmp_path, caplog, persistent, workers):
    def start(epochs):
        counter = EpochCounter(epochs)
        net = linear()
        checkpointer = Checkpointer(tmp_path, {"net": net, "counter": counter})
        brain = Rating({"net": net}, sgd(), None, QUIET, checkpointer)
        kwargs = {"batch_size": 2, "num_workers": workers, "persistent_workers": persistent}
        with caplog.at_level(logging.WARNING):
            brain.fit(counter, Endless(), points(3), train_loader_kwargs=kwargs)

    start(1)
    assert ("The state of Endless is in workers that outlive an epoch" in caplog.text) == persistent
    assert ("after a restart it would begin anew" in caplog.text) == persistent
    caplog.clear()
    start(2)
    assert ("it begins anew now" in caplog.text) == persistent


def test_reading_a_stream_leaves_numpy_the_number_that_it_has_in_store():
    """Normal numbers are drawn two at a time."""
    np.random.seed(3)  # noqa: NPY002 -- the global state is what recipes draw from
    expected = [np.random.randn() for _ in range(4)]  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    found = []
    for _ in range(4):
        found.append(np.random.randn())  # noqa: NPY002
        with Reading(5):
            np.random.randn()  # noqa: NPY002
    assert found == expected
