"""What a checkpoint holds of the Brain, what comes back of it, and when one is made in the midst of
an epoch.
"""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
from torch import nn
from torch.utils.data import IterableDataset

import ddpkit
from ddpkit.base import load_plain_yaml
from ddpkit.brain import run_of
from ddpkit.checkpoints import Checkpointer
from ddpkit.dataloader import Sharding, shard
from ddpkit.errors import ConfigError
from ddpkit.run.brain_file import EVALUATED, INTRA_EPOCH_KEY, beginning
from ddpkit.run.choose_start import Start
from ddpkit.run.data_order import order_of
from ddpkit.run.step_plan import StepPlan


class Brain(ddpkit.Brain):
    """One whose ``fit`` is running."""

    def __init__(self, checkpointer=None, **given):
        super().__init__(run_opts={"device": "cpu", **given}, checkpointer=checkpointer)
        self.progress.is_fitting = True

    @property
    def state(self):
        return run_of(self).policy.run_state


def in_epoch(brain, step=5, optimizer_step=20, losses=((2.0, 3), (4.0, 1))):
    brain.step = step
    brain.optimizer_step = optimizer_step
    brain.avg_train_loss = 2.25
    brain.progress.clipped = 4
    for loss, count in losses:
        brain.progress.meter.append(loss, count)
        brain.progress.meter.samples += 10
    return brain


def test_the_midst_of_an_epoch_comes_back(tmp_path):
    in_epoch(Brain())._save(tmp_path / "brain.ckpt")
    state = load_plain_yaml((tmp_path / "brain.ckpt").read_text())
    assert state.pop("options")["precision"] == "fp32"
    assert set(state.pop("asked")) == set(vars(StepPlan(1, 1)))
    assert [state.pop(name) for name in ("nonfinite", "fit", "launch")] == [0, 0, None]
    assert [state.pop(name) for name in ("epoch", "finished", "lacks")] == [0, [], None]
    assert [state.pop(name) for name in ("seed", "settings", "data", "trained")] == [
        None,
        None,
        None,
        {},
    ]
    assert [state.pop(name) for name in ("whole", "stages_done", "debug")] == [False, False, False]
    assert state == {
        "step": 5,
        "avg_train_loss": 2.25,
        "optimizer_step": 20,
        "epoch_began_at": 0,
        "clipped": 4,
        "world_size": None,
        "grad_accumulation_factor": 1,
        "per_step": None,
        "per_process": None,
        "loss_sum": 10.0,
        "loss_count": 4.0,
        "samples": 20,
        "steps_per_epoch": None,
        "steps_ahead": 0,
    }
    brain = Brain()
    brain._recover(tmp_path / "brain.ckpt", end_of_epoch=False)
    assert (brain.step, brain.optimizer_step, brain.avg_train_loss) == (5, 20, 2.25)
    assert brain.progress.meter.sums() == (10.0, 4.0, 0)
    assert (brain.progress.meter.samples, brain.progress.clipped) == (20, 4)


def test_of_the_end_of_an_epoch_only_the_updates_come_back(tmp_path):
    in_epoch(Brain())._save(tmp_path / "brain.ckpt")
    brain = Brain()
    brain._recover(tmp_path / "brain.ckpt", end_of_epoch=True)
    assert (brain.step, brain.optimizer_step, brain.avg_train_loss) == (0, 20, 0.0)
    assert brain.progress.meter.sums() == (0.0, 0.0, 0)


def test_outside_of_fit_nothing_comes_back(tmp_path):
    """Recovering the best model for a test must not move the training that goes on afterwards."""
    in_epoch(Brain())._save(tmp_path / "brain.ckpt")
    brain = in_epoch(Brain(), step=9, optimizer_step=99)
    brain.progress.is_fitting = False
    for end_of_epoch in (False, True):
        brain._recover(tmp_path / "brain.ckpt", end_of_epoch=end_of_epoch)
        assert (brain.step, brain.optimizer_step) == (9, 99)


