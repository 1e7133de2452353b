"""Learning-rate schedules under SpeechBrain's names: what they give, what is saved of them, and
what scales them.
"""

from __future__ import annotations

import pytest
import torch

from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.schedulers import (
    CyclicLRScheduler,
    LinearScheduler,
    NewBobScheduler,
    NoamScheduler,
    ReduceLROnPlateau,
    StepScheduler,
    update_learning_rate,
)
from tests.recipes import (
    QUIET,
    Killed,
    Mortal,
    assert_same,
    linear,
    make,
    points,
    weights,
)

OF_STEPS = {
    "noam": (
        lambda: NoamScheduler(1.0, 4, model_size=16),
        [0.03125, 0.0625, 0.09375, 0.125, 0.25 / 5**0.5],
    ),
}


def optimizer(lr=1.0, groups=1):
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(groups)],
        lr=lr,
    )


@pytest.mark.parametrize("kind", OF_STEPS)
def test_a_schedule_of_steps_sets_all_groups_and_says_from_what_to_what(kind):
    make_one, expected = OF_STEPS[kind]
    schedule = make_one()
    sgd = optimizer(groups=2)
    before = 1.0
    for rate in expected:
        assert schedule(sgd) == pytest.approx((before, rate))
        assert schedule.current_lr == before
        assert [group["lr"] for group in sgd.param_groups] == pytest.approx([rate, rate])
        before = sgd.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("triangular", [0.5, 1.0, 0.5, 0.0, 0.5, 1.0]),
        ("triangular2", [0.5, 1.0, 0.5, 0.0, 0.25, 0.5]),
        ("exp_range", [0.25, 0.25, 0.0625, 0.0, 0.015625, 0.015625]),
    ],
)
def test_a_cycle_goes_up_and_down(mode, expected):
    schedule = CyclicLRScheduler(0.0, 1.0, 2, mode, gamma=0.5)
    sgd = optimizer()
    assert schedule(1) == (0.0, expected[0])
    for rate in expected:
        schedule.on_batch_end(sgd)
        assert sgd.param_groups[0]["lr"] == pytest.approx(rate)
    scaled = CyclicLRScheduler(0.0, 1.0, 2, scale_fn=lambda steps: steps, scale_mode="iterations")
    assert scaled.clr(2) == 2.0


def test_new_bob_waits_before_each_annealing():
    schedule = NewBobScheduler(1.0, annealing_factor=0.5, improvement_threshold=0.1, patient=1)
    assert [schedule(metric)[1] for metric in (1.0, 0.95, 0.9, 0.5, 0.5, 0.5, 0.0, 0.0)] == [
        *(1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25)
    ]


def test_new_bob_compares_with_the_metric_before_and_not_with_the_best():
    schedule = NewBobScheduler(1.0, annealing_factor=0.5, improvement_threshold=0.1)
    assert [schedule(metric)[1] for metric in (1.0, 0.5, 0.9, 0.7)] == [1.0, 1.0, 0.5, 0.5]


def test_the_plateau_is_counted_from_the_best_loss():
    schedule = ReduceLROnPlateau(lr_min=0.3, factor=0.5, patience=1, dont_halve_until_epoch=2)
    adam = optimizer()
    rates = []
    for epoch, loss in enumerate((5.0, 9.0, 8.0, 8.5, 8.2, 9.0, 9.0, 7.0), 1):
        old, new = schedule([adam], epoch, loss)
        update_learning_rate(adam, new)
        rates.append((old, new))
    assert [new for _, new in rates] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.3, 0.3]
    assert [old for old, _ in rates[1:]] == [new for _, new in rates[:-1]]


def test_values_of_epochs():
    assert [LinearScheduler(1.0, 0.0, 1)(epoch) for epoch in (1, 2)] == [(1.0, 1.0)] * 2
    assert LinearScheduler(1.0, 0.0, 3)(9) == (0.0, 0.0)
    assert StepScheduler(1.0, decay_factor=0.1, decay_drop=1)(1) == pytest.approx((0.1, 0.01))
    assert StepScheduler(1.0, half_life=4)(3)[1] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("make_one", "message"),
    [
        (
            lambda: StepScheduler(1, decay_drop=2, half_life=3),
            ("half_life=3 .*leave decay_factor and decay_drop out"),
        ),
        (
            lambda: CyclicLRScheduler(mode="square"),
            ("triangular, triangular2, exp_range, got 'square'"),
        ),
    ],
)
def test_what_makes_no_schedule_is_told(make_one, message):
    with pytest.raises(ConfigError, match=message):
        make_one()


def test_a_rate_is_set_where_it_is_asked_for():
    sgd = optimizer(groups=3)
    update_learning_rate(sgd, 0.5, [0, 2])
    assert [group["lr"] for group in sgd.param_groups] == [0.5, 1.0, 0.5]
    held = torch.tensor(1.0)
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=held)
    update_learning_rate(adam, 0.25)
    assert adam.param_groups[0]["lr"] is held
    assert held.item() == 0.25


# --------------------------------------------------------------------------------- saved and loaded

