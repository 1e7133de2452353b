"""What a resumed run takes from the script by ``--resume_with_new``, and not from the checkpoint; a
kill after it changes nothing, with the option still given or not.
"""

from __future__ import annotations

import functools

import pytest
import torch

from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from tests.reading_blocks import block_rows
from tests.recipes import Regression, assert_same, linear, make, points, weights

DATA = points(8)
SGD = torch.optim.SGD
ADAM = torch.optim.AdamW


class Saving(Regression):
    """Saves every epoch, and remembers the rates of its steps."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rates = []

    def on_fit_batch_start(self, batch, should_step):
        self.rates.append(round(self.optimizer.param_groups[0]["lr"], 9))

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.checkpointer.save_and_keep_only()


def run(folder, epochs, opt=SGD, schedule=None, new=None, cls=Saving, **settings):
    """Run as a script does that is started again, with four steps an epoch."""
    counter = EpochCounter(epochs)
    every = settings.pop("every", "step")
    options = settings.pop("options", {})
    settings.setdefault("lr", 0.1)
    brain = make(
        cls,
        net=linear(),
        opt=functools.partial(opt, **settings),
        folder=folder,
        recoverables={"counter": counter},
        scheduler_every=every,
        **({"resume_with_new": new} if new else {}),
        **options,
    )
    brain.scheduler_class = schedule
    brain.fit(counter, DATA, DATA, train_loader_kwargs={"batch_size": 2})
    return brain


def group_of(brain):
    return brain.optimizer.param_groups[0]


def moments_of(brain):
    (state,) = (brain.optimizer.state[one] for one in [brain.modules.net.weight])
    return state


@pytest.fixture
def said(caplog):
    caplog.set_level("INFO", logger="ddpkit")

    def row():
        return block_rows(caplog.text).get("new", "")

    return row


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("still", [True, False])
@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_a_setting_of_the_script_counts_and_the_moments_stay(tmp_path, said, key, still):
    before = {"momentum": 0.9, "lr": 0.1, "weight_decay": 0.1}
    now = before | {key: 0.02}
    run(tmp_path / "a", 1, **before)
    run(tmp_path / "b", 1, **before)
    whole = run(tmp_path / "a", 3, new=key, **now)
    assert group_of(whole)[key] == 0.02
    assert said() == f"{key} 0.1 -> 0.02 (--resume_with_new={key})"
    run(tmp_path / "b", 2, new=key, **now)
    again = run(tmp_path / "b", 3, new=key if still else None, **now)  # as after a kill
    assert_same(weights(again), weights(whole))
    assert group_of(again)[key] == 0.02
    if still:
        assert said() == f"nothing differs (--resume_with_new={key})"


@pytest.mark.costly
def test_a_rate_that_the_recipe_has_changed_since_is_not_set_back(tmp_path):
    class Halving(Saving):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage.name == "VALID":
                group_of(self)["lr"] *= 0.5
            super().on_stage_end(stage, stage_loss, epoch)

    run(tmp_path, 1, cls=Halving)
    assert group_of(run(tmp_path, 2, new="lr", lr=0.4, cls=Halving))["lr"] == 0.2
    assert group_of(run(tmp_path, 3, new="lr", lr=0.4, cls=Halving))["lr"] == 0.1
    assert group_of(run(tmp_path, 4, new="lr", lr=0.8, cls=Halving))["lr"] == 0.4


def cosine(optimizer, total):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)


def ramp(optimizer, total):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * total))


def one_cycle(optimizer, total):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=total)


def steps(optimizer, _):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("every", "schedule"),
    [
        ("step", cosine),
        *(
            pytest.param(every, schedule, marks=pytest.mark.slow)
            for every, schedule in [
                ("epoch", steps),
                ("step", ramp),
                ("step", one_cycle),
                ("step", steps),
                ("epoch", cosine),
                ("epoch", ramp),
            ]
        ),
    ],
)
def test_the_schedule_of_the_script_goes_on_at_the_step_of_the_run(tmp_path, said, every, schedule):
    """Another length and another rate: from then on as if it had always been so."""
    go = functools.partial(run, every=every, momentum=0.9)
    always = go(tmp_path / "always", 4, schedule=schedule, lr=0.3)
    for folder in "ab":
        go(tmp_path / folder, 2, schedule=schedule, lr=0.1)
    whole = go(tmp_path / "a", 4, schedule=schedule, lr=0.3, new="schedule")
    assert whole.rates == always.rates[8:]
    done = 8 if every == "step" else 2
    assert said().startswith(f"schedule, at {every} {done} (")
    go(tmp_path / "b", 3, schedule=schedule, lr=0.3, new="schedule", options={"debug": False})
    # the third epoch was the last of a shorter schedule; the option is still given
    again = go(tmp_path / "b", 4, schedule=schedule, lr=0.3, new="schedule")
    assert again.rates == always.rates[12:]


@pytest.mark.costly
@pytest.mark.parametrize("still", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_kill_after_a_new_schedule_changes_nothing(tmp_path, still):
    class Stopping(Saving):
        stops = False

        def on_fit_batch_start(self, batch, should_step):
            super().on_fit_batch_start(batch, should_step)
            if self.stops and self.optimizer_step == 6:
                raise ZeroDivisionError

    class Killed(Stopping):
        stops = True

    go = functools.partial(run, opt=ADAM, options={"ckpt_interval_steps": 1})
    for folder in "ab":
        go(tmp_path / folder, 1, schedule=steps)
    whole = go(tmp_path / "a", 3, schedule=cosine, new="schedule", cls=Stopping)
    with pytest.raises(ZeroDivisionError):
        go(tmp_path / "b", 3, schedule=cosine, new="schedule", cls=Killed)
    again = go(tmp_path / "b", 3, schedule=cosine, new="schedule" if still else None)
    assert again.rates == whole.rates[2:]
    assert_same(weights(again), weights(whole))


@pytest.mark.costly
def test_a_run_without_a_schedule_gets_one(tmp_path):
    always = run(tmp_path / "always", 2, schedule=cosine)
    run(tmp_path / "a", 1)
    assert run(tmp_path / "a", 2, schedule=cosine, new="schedule").rates == always.rates[4:]


def test_a_schedule_that_ends_too_early_is_refused(tmp_path):
    run(tmp_path, 2)
    short = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=5)
    with pytest.raises(ConfigError, match="OneCycleLR was made for 12 steps and cannot go on"):
        run(tmp_path, 3, schedule=lambda optimizer, _: short(optimizer), new="schedule")


@pytest.mark.costly
@pytest.mark.parametrize("still", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_optimizer_begins_anew_once(tmp_path, said, still):
    for folder in "ab":
        run(tmp_path / folder, 1, opt=SGD, momentum=0.9)
    whole = run(tmp_path / "a", 3, opt=ADAM, lr=0.01, new="optimizer")
    assert said() == "optimizer opt_class, AdamW (--resume_with_new=optimizer)"
    assert moments_of(whole)["step"] == 8
    run(tmp_path / "b", 2, opt=ADAM, lr=0.01, new="optimizer")
    again = run(tmp_path / "b", 3, opt=ADAM, lr=0.01, new="optimizer" if still else None)
    assert moments_of(again)["step"] == 8
    assert_same(weights(again), weights(whole))


@pytest.mark.costly
def test_another_optimizer_may_follow_with_the_option_still_given(tmp_path):
    run(tmp_path, 1, opt=SGD)
    run(tmp_path, 2, opt=ADAM, new="optimizer")
    brain = run(tmp_path, 3, opt=torch.optim.RMSprop, new="optimizer")
    assert type(brain.optimizer) is torch.optim.RMSprop
    assert moments_of(brain)["step"] == 4


@pytest.mark.slow
def test_a_new_optimizer_has_the_schedule_of_the_script_at_the_step_of_the_run(tmp_path):
    always = run(tmp_path / "always", 3, opt=ADAM, schedule=cosine, lr=0.01)
    run(tmp_path / "a", 1, opt=SGD, schedule=steps)
    brain = run(tmp_path / "a", 3, opt=ADAM, schedule=cosine, lr=0.01, new="optimizer")
    assert brain.rates == always.rates[4:]


def plateau(optimizer, _):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)


@pytest.mark.slow
@pytest.mark.parametrize("still", [True, False])
def test_a_schedule_that_follows_the_loss_begins_anew_once(tmp_path, still):
    go = functools.partial(run, every="epoch", schedule=plateau)
    for folder in "ab":
        go(tmp_path / folder, 3, lr=0.1)
    whole = go(tmp_path / "a", 6, lr=0.5, new="schedule")
    assert whole.rates[0] == 0.5
    go(tmp_path / "b", 5, lr=0.5, new="schedule")
    again = go(tmp_path / "b", 6, lr=0.5, new="schedule" if still else None)
    assert again.rates == whole.rates[8:]


@pytest.mark.costly
def test_without_the_option_all_comes_from_the_checkpoint_and_the_way_out_is_named(
    tmp_path, caplog
):
    run(tmp_path, 1, schedule=steps)
    brain = run(tmp_path, 2, lr=0.5, schedule=steps, weight_decay=0.5)
    assert group_of(brain)["weight_decay"] == 0
    assert "--resume_with_new=lr takes the script's" in caplog.text


def test_a_new_run_takes_nothing_over_and_says_nothing(tmp_path, said):
    run(tmp_path, 1, new="lr,optimizer")
    assert said() == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"new": "rate"}, "expects some of lr, weight_decay, schedule, optimizer, got 'rate'"),
        ({"new": "schedule"}, "the Brain was given no scheduler_class"),
        ({"new": "lr", "schedule": steps}, "a schedule sets the learning rates"),
    ],
)
def test_what_cannot_be_is_refused_before_training(tmp_path, arguments, words):
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, 1, **arguments)