def test_a_process_that_only_evaluates_writes_again_what_it_has_recovered(tmp_path):
    """A recipe that saves in on_stage_end(TEST) has no place in the training of its own."""
    trained = in_epoch(Brain())
    trained.state.start, calls = Start("auto"), trained.state.calls
    calls.number = 2
    calls.finished = {1: 7}
    trained.state.rank_state.base_seed = 5
    trained.state.step_plan = StepPlan(4, 2, 64, 8)
    trained.state._settings = {"sgd": [{"lr": 0.5}]}
    trained._save(tmp_path / "brain.ckpt")
    brain = Brain(precision="bf16")
    brain.progress.is_fitting = False
    brain._recover(tmp_path / "brain.ckpt", end_of_epoch=True)
    assert brain.optimizer_step == 0
    brain._save(tmp_path / "again.ckpt")
    before, again = (
        load_plain_yaml((tmp_path / f"{name}.ckpt").read_text()) for name in ("brain", "again")
    )
    assert again.pop(EVALUATED) is True
    assert again == before
    assert (again["optimizer_step"], again["fit"]) == (20, 2)
    assert again["options"]["precision"] == "fp32"


@pytest.mark.parametrize("content", ["[", "- 1", "other: 2"])
def test_what_an_evaluation_cannot_read_it_does_not_write_again(tmp_path, content):
    (tmp_path / "brain.ckpt").write_text(content)
    brain = Brain()
    brain.progress.is_fitting = False
    brain._recover(tmp_path / "brain.ckpt", end_of_epoch=True)
    brain._save(tmp_path / "again.ckpt")
    again = load_plain_yaml((tmp_path / "again.ckpt").read_text())
    assert (again[EVALUATED], again["optimizer_step"], "other" in again) == (True, 0, False)


def test_what_has_been_trained_is_no_evaluation(tmp_path):
    """After fit, and in a loop of a recipe's own that never calls fit."""
    in_epoch(Brain(), optimizer_step=3)._save(tmp_path / "brain.ckpt")
    for change in ({"fits": 1}, {"optimizer_step": 9}, {"optimizers_dict": {"sgd": None}}):
        brain = Brain()
        brain.progress.is_fitting = False
        brain._recover(tmp_path / "brain.ckpt", end_of_epoch=True)
        brain.state.calls.number = change.get("fits", 0)
        brain.optimizer_step = change.get("optimizer_step", 0)
        brain.optimizers_dict = change.get("optimizers_dict")
        brain._save(tmp_path / "again.ckpt")
        again = load_plain_yaml((tmp_path / "again.ckpt").read_text())
        assert EVALUATED not in again
        assert again["optimizer_step"] == change.get("optimizer_step", 0)


def test_the_sums_of_all_ranks_come_back_once(tmp_path, monkeypatch):
    """They are the sums over all ranks: every rank but one begins with nothing."""
    in_epoch(Brain())._save(tmp_path / "brain.ckpt")
    brain = Brain()
    monkeypatch.setattr("ddpkit.run.run_state.get_rank", lambda: 1)
    brain._recover(tmp_path / "brain.ckpt", end_of_epoch=False)
    assert brain.step == 5
    assert brain.progress.meter.sums() == (0.0, 0.0, 0)


def test_checkpoints_of_others(tmp_path):
    """SpeechBrain's hold no sums, and the oldest no updates."""
    path = tmp_path / "brain.ckpt"
    path.write_text("avg_train_loss: 1.5\noptimizer_step: 7\nstep: 4\n")
    brain = Brain()
    brain._recover(path, end_of_epoch=False)
    assert (brain.step, brain.optimizer_step) == (4, 7)
    loss_sum, samples, _ = brain.progress.meter.sums()
    assert loss_sum / samples == 1.5
    path.write_text("avg_train_loss: 1.5\nstep: 4\n")
    brain = Brain()
    brain._recover(path, end_of_epoch=False)
    assert brain.optimizer_step == 4


def test_the_beginning_of_the_file_says_how_far_the_run_has_come(tmp_path):
    brain = in_epoch(Brain(), losses=[(0.5, 2)])
    brain._save(tmp_path / "brain.ckpt")
    text = (tmp_path / "brain.ckpt").read_text()
    begun = load_plain_yaml(beginning(text))
    whole = load_plain_yaml(text)
    names = ("step", "epoch", "optimizer_step")
    assert [begun[name] for name in names] == [whole[name] for name in names]
    assert len(begun) < len(whole)


def test_every_key_is_in_the_reference(tmp_path):
    page = (Path(__file__).parents[2] / "docs/reference/checkpoint-files.md").read_text()
    brain = in_epoch(Brain(Checkpointer(tmp_path)), losses=[(0.5, 2)])
    brain._save(tmp_path / "brain.ckpt")
    keys = [
        *load_plain_yaml((tmp_path / "brain.ckpt").read_text()),
        *run_of(brain).policy.rank_state.state_dict(),
    ]
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_a_mean_that_is_not_a_number(tmp_path):
    brain = in_epoch(Brain(), losses=[(math.nan, 2)])
    brain.avg_train_loss = math.nan
    brain._save(tmp_path / "brain.ckpt")
    again = Brain()
    again._recover(tmp_path / "brain.ckpt", end_of_epoch=False)
    assert math.isnan(again.avg_train_loss)