SAVED = {
    **{name: (make_one, lambda one: one(optimizer())) for name, (make_one, _) in OF_STEPS.items()},
    "cyclic": (
        lambda: CyclicLRScheduler(0.0, 1.0, 3),
        lambda one: one.on_batch_end(optimizer()) or one(0),
    ),
    "new bob": (lambda: NewBobScheduler(1.0, patient=1), lambda one: one(2.0)),
    "plateau": (lambda: ReduceLROnPlateau(0.1, 0.5, 1, 0), lambda one: one([optimizer()], 1, 3.0)),
}


@pytest.mark.parametrize("kind", SAVED)
def test_a_schedule_goes_on_from_its_checkpoint(tmp_path, kind):
    make_one, call = SAVED[kind]
    schedule = make_one()
    again = make_one()
    for _ in range(2):
        call(schedule)
    Checkpointer(tmp_path, {"schedule": schedule}).save_checkpoint()
    Checkpointer(tmp_path, {"schedule": again}).recover_if_possible()
    assert [call(again) for _ in range(3)] == [call(schedule) for _ in range(3)]


# What SpeechBrain 1.1.2 saves of each, after some calls.
SPEECHBRAINS = {
    "noam": {"losses": [], "n_steps": 3},
    "cyclic": {"losses": [], "clr_iterations": 3.0},
    "new bob": {"hyperparam_value": 0.5, "metric_values": [1.0, 2.0], "current_patient": 0},
    "plateau": {"losses": [3.0, 2.0], "anchor": 2.0, "patience_counter": 1},
}


@pytest.mark.parametrize("kind", SPEECHBRAINS)
def test_a_file_of_speechbrains_is_loaded_and_ours_has_what_it_reads(tmp_path, kind):
    make_one, call = SAVED[kind]
    schedule = make_one()
    checkpointer = Checkpointer(tmp_path, {"schedule": schedule})
    checkpoint = checkpointer.save_checkpoint()
    assert (
        torch.load(checkpoint.paramfiles["schedule"], weights_only=True).keys()
        >= SPEECHBRAINS[kind].keys()
    )
    schedule.load_state_dict(SPEECHBRAINS[kind])
    if kind in OF_STEPS:
        assert call(schedule)[1] == pytest.approx(OF_STEPS[kind][1][3]), (
            "the fourth, with the recipe's own settings"
        )
    else:
        assert schedule.state_dict() == SPEECHBRAINS[kind]


def test_a_file_of_something_else_is_told(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"schedule": NewBobScheduler(1.0)})
    checkpointer.save_checkpoint()
    with pytest.raises(
        CheckpointError,
        match="NoamScheduler: it has hyperparam_value, .* and not losses, n_steps",
    ):
        Checkpointer(tmp_path, {"schedule": NoamScheduler(1.0, 2)}).recover_if_possible()


# -------------------------------------------------------------------------------------- in a recipe


class Annealed(Mortal):
    """Calls one schedule after each step and another after each validation, as recipes do."""

    def on_fit_start(self):
        super().on_fit_start()
        self.rates = []
        self.optimizer.register_step_pre_hook(
            lambda sgd, *_: self.rates.append(sgd.param_groups[0]["lr"]),
        )

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if should_step and hasattr(self.hparams, "noam"):
            self.hparams.noam(self.optimizer)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage.name == "VALID" and hasattr(self.hparams, "lr_annealing"):
            _, new = self.hparams.lr_annealing(stage_loss)
            update_learning_rate(self.optimizer, new)
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})


def anneal(folder, dies_at=None):
    net = linear()
    counter = EpochCounter(2)
    noam = NoamScheduler(0.1, 3)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter, "noam": noam})
    options = {**QUIET, "ckpt_interval_steps": 1}
    brain = Annealed(
        {"net": net},
        lambda p: torch.optim.SGD(p, lr=0.1),
        {"noam": noam},
        options,
        checkpointer,
    )
    brain.dies_at = dies_at
    brain.fit(counter, points(10), train_loader_kwargs={"batch_size": 2, "shuffle": True})
    return brain


@pytest.mark.costly
def test_a_schedule_of_steps_is_resumed_in_the_middle_of_an_epoch(tmp_path):
    expected = anneal(tmp_path / "whole")
    with pytest.raises(Killed):
        anneal(tmp_path / "killed", dies_at=7)
    found = anneal(tmp_path / "killed")
    assert found.rates == expected.rates[7:]
    assert_same(weights(found), weights(expected))


def test_rates_are_those_of_the_recipe_and_the_scaling_multiplies_once(tmp_path):
    options = {"lr_scaling": "linear", "reference_batch_size": 1, "folder": tmp_path}
    schedule = NewBobScheduler(0.01, improvement_threshold=2.0)
    brain = make(Annealed, hparams={"lr_annealing": schedule}, **options)
    brain.fit(range(1, 4), points(4), points(2, seed=3), train_loader_kwargs={"batch_size": 2})
    assert brain.rates == [0.1, 0.1, 0.01, 0.01, 0.005, 0.005]
    assert brain.lr_scale == 2.0
    assert brain.optimizer.param_groups[0]["lr"] == schedule.hyperparam_value == 0.0025
