"""`fit` called several times in one script, stopped anywhere, and started again."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import DataError
from ddpkit.types import Stage
from tests.recipes import QUIET, Killed, Regression, assert_same, points, sgd, weights

EASY = points(12)
HARD = points(20, seed=9)
VALID = points(5, seed=6)


class Curriculum(Regression):
    """Draws random numbers, and dies when it is about to train on batch ``dies_at`` = (call, epoch,
    step).
    """

    dies_at = None
    call = 1
    saves = True

    def on_stage_start(self, stage, epoch=None):
        self.epoch = epoch

    def on_fit_batch_start(self, batch, should_step):
        if self.dies_at == (self.call, self.epoch, self.step):
            raise Killed

    def compute_forward(self, batch, stage):
        return super().compute_forward(
            [nn.functional.dropout(batch[0], 0.3, self.modules.training), batch[1]],
            stage,
        )

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, (self.call, epoch))
        if self.saves and stage is Stage.VALID:
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})


class Crawler(IterableDataset):
    """Goes on where it was from epoch to epoch, and from call to call."""

    def __init__(self):
        self.data = points(64)
        self.place = 0
        self.left = 12

    def __iter__(self):
        self.left = self.left or 12
        while self.left:
            self.place = self.place + 1
            self.left = self.left - 1
            yield self.data[self.place % 64]

    def state_dict(self):
        return {"place": self.place, "left": self.left}

    def load_state_dict(self, state):
        self.place = state["place"]
        self.left = state["left"]


def two(brain, counters, kwargs):
    """Two counters, two sets of data; and random numbers are drawn in between."""
    brain.fit(counters[0], EASY, VALID, train_loader_kwargs=kwargs)
    between(brain)
    brain.fit(counters[1], HARD, VALID, train_loader_kwargs={**kwargs, "batch_size": 3})


def shared(brain, counters, kwargs):
    """One counter, whose limit is raised."""
    brain.fit(counters[0], EASY, VALID, train_loader_kwargs=kwargs)
    between(brain)
    counters[0].limit = 5
    brain.fit(counters[0], HARD, VALID, train_loader_kwargs=kwargs)


def anew(brain, counters, kwargs):
    """One counter, which is set back; and what the script does in between must not be done to what
    was recovered.
    """
    brain.fit(counters[0], EASY, VALID, train_loader_kwargs=kwargs)
    between(brain)
    counters[0].current = 0
    counters[0].limit = 3
    for group in brain.optimizer.param_groups:
        group["lr"] *= 0.5
    brain.fit(counters[0], HARD, VALID, train_loader_kwargs=kwargs)


def crawled(brain, counters, kwargs):
    """One stream, which goes on from the one call into the next."""
    stream = Crawler()
    brain.fit(counters[0], stream, VALID, train_loader_kwargs={"batch_size": 2})
    between(brain)
    brain.fit(counters[1], stream, VALID, train_loader_kwargs={"batch_size": 2})


def between(brain):
    brain.drawn = torch.rand(2), brain.optimizer_step
    if brain.dies_at == "between":
        raise Killed
    brain.call = 2


def start(folder, script, dies_at=None, **options):
    """Run a script; every time with everything made anew."""
    torch.manual_seed(7)
    net = nn.Linear(3, 1).double()
    counters = [EpochCounter(2), EpochCounter(3)]
    checkpointer = Checkpointer(folder, {"net": net, "one": counters[0], "two": counters[1]})
    brain = Curriculum(
        {"net": net},
        sgd(lr=0.05, momentum=0.9),
        None,
        {**QUIET, **options},
        checkpointer,
    )
    brain.dies_at = dies_at
    if dies_at is None:
        script(brain, counters, {"batch_size": 2, "shuffle": True})
    else:
        with pytest.raises(Killed):
            script(brain, counters, {"batch_size": 2, "shuffle": True})
    return brain


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize(
    "dies_at",
    [
        "between",
        (2, 1, 5),
        *(pytest.param(one, marks=pytest.mark.slow) for one in [(1, 2, 3), (2, 1, 2), (2, 3, 1)]),
    ],
)
@pytest.mark.parametrize("script", [two, shared, anew, crawled])
def test_a_script_with_two_calls_goes_on_where_it_was(tmp_path, script, dies_at):
    if script is shared and dies_at != "between" and dies_at[0] == 2:
        dies_at = (2, dies_at[1] + 2, dies_at[2])
    options = {"ckpt_interval_steps": 3}
    whole = start(tmp_path / "whole", script, **options)
    killed = start(tmp_path / "killed", script, dies_at, **options)
    resumed = start(tmp_path / "killed", script, **options)
    assert_same(weights(resumed), weights(whole))
    assert resumed.losses == whole.losses[len(whole.losses) - len(resumed.losses) :]
    assert resumed.optimizer_step == whole.optimizer_step
    again = resumed.trained_on
    assert all(
        torch.equal(one, other)
        for one, other in zip(again, whole.trained_on[-len(again) :], strict=True)
    )
    assert len(killed.trained_on) + len(again) - len(whole.trained_on) <= 4, (
        "what was done is not done again"
    )
    assert torch.equal(resumed.drawn[0], whole.drawn[0])
    assert resumed.drawn[1] == whole.drawn[1]
    moments = [brain.optimizer.state_dict()["state"] for brain in (resumed, whole)]
    assert all(
        torch.equal(moments[0][n]["momentum_buffer"], moments[1][n]["momentum_buffer"])
        for n in moments[1]
    )


@pytest.mark.costly
def test_a_script_that_is_done_does_nothing_in_either_call(tmp_path, caplog):
    whole = start(tmp_path, two)
    with caplog.at_level(logging.INFO):
        again = start(tmp_path, two)
    assert again.trained_on == []
    assert_same(weights(again), weights(whole))
    assert "Call 1 of fit is done:" in caplog.text
    assert "Call 2 of fit is done" not in caplog.text


@pytest.mark.slow
def test_three_calls_stopped_in_the_last(tmp_path):
    def three(brain, counters, kwargs):
        two(brain, counters, kwargs)
        brain.call = 3
        counters[1].limit = 4
        brain.fit(counters[1], EASY, VALID, train_loader_kwargs=kwargs)

    whole = start(tmp_path / "whole", three, ckpt_interval_steps=3)
    start(tmp_path / "killed", three, (3, 4, 5), ckpt_interval_steps=3)
    resumed = start(tmp_path / "killed", three, ckpt_interval_steps=3)
    assert_same(weights(resumed), weights(whole))
    assert resumed.losses == whole.losses[-2:]
    assert resumed.drawn[1] == whole.drawn[1]


@pytest.mark.costly
def test_a_call_that_failed_before_it_went_on_does_not_make_the_next_one_do_nothing(tmp_path):
    def careful(brain, counters, kwargs):
        brain.fit(counters[0], EASY, VALID, train_loader_kwargs=kwargs)
        between(brain)
        if brain.dies_at is None:
            with pytest.raises(DataError):
                brain.fit(counters[1], [], VALID, train_loader_kwargs=kwargs)
        brain.fit(counters[1], HARD, VALID, train_loader_kwargs=kwargs)

    start(tmp_path, careful, (2, 2, 5), ckpt_interval_steps=3)
    assert start(tmp_path, careful).trained_on


@pytest.mark.costly
def test_a_counter_that_is_not_saved_is_told(tmp_path, caplog):
    def plain(brain, counters, kwargs):
        brain.fit(range(1, 4), EASY, VALID, train_loader_kwargs=kwargs)

    start(tmp_path, plain, (1, 2, 5), ckpt_interval_steps=3)
    with caplog.at_level(logging.WARNING):
        start(tmp_path, plain)
    assert (
        "The checkpoint goes on with epoch 2, and fit was given epochs that begin with 1"
        in caplog.text
    )
    caplog.clear()
    start(tmp_path / "other", two, (2, 1, 2))
    start(tmp_path / "other", two)
    assert "epoch counter" not in caplog.text, "the second call has a counter of its own"


@pytest.mark.slow
def test_the_middle_of_an_epoch_of_one_counter_sets_no_other_back(tmp_path):
    def there_and_back(brain, counters, kwargs):
        two(brain, counters, kwargs)
        brain.call = 3
        counters[0].limit = 4
        brain.fit(counters[0], EASY, VALID, train_loader_kwargs=kwargs)

    whole = start(tmp_path / "whole", there_and_back, ckpt_interval_steps=3)
    start(tmp_path / "killed", there_and_back, (2, 2, 5), ckpt_interval_steps=3)
    start(tmp_path / "killed", there_and_back, (3, 4, 5), ckpt_interval_steps=3)
    resumed = start(tmp_path / "killed", there_and_back, ckpt_interval_steps=3)
    assert_same(weights(resumed), weights(whole))
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert resumed.optimizer_step == whole.optimizer_step


LOOPED = {"batch_size": 2, "looped_nominal_epoch": 4}


@pytest.mark.slow
@pytest.mark.parametrize("dies_at", ["between", pytest.param((2, 1, 3), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (LOOPED, LOOPED),
        pytest.param(LOOPED, {"batch_size": 2}, marks=pytest.mark.slow),
        pytest.param({"batch_size": 2}, LOOPED, marks=pytest.mark.slow),
    ],
)
def test_nominal_epochs_go_on_in_their_stream_from_call_to_call(tmp_path, first, second, dies_at):
    def nominal(brain, counters, kwargs):
        stream = Crawler()
        brain.fit(counters[0], stream, VALID, train_loader_kwargs=first)
        between(brain)
        brain.fit(counters[1], stream, VALID, train_loader_kwargs=second)

    options = {"ckpt_interval_steps": 2}
    whole = start(tmp_path / "whole", nominal, **options)
    start(tmp_path / "killed", nominal, dies_at, **options)
    resumed = start(tmp_path / "killed", nominal, **options)
    assert_same(weights(resumed), weights(whole))
    again = resumed.trained_on
    assert all(
        torch.equal(one, other)
        for one, other in zip(again, whole.trained_on[-len(again) :], strict=True)
    )
    assert resumed.losses == whole.losses[-len(resumed.losses) :]


@pytest.mark.slow
def test_calls_after_one_that_a_limit_ends_inside_of_an_epoch_leave_its_place_alone(tmp_path):
    def with_a_save(brain, counters, kwargs):
        brain.results = [
            brain.fit(counters[0], EASY, VALID, train_loader_kwargs=kwargs),
            brain.fit(counters[1], HARD, VALID, train_loader_kwargs=kwargs),
        ]
        brain.checkpointer.save_and_keep_only()

    whole = start(tmp_path / "whole", with_a_save)
    parts = [
        start(tmp_path / "parts", with_a_save, optimizer_step_limit=limit)
        for limit in (4, 4, 20, None)
    ]
    assert [one.optimizer_step for one in parts] == [4, 4, 20, whole.optimizer_step]
    assert_same(weights(parts[-1]), weights(whole))
    assert torch.equal(
        torch.cat([row for one in parts for row in one.trained_on]),
        torch.cat(whole.trained_on),
    )
    second = parts[0].results[1]
    assert (second.reason, second.epochs, second.optimizer_steps) == ("optimizer_step_limit", 0, 4)
    assert second.newest_checkpoint == parts[0].results[0].newest_checkpoint
