"""Modules, schedulers and encoders of SpeechBrain keep their state; what cannot be kept is told
before training.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError
from tests.recipes import Regression, make, points
from tests.speechbrain_marks import Normalization, Scheduler, mark


def resumed(folder, **recoverables):
    """Save what is given, and load it into new objects of the same classes."""
    Checkpointer(folder, recoverables).save_checkpoint()
    new = {name: type(one)() for name, one in recoverables.items()}
    assert Checkpointer(folder, new).recover_if_possible() is not None
    return new


def test_a_module_with_speechbrain_s_marks_comes_back_with_its_state(tmp_path):
    before = Normalization()
    before(torch.ones(10, 2))
    assert resumed(tmp_path, norm=before)["norm"].count == 10


def test_an_object_with_speechbrain_s_marks_needs_no_state_dict(tmp_path):
    assert resumed(tmp_path, scheduler=Scheduler(0.25))["scheduler"].rate == 0.25


def test_a_recipe_with_such_a_module_goes_on_with_its_state(tmp_path):
    class Normalized(Regression):
        def compute_forward(self, batch, stage):
            return super().compute_forward((self.modules.norm(batch[0]), batch[1]), stage)

    def run(epochs):
        norm = Normalization()
        scheduler = Scheduler()
        counter = EpochCounter(epochs)
        recoverables = {"norm": norm, "scheduler": scheduler, "counter": counter}
        brain = make(Normalized, folder=tmp_path, recoverables=recoverables)
        brain.modules["norm"] = norm
        brain.on_stage_end = lambda stage, loss, epoch=None: brain.checkpointer.save_checkpoint()
        brain.fit(counter, points(10), train_loader_kwargs={"batch_size": 2})
        scheduler.rate = 0.5
        return norm.count

    assert run(1) == 10
    assert run(2) == 20


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_an_asynchronous_save_holds_is_what_was_there_when_it_was_asked_for(
    tmp_path,
    asynchronous,
):
    norm = Normalization()
    norm.count = 3
    checkpointer = Checkpointer(tmp_path, {"norm": norm})
    checkpointer.asynchronous = asynchronous
    checkpointer.save_checkpoint()
    norm.count = 4
    checkpointer.recover_if_possible()
    assert norm.count == 3


class Unloadable:
    @mark("saver")
    def _save(self, path):
        path.write_text("")


@pytest.mark.parametrize(
    ("thing", "words"),
    [(object(), "cannot be saved"), (Unloadable(), ("cannot be loaded"))],
)
class TestWhatCannotBeKeptIsToldBeforeTraining:
    def test_when_the_checkpointer_is_made(self, tmp_path, thing, words):
        with pytest.raises(
            CheckpointError,
            match=f"'thing', of type {type(thing).__name__}, {words}.*mark_as_loader",
        ):
            Checkpointer(tmp_path, {"thing": thing})

    def test_when_it_is_added(self, tmp_path, thing, words):
        checkpointer = Checkpointer(tmp_path)
        with pytest.raises(CheckpointError, match=words):
            checkpointer.add_recoverable("thing", thing)
        assert checkpointer.recoverables == {}

    def test_when_it_was_put_in_by_hand(self, tmp_path, thing, words):
        brain = make(folder=tmp_path)
        brain.checkpointer.recoverables["thing"] = thing
        with pytest.raises(CheckpointError, match=words):
            brain.fit(range(1, 3), points(4))
        assert brain.trained_on == []


def test_custom_hooks_are_enough(tmp_path):
    thing = [1]
    checkpointer = Checkpointer(
        tmp_path,
        {"thing": thing},
        custom_save_hooks={"thing": lambda obj, path: path.write_text(str(obj[0]))},
        custom_load_hooks={"thing": lambda obj, path, _: obj.append(int(path.read_text()))},
    )
    checkpointer.save_checkpoint()
    checkpointer.recover_if_possible()
    assert thing == [1, 1]


# The library itself, where it is installed.


@pytest.fixture
def library(monkeypatch):
    """Import a part of SpeechBrain, and nothing of what its import changes in the process."""
    monkeypatch.setenv("SB_LOG_LEVEL", "INFO")
    monkeypatch.setenv("SB_DISABLE_QUIRKS", "allow_tf32,disable_jit_profiling")
    pytest.importorskip("speechbrain")
    return importlib.import_module


def test_speechbrain_s_input_normalization_comes_back_with_its_state(library, tmp_path):
    features = library("speechbrain.processing.features")
    before = features.InputNormalization()
    before(torch.arange(30.0).reshape(2, 5, 3), torch.ones(2), epoch=0)
    assert before.count == 10
    after = resumed(tmp_path, norm=before)["norm"]
    assert after.count == 10
    torch.testing.assert_close(after.glob_mean, before.glob_mean)


def test_speechbrain_s_new_bob_scheduler_comes_back_with_its_state(library, tmp_path):
    schedulers = library("speechbrain.nnet.schedulers")
    before = schedulers.NewBobScheduler(0.5)
    before(1.0)
    before(1.0)
    after = schedulers.NewBobScheduler(0.5)
    Checkpointer(tmp_path, {"scheduler": before}).save_checkpoint()
    Checkpointer(tmp_path, {"scheduler": after}).recover_if_possible()
    assert before.hyperparam_value == 0.25
    assert vars(after) == vars(before)


def test_speechbrain_s_categorical_encoder_comes_back_with_its_labels(library, tmp_path):
    encoders = library("speechbrain.dataio.encoder")
    before = encoders.CategoricalEncoder()
    before.update_from_iterable("abc", sequence_input=False)
    assert resumed(tmp_path, encoder=before)["encoder"].lab2ind == before.lab2ind
