"""Checkpoints that are made on request: by a signal, by a failure; and what a run starts from on request."""

from __future__ import annotations

import logging
import os
import signal

import pytest
import torch

from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError, FolderInUseError
from ddpkit.plain_yaml import load_plain_yaml
from ddpkit.run_lock import FolderLock
from ddpkit.types import Stage

from .recipes import QUIET, Regression, assert_same, linear, points, sgd, weights

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
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if self.saves and stage is Stage.VALID:
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})


def recipe(folder, *, fails_at=None, signals_at=None, saves=False, number=20, **options):
    counter, net = EpochCounter(EPOCHS), linear()
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = Recipe({"net": net}, sgd(momentum=0.9), None, {**QUIET, **options}, checkpointer)
    brain.fails_at, brain.signals_at, brain.saves = fails_at, signals_at, saves
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


def metas(folder):
    return [load_plain_yaml((path / "CKPT.yaml").read_text()) for path in sorted(folder.glob("CKPT*"))]


def test_a_signal_asks_for_a_checkpoint_and_the_training_goes_on(tmp_path):
    plain = run(tmp_path / "plain")
    asked = run(tmp_path / "asked", signals_at=(2, 3))
    assert_same(weights(asked), weights(plain))
    [meta] = metas(tmp_path / "asked")
    assert meta["brain_intra_epoch_ckpt"]
    assert not asked.save_requests.wanted
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    again = run(tmp_path / "asked")
    assert 0 < len(again.trained_on) < len(plain.trained_on)
    assert_same(weights(again), weights(plain))


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize(
    ("fails_at", "redone"),
    [(("TRAIN", 2, 7), {1: 0, 3: 0}), (("VALID", 2), {1: 0, 3: 0}), (("TRAIN", 3, 2), {1: 0, 3: 1})],
)
def test_a_failure_loses_no_step_where_it_is_asked_for(tmp_path, fails_at, redone, factor):
    """The model draws nothing at random, so what goes on is the same run; all that was stepped on is there."""
    options = {"grad_accumulation_factor": factor}
    whole = run(tmp_path / "whole", **options)
    failed = run(tmp_path / "failed", fails_at=fails_at, saves=True, ckpt_on_error=True, **options)
    if fails_at == ("TRAIN", 3, 2) and factor == 3:
        assert not any("error" in meta for meta in metas(tmp_path / "failed")), "no step since the epoch began"
    else:
        assert any(meta.get("error", "").startswith("OSError: the disk") for meta in metas(tmp_path / "failed"))
    again = run(tmp_path / "failed", **options)
    assert_same(weights(again), weights(whole))
    done = len(failed.trained_on) + len(again.trained_on) - len(whole.trained_on)
    assert done == redone[factor]
    losses = {entry[:2]: entry[2] for entry in whole.losses}
    assert all(loss == pytest.approx(losses[stage, epoch], rel=1e-12) for stage, epoch, loss in again.losses)


@pytest.mark.parametrize("fails_at", [("TRAIN", 1), ("TRAIN", 2), ("TRAIN", 1, 1)])
def test_a_failure_where_nothing_was_trained_makes_no_checkpoint(tmp_path, fails_at):
    run(tmp_path, fails_at=fails_at, saves=True, ckpt_on_error=True)
    assert not any("error" in meta for meta in metas(tmp_path))
    assert run(tmp_path).optimizer_step == 30


def test_without_being_asked_a_failure_makes_no_checkpoint(tmp_path):
    run(tmp_path, fails_at=("TRAIN", 2, 7))
    assert metas(tmp_path) == []


def test_a_checkpoint_of_a_failure_that_fails_hides_nothing(tmp_path, caplog):
    brain, fit = recipe(tmp_path, fails_at=("TRAIN", 2, 7), ckpt_on_error=True)
    brain.checkpointer.add_recoverable("bad", object(), custom_save_hook=lambda obj, path: 1 / 0)
    with caplog.at_level(logging.WARNING), pytest.raises(OSError, match="the disk with the data is gone"):
        fit()
    assert "saving the recoverable 'bad': ZeroDivisionError" in caplog.text


def test_resume_says_what_a_run_starts_from(tmp_path):
    first = run(tmp_path / "a", saves=True)
    [path] = (tmp_path / "a").glob("CKPT*")
    assert run(tmp_path / "a").trained_on == []
    fresh = run(tmp_path / "a", resume="never")
    assert len(fresh.trained_on) == len(first.trained_on)
    other = run(tmp_path / "b", resume=str(path))
    assert other.trained_on == []
    assert_same(weights(other), weights(first))
    assert other.checkpointer.resume == "auto", "for the fit alone"
    with pytest.raises(CheckpointError, match="there is no such directory"):
        run(tmp_path / "b", resume=str(tmp_path / "nowhere"))
    (path / "net.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is damaged: net\.ckpt has 0 bytes"):
        run(tmp_path / "b", resume=str(path))


def test_f18_a_second_run_in_the_folder_is_refused_before_it_trains(tmp_path, monkeypatch):
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

    counter, net = EpochCounter(1), linear()
    brain = Looking({"net": net}, sgd(), None, QUIET, Checkpointer(tmp_path, {"net": net}))
    brain.fit(counter, points(4))
    assert set(seen) == {True}
    assert not (tmp_path / ".lock").exists()


def test_nothing_outlives_a_window_in_a_frozen_optimizer(tmp_path):
    """Decision 0009: a run that goes on while something is frozen is the run that was not stopped."""

    class Freezing(Recipe):
        def init_optimizers(self):
            self.optimizers_dict = {"one": torch.optim.SGD([self.modules.net.weight], lr=0.1)}
            self.optimizers_dict["two"] = torch.optim.SGD([self.modules.net.bias], lr=0.1)
            for name, one in self.optimizers_dict.items():
                self.checkpointer.add_recoverable(name, one)

        def freeze_optimizers(self, optimizers):
            return {name: one for name, one in optimizers.items() if name == "one" or self.optimizer_step > 12}

        def on_fit_batch_start(self, batch, should_step):
            assert self.modules.net.bias.grad is None

    counter, net = EpochCounter(2), linear()
    brain = Freezing({"net": net}, None, None, QUIET, Checkpointer(tmp_path, {"net": net}))
    before = net.bias.item()
    brain.fit(counter, points(20), train_loader_kwargs={"batch_size": 2})
    assert net.bias.item() != before