# ------------------------------------------------------------------------- in the midst of an epoch


@pytest.mark.parametrize(
    ("options", "seconds", "steps", "due"),
    [
        ({}, 1e9, 10**9, False),
        ({"ckpt_interval_minutes": 2}, 119.9, 0, False),
        ({"ckpt_interval_minutes": 2}, 120.0, 0, True),
        ({"ckpt_interval_minutes": 0.5}, 31, 0, True),
        ({"ckpt_interval_minutes": -1}, 1e9, 0, False),
        ({"ckpt_interval_steps": 10}, 1e9, 9, False),
        ({"ckpt_interval_steps": 10}, 0, 10, True),
        ({"ckpt_interval_steps": -1}, 0, 10, False),
        ({"ckpt_interval_minutes": 2}, 0.0, 10**9, False),
    ],
)
def test_when_it_is_time(options, seconds, steps, due):
    brain = Brain(**options)
    assert run_of(brain).policy.save_if_due(seconds, steps) is due, (
        "without a checkpointer nothing is saved, but it was time"
    )


def test_only_the_newest_is_kept_and_others_are_left_alone(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    brain = in_epoch(Brain(checkpointer, ckpt_interval_steps=2))
    kept = checkpointer.save_checkpoint(name="mine")
    for step in (2, 4, 6):
        brain.step = step
        assert run_of(brain).policy.save_if_due(0.0, 2)
    found = {checkpoint.path: checkpoint.meta for checkpoint in checkpointer.list_checkpoints()}
    assert len(found) == 2
    assert kept.path in found
    (meta,) = (meta for path, meta in found.items() if path != kept.path)
    assert meta[INTRA_EPOCH_KEY] is True
    assert meta["end-of-epoch"] is False
    again = Checkpointer(tmp_path)
    fresh = Brain(again)
    again.recover_if_possible()
    assert fresh.step == 6
    assert fresh.progress.meter.sums() == (10.0, 4.0, 0)


def test_an_overridden_save_is_used(tmp_path):
    class Own(Brain):
        def _save(self, path):
            Path(path).write_text("step: 77\navg_train_loss: 0.0\n")

    checkpointer = Checkpointer(tmp_path)
    Own(checkpointer)
    checkpointer.save_checkpoint()
    again = Checkpointer(tmp_path)
    fresh = Brain(again)
    again.recover_if_possible()
    assert fresh.optimizer_step == 77


# -------------------------------------------------------------------------------------- registering


def test_what_is_registered(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    brain = Brain(checkpointer)
    assert set(checkpointer.recoverables) == {"brain", "ranks"}
    assert checkpointer.recoverables["brain"] is brain
    assert checkpointer.optional_recoverables["ranks"]


def test_a_recoverable_of_the_recipe_is_not_replaced(tmp_path):
    with pytest.raises(ConfigError, match="'ranks' is reserved"):
        Brain(Checkpointer(tmp_path, {"ranks": nn.Linear(1, 1)}))


@pytest.mark.slow
def test_debugging_writes_elsewhere_and_leaves_nothing(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    brain = Brain(checkpointer, debug=True)
    folder = Path(checkpointer.checkpoints_dir)
    assert folder != tmp_path
    assert folder.is_dir()
    checkpointer.save_checkpoint()
    assert list(tmp_path.iterdir()) == []
    del brain, checkpointer
    gc.collect()
    assert not folder.exists()


def test_debugging_persistently_writes_where_it_was_told(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    Brain(checkpointer, debug=True, debug_persistently=True)
    assert Path(checkpointer.checkpoints_dir) == tmp_path


class Cuts(IterableDataset):
    """A stream that divides itself."""

    num_shards = 8

    def shard(self, num_shards, index):
        return self

    def __iter__(self):
        return iter(range(8))


def test_a_stream_that_divides_itself_says_into_how_many_parts():
    """Its order is another on another number of processes or workers, which a run that goes on is
    told.
    """
    one, four = (order_of(shard(Cuts(), Sharding(0, world), num_workers=2)) for world in (1, 2))
    name = "shards (its own, processes x workers)"
    assert (one[name], four[name]) == (2, 4)
    assert name not in order_of(shard(Cuts(), Sharding(0, 9)))
