"""The numbers of steps, where a scheduler is made, and the scheduler that the Brain makes and steps
by itself.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, IterableDataset

from ddpkit.checkpoints import Checkpointer
from ddpkit.dataloader import LoopedLoader, make_dataloader
from ddpkit.epoch_loop import EpochCounter, EpochCounterWithStopper
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.types import Stage
from tests.recipes import (
    QUIET,
    Killed,
    Mortal,
    Poisoned,
    Regression,
    SavesAfterValidation,
    assert_same,
    linear,
    points,
    sgd,
    weights,
)

SLOW = pytest.mark.slow
# batches of 4: six, in three steps of two
DATA = points(22)
VALID = points(5, seed=6)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


class Tracing(Mortal, SavesAfterValidation):
    """Notes the numbers of steps in init_optimizers, and the learning rate of each step; dies where
    it is told to.
    """

    keeping: ClassVar = {"min_keys": ["loss"]}

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rates = []

    def init_optimizers(self):
        self.known = self.steps_per_epoch, self.total_steps
        super().init_optimizers()

    def on_fit_batch_start(self, batch, should_step):
        super().on_fit_batch_start(batch, should_step)
        if should_step:
            self.rates.append(self.optimizer.param_groups[0]["lr"] * self.lr_scale)


def brain_with(scheduler_class, folder=None, *, counter=None, opt=None, **run_opts):
    net = linear()
    checkpointer = (
        None if folder is None else Checkpointer(folder, {"net": net, "counter": counter})
    )
    return Tracing(
        {"net": net},
        opt or sgd(),
        None,
        {**QUIET, **run_opts},
        checkpointer,
        scheduler_class,
    )


def fit(brain, epochs=(1, 2), train=DATA, valid=None, **kwargs):
    return brain.fit(epochs, train, valid, train_loader_kwargs={"batch_size": 4, **kwargs})


def torch_rates(scheduler_class, number, *, every=1):
    """Return the rates of a plain torch loop of so many steps, where the scheduler steps after
    every few.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = scheduler_class(optimizer)
    rates = []
    for step in range(1, number + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step % every == 0:
            scheduler.step()
    return rates


# -------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize(
    ("options", "epochs", "expected"),
    [
        ({}, range(1, 6), (6, 30)),
        ({}, EpochCounter(5), (6, 30)),
        ({}, EpochCounterWithStopper(5, 2, 0, "min"), (6, 30)),
        ({}, [1, 2], (6, 12)),
        ({}, iter([1]), (6, None)),
        ({"grad_accumulation_factor": 4}, range(3), (2, 6)),
        ({"global_batch_size": 8, "micro_batch_size": 4}, range(3), (3, 9)),
        ({"optimizer_step_limit": 20}, range(1, 6), (6, 20)),
        ({"optimizer_step_limit": 99}, range(1, 6), (6, 30)),
        ({"optimizer_step_limit": 20}, iter([1]), (6, 20)),
        ({"debug": True}, range(1, 6), (2, 4)),
        ({"debug": True}, EpochCounter(5), (2, 4)),
        ({"debug": True, "debug_batches": 3, "grad_accumulation_factor": 2}, range(1, 6), (2, 4)),
        ({"debug": True, "debug_epochs": 0, "debug_batches": 100}, range(1, 6), (6, 30)),
        ({"debug": True, "debug_epochs": 3}, range(5), (2, 8)),  # epochs 0 to 3
    ],
)
def test_the_number_of_steps_is_known_where_a_scheduler_is_made(options, epochs, expected):
    brain = brain_with(None, **options)
    fit(brain, epochs)
    assert brain.known == (brain.steps_per_epoch, brain.total_steps) == expected
    if expected[1] is not None and not isinstance(epochs, type(iter([]))):
        assert brain.optimizer_step == expected[1]


def looped(number):
    return LoopedLoader(make_dataloader(DATA, batch_size=4), number)


@pytest.mark.parametrize(
    ("data", "kwargs", "expected"),
    [
        (DataLoader(DATA, batch_size=3), {}, (4, 8)),
        (DataLoader(DATA, batch_size=3, drop_last=True), {}, (4, 8)),
        (looped(5), {}, (3, 6)),
        (DATA, {"looped_nominal_epoch": 5}, (3, 6)),
        (Stream(), {}, (None, None)),
        (Stream(), {"looped_nominal_epoch": 5}, (3, 6)),
        (DATA, {"drop_last": True}, (3, 6)),
    ],
)
def test_the_number_of_steps_of_loaders_and_streams(data, kwargs, expected):
    brain = brain_with(None, grad_accumulation_factor=2)
    fit(brain, range(1, 3), data, **kwargs)
    assert brain.known == expected
    assert brain.optimizer_step == (expected[1] or 6)


def test_a_stream_with_a_limit_has_that_many_steps():
    brain = brain_with(
        lambda optimizer, total_steps: OneCycleLR(optimizer, 1.0, total_steps),
        optimizer_step_limit=9,
    )
    fit(brain, range(1, 100), Stream())
    assert brain.known == (None, 9)
    assert brain.rates == torch_rates(lambda one: OneCycleLR(one, 1.0, 9), 9)


def test_the_numbers_are_those_of_the_current_call_of_fit():
    brain = brain_with(None)
    assert (brain.steps_per_epoch, brain.total_steps) == (None, None)
    fit(brain, range(1, 4))
    assert (brain.steps_per_epoch, brain.total_steps, brain.optimizer_step) == (6, 18, 18)
    fit(brain, range(1, 3), points(9))
    assert (brain.steps_per_epoch, brain.total_steps, brain.optimizer_step) == (3, 6, 24)


# ----------------------------------------------------------------------------------- how it is made


def warm(optimizer, total_steps, warmup=0.5):
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (warmup * total_steps)))


CYCLE = partial(OneCycleLR, max_lr=0.5)


@pytest.mark.parametrize(
    ("scheduler_class", "same"),
    [
        (CYCLE, partial(CYCLE, total_steps=12)),
        (partial(CYCLE, total_steps=40), partial(CYCLE, total_steps=40)),
        (CosineAnnealingLR, partial(CosineAnnealingLR, T_max=12)),
        (partial(CosineAnnealingLR, T_max=5), partial(CosineAnnealingLR, T_max=5)),
        (partial(StepLR, step_size=2, gamma=0.5), partial(StepLR, step_size=2, gamma=0.5)),
        (warm, partial(warm, total_steps=12)),
        (partial(warm, warmup=1.0), partial(warm, total_steps=12, warmup=1.0)),
        (lambda optimizer, number: StepLR(optimizer, number // 4), partial(StepLR, step_size=3)),
    ],
    ids=[
        "total_steps",
        "total given",
        "T_max",
        "T_max given",
        "no number",
        "function",
        "partial",
        "lambda",
    ],
)
def test_a_scheduler_is_made_with_the_number_of_steps_and_stepped_after_each(scheduler_class, same):
    brain = brain_with(scheduler_class)
    fit(brain)
    assert brain.rates == torch_rates(same, 12)
    assert len(set(brain.rates)) > 3


@pytest.mark.parametrize(
    ("scheduler_class", "words"),
    [
        (OneCycleLR, r"scheduler_class \(OneCycleLR\) cannot make a scheduler.*max_lr.*!name:"),
        (
            ExponentialLR,
            r"scheduler_class \(ExponentialLR\) cannot make .*gamma.*beforehand",
        ),
        (
            lambda optimizer: None,
            r"cannot make a scheduler for 12 steps.*function \(optimizer, total_st",
        ),
        (lambda optimizer, total_steps: None, r"must return a scheduler, got a NoneType"),
        (ReduceLROnPlateau, r"use it with --scheduler_every=epoch"),
    ],
)
def test_a_scheduler_that_cannot_be_made_is_told(scheduler_class, words):
    with pytest.raises(ConfigError, match=words):
        fit(brain_with(scheduler_class))


@pytest.mark.parametrize(
    "scheduler_class",
    [CYCLE, CosineAnnealingLR, lambda optimizer, total: StepLR(optimizer, total // 3)],
)
def test_a_schedule_over_a_stream_that_needs_the_number_is_refused(scheduler_class):
    with pytest.raises(
        ConfigError,
        match=r"For a stream, whose number of steps is None, give "
        r"optimizer_step_limit",
    ):
        fit(brain_with(scheduler_class), train=Stream())


def test_a_schedule_over_a_stream_that_needs_no_number_is_made():
    given = []

    def halve(optimizer, total_steps):
        given.append(total_steps)
        return ExponentialLR(optimizer, 0.5)

    brain = brain_with(halve)
    fit(brain, train=Stream())
    assert given == [None]
    assert brain.rates == [0.1 * 0.5**step for step in range(12)]


@pytest.mark.parametrize("opt", [None, sgd()])
def test_a_scheduler_class_that_nothing_uses_is_refused(opt):
    class Own(Regression):
        def init_optimizers(self):
            if opt is not None:
                self.optimizers_dict = {"mine": opt(self.modules.parameters())}

    with pytest.raises(
        ConfigError,
        match=r"nothing has made a schedule of it: Own overrides "
        r"init_optimizers",
    ):
        fit(Own({"net": linear()}, None, None, QUIET, None, CosineAnnealingLR))


def test_the_name_in_the_checkpoint_is_not_taken_from_a_recipe(tmp_path):
    brain = brain_with(CosineAnnealingLR, tmp_path, counter=EpochCounter(2))
    brain.checkpointer.add_recoverable("scheduler", EpochCounter(3))
    with pytest.raises(
        ConfigError,
        match=r"'scheduler' is reserved for the schedule of .*; "
        r"rename your EpochCounter",
    ):
        fit(brain)


@pytest.mark.parametrize(
    ("options", "data", "words"),
    [
        ({}, DATA, "CosineAnnealingLR, after each step (of 12)"),
        ({"scheduler_every": "epoch"}, DATA, "CosineAnnealingLR, after each epoch (of 2)"),
        ({}, Stream(), "ExponentialLR, after each step (of an unknown number)"),
    ],
)
def test_the_block_at_the_start_names_the_schedule(options, data, words, caplog):
    caplog.set_level("INFO", logger="ddpkit")
    halving = partial(ExponentialLR, gamma=0.5)
    fit(brain_with(halving if data is not DATA else CosineAnnealingLR, **options), train=data)
    assert f"  schedule   {words}\n" in caplog.text


# ------------------------------------------------------------------------------------ when it steps


def test_a_scheduler_steps_once_per_optimizer_step_and_not_for_a_skipped_one():
    class Spoilt(Poisoned, Tracing):
        bad_steps = (3,)

    brain = Spoilt(
        {"net": linear()},
        sgd(),
        None,
        {**QUIET, "grad_accumulation_factor": 2},
        None,
        CYCLE,
    )
    fit(brain)
    expected = torch_rates(partial(CYCLE, total_steps=6), 4)
    assert brain.optimizer_step == 4
    assert brain.rates == [
        expected[0],
        expected[1],
        expected[1],
        expected[2],
        expected[3],
        expected[3],
    ]


def test_a_scheduler_steps_after_every_epoch_if_asked():
    brain = brain_with(CosineAnnealingLR, scheduler_every="epoch")
    fit(brain, range(1, 5))
    assert brain.rates == torch_rates(partial(CosineAnnealingLR, T_max=4), 24, every=6)
    assert len(set(brain.rates)) == 4


def test_the_epochs_of_a_schedule_end_with_the_limit_of_steps():
    brain = brain_with(CosineAnnealingLR, scheduler_every="epoch", optimizer_step_limit=14)
    fit(brain, range(1, 50))
    assert brain.rates == torch_rates(partial(CosineAnnealingLR, T_max=3), 14, every=6)


def test_reduce_on_plateau_follows_the_valid_loss():
    plateau = partial(ReduceLROnPlateau, factor=0.5, patience=0)
    brain = brain_with(plateau, scheduler_every="epoch", opt=sgd(lr=1e-9))
    fit(brain, range(1, 5), valid=VALID)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-9)
    scheduler = plateau(optimizer)
    expected = []
    for _, _, loss in (one for one in brain.losses if one[0] == "VALID"):
        expected += [optimizer.param_groups[0]["lr"]] * 6
        scheduler.step(loss)
    assert brain.rates == expected
    with pytest.raises(
        ConfigError,
        match="ReduceLROnPlateau follows the valid loss, and fit was given no valid_set",
    ):
        fit(brain_with(plateau, scheduler_every="epoch"))


def test_a_schedule_of_frozen_optimizers_waits(monkeypatch):
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    monkeypatch.setattr(
        Tracing,
        "freeze_optimizers",
        lambda self, optimizers: {"other": other} if self.step <= 3 else optimizers,
    )
    brain = brain_with(CosineAnnealingLR)
    fit(brain, [1])
    expected = torch_rates(partial(CosineAnnealingLR, T_max=6), 4)
    assert brain.rates == [*expected[:1] * 3, *expected[:3]]


def test_a_schedule_that_is_at_its_end_says_so():
    brain = brain_with(CYCLE)
    fit(brain)
    with pytest.raises(
        ConfigError,
        match=r"OneCycleLR was made for 12 steps and cannot go on: "
        r".*13",
    ):
        fit(brain)


def test_the_learning_rate_is_scaled_in_the_schedule_too():
    found = brain_with(CYCLE, lr_scaling="linear", reference_batch_size=2)
    fit(found)
    assert found.rates == [
        pytest.approx(2 * rate) for rate in torch_rates(partial(CYCLE, total_steps=12), 12)
    ]


# ----------------------------------------------------------------------------------------- resuming


def train(folder, scheduler_class, dies_at=None, opt=None, **options):
    counter = EpochCounter(3)
    opt = opt or (lambda parameters: torch.optim.Adam(parameters, lr=0.05))
    brain = brain_with(
        scheduler_class,
        folder,
        counter=counter,
        opt=opt,
        ckpt_interval_steps=2,
        **options,
    )
    brain.dies_at = dies_at
    try:
        fit(brain, counter, valid=VALID, shuffle=True)
    except Killed:
        return None
    return brain


KINDS = {
    "one cycle": (CYCLE, {}),
    "lambda": (warm, {}),
    "accumulated": (CosineAnnealingLR, {"grad_accumulation_factor": 2}),
    "every epoch": (CosineAnnealingLR, {"scheduler_every": "epoch"}),
    "plateau": (
        partial(ReduceLROnPlateau, factor=0.5, patience=0, threshold=0.5),
        {"scheduler_every": "epoch"},
    ),
    "scaled": (CYCLE, {"lr_scaling": "linear", "reference_batch_size": 2}),
}


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("dies_at", [(2, 1), (2, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_resumes_its_schedule_to_the_last_bit(kind, dies_at, tmp_path):
    scheduler_class, options = KINDS[kind]
    expected = train(tmp_path / "whole", scheduler_class, **options)
    assert len(set(expected.rates)) > 1
    assert train(tmp_path / "killed", scheduler_class, dies_at, **options) is None
    found = train(tmp_path / "killed", scheduler_class, **options)
    assert_same(weights(found), weights(expected))
    assert found.rates == expected.rates[-len(found.rates) :]
    assert found.known == expected.known
    assert found.optimizer.param_groups[0]["lr"] == expected.optimizer.param_groups[0]["lr"]


def in_two_parts(optimizer, total_steps):
    parts = [warm(optimizer, total_steps), CosineAnnealingLR(optimizer, total_steps)]
    return SequentialLR(optimizer, parts, [total_steps // 3])


def run_of(folder, scheduler_class, epochs, *, batch_size=4, dies_at=None, **options):
    """Train as a script does that is started again with the number of epochs that is given."""
    counter = EpochCounter(epochs)
    brain = brain_with(scheduler_class, folder, counter=counter, ckpt_interval_steps=1, **options)
    brain.dies_at = dies_at
    try:
        fit(brain, counter, valid=VALID, batch_size=batch_size)
    except Killed:
        assert dies_at is not None
    return brain


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "scheduler_class", "same"),
    [
        pytest.param("LambdaLR", warm, partial(warm, total_steps=12), marks=SLOW),
        pytest.param(
            "CosineAnnealingLR",
            CosineAnnealingLR,
            partial(CosineAnnealingLR, T_max=12),
            marks=SLOW,
        ),
        ("LambdaLR", partial(warm, warmup=1.0), partial(warm, total_steps=12, warmup=1.0)),
        pytest.param(
            "SequentialLR",
            in_two_parts,
            partial(in_two_parts, total_steps=12),
            marks=SLOW,
        ),
    ],
    ids=["function", "T_max", "partial", "sequential"],
)
def test_a_run_that_goes_on_for_longer_keeps_the_schedule_that_it_began_with(
    kind,
    scheduler_class,
    same,
    tmp_path,
    caplog,
):
    first = run_of(tmp_path, scheduler_class, 2)
    longer = run_of(tmp_path, scheduler_class, 4, dies_at=(4, 2))
    last = run_of(tmp_path, scheduler_class, 4)
    assert (first.total_steps, longer.total_steps, last.total_steps) == (12, 24, 24)
    assert first.rates + longer.rates + last.rates == pytest.approx(
        torch_rates(same, 24),
        rel=1e-12,
        abs=0,
    )
    words = (
        f"The schedule {kind} was made for 12 steps, and this run has 24 steps. It goes on as it "
        "was made."
    )
    assert sum(one.startswith(words) for one in caplog.messages) == 2
    assert "For a schedule of another length give --resume_with_new=schedule" in caplog.text


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    ("scheduler_class", "words"),
    [
        (CYCLE, r"^OneCycleLR was made for 12 steps and cannot go on: .*13"),
        (partial(CYCLE, total_steps=15), r"^OneCycleLR cannot go on: .*16"),
    ],
)
def test_a_schedule_that_is_at_its_end_in_a_longer_run_says_so(scheduler_class, words, tmp_path):
    run_of(tmp_path, scheduler_class, 2)
    with pytest.raises(ConfigError, match=words):
        run_of(tmp_path, scheduler_class, 3)


@pytest.mark.slow
def test_a_schedule_of_epochs_keeps_its_length_too(tmp_path, caplog):
    run_of(tmp_path, warm, 2, scheduler_every="epoch")
    brain = run_of(tmp_path, warm, 4, scheduler_every="epoch")
    assert brain.rates == torch_rates(partial(warm, total_steps=2), 24, every=6)[12:]
    assert "was made for 2 epochs, and this run has 4 epochs" in caplog.text


@pytest.mark.costly
def test_a_schedule_goes_on_in_the_unit_in_which_it_began(tmp_path, caplog):
    run_of(tmp_path, CosineAnnealingLR, 2, dies_at=(2, 1))
    brain = run_of(tmp_path, CosineAnnealingLR, 2, scheduler_every="epoch")
    assert brain.rates == torch_rates(partial(CosineAnnealingLR, T_max=12), 12)[6:]
    assert "was made for 12 steps, and this run has 2 epochs" in caplog.text


@pytest.mark.slow
def test_a_schedule_that_was_given_its_length_follows_nothing_else(tmp_path, caplog):
    given = partial(CosineAnnealingLR, T_max=9)
    run_of(tmp_path, given, 2)
    brain = run_of(tmp_path, given, 3)
    assert brain.rates == pytest.approx(torch_rates(given, 18)[12:], rel=1e-12)
    assert "It goes on as it was made" not in caplog.text
    run_of(tmp_path, partial(CosineAnnealingLR, T_max=20), 4)
    assert (
        "The schedule CosineAnnealingLR has other settings than those with which the checkpoint's "
        "run"
    ) in caplog.text
    assert "(T_max 9 -> 20), without effect" in caplog.text


def test_an_epoch_that_a_resumed_run_ends_without_a_step_steps_its_schedule(tmp_path):
    """Without torch's warning that the optimizer has not stepped before: it has, in another
    process.
    """

    class DiesInItsFirstValidation(Tracing):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage is Stage.VALID:
                raise Killed

    gamma = partial(ExponentialLR, gamma=0.5)
    options = {"scheduler_every": "epoch", "ckpt_interval_steps": 2}
    net = linear()
    for recipe in (DiesInItsFirstValidation, Tracing):
        checkpointer = Checkpointer(tmp_path, {"net": net, "counter": (counter := EpochCounter(2))})
        brain = recipe({"net": net}, sgd(), None, {**QUIET, **options}, checkpointer, gamma)
        with contextlib.suppress(Killed):
            brain.fit(counter, points(8), VALID, train_loader_kwargs={"batch_size": 4})
    assert brain.rates == [0.05, 0.05]
    assert brain.optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.costly
@pytest.mark.parametrize(
    ("before", "dies_at", "now", "total"),
    [
        # 12 of the 22 samples of epoch 2 are done: its first step is made once more
        (4, (2, 4), 8, 9 + 2 + 2 * 3),
        pytest.param(8, (2, 1), 4, 3 + 3 * 6, marks=SLOW),
        pytest.param(8, (2, 3), 4, 5 + 2 + 2 * 6, marks=SLOW),
    ],
)
def test_the_total_follows_from_the_steps_that_are_done_and_those_that_are_left(
    before,
    dies_at,
    now,
    total,
    tmp_path,
):
    run_of(tmp_path, None, 4, batch_size=before, dies_at=dies_at)
    again = run_of(tmp_path, None, 4, batch_size=now, dies_at=(3, 1))
    last = run_of(tmp_path, None, 4, batch_size=now)
    assert again.total_steps == last.total_steps == last.optimizer_step == total


@SLOW
def test_the_total_of_a_later_call_of_fit_does_not_count_the_steps_of_an_earlier_one(tmp_path):
    def script(batch_size, dies_at=None):
        first = EpochCounter(1)
        second = EpochCounter(3)
        brain = brain_with(None, tmp_path, counter=first, ckpt_interval_steps=1)
        brain.checkpointer.add_recoverable("second", second)
        fit(brain, first, valid=VALID, batch_size=batch_size)
        brain.dies_at = dies_at
        try:
            fit(brain, second, valid=VALID, batch_size=batch_size)
        except Killed:
            assert dies_at is not None
        return brain

    script(4, (2, 1))
    brain = script(8)
    assert (brain.total_steps, brain.optimizer_step) == (6 + 2 * 3, 6 + 6 + 2 * 3)


def test_a_checkpoint_without_the_schedule_is_refused(tmp_path):
    counter = EpochCounter(2)
    fit(brain_with(None, tmp_path, counter=counter), counter, valid=VALID)
    with pytest.raises(CheckpointError, match="has no file for the recoverable 'scheduler'"):
        train(tmp_path, CYCLE)
