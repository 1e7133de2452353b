"""A validation between two steps leaves the training as it was, and a run that is killed around it
ends as one that was not.
"""

from __future__ import annotations

import itertools
import signal
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from ddpkit import Part, Stage, parts
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError, RankFailedError, RunStopped
from ddpkit.metrics import Mean
from ddpkit.parts import ValidationSchedule
from tests.launching import Run, torchrun
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

DATA = points(12)
VALID = points(6, seed=9)


class Noisy(Regression):
    """Draws random numbers in each stage, and counts with one metric for all stages."""

    dies_in: tuple[str, int] | None = None  # what, and at which optimizer step
    saves = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sizes = Mean()
        self.validations = []
        self.told = []
        self.seen = 0

    def die_if(self, what):
        if self.dies_in == (what, self.optimizer_step):
            raise Killed

    def compute_forward(self, batch, stage):
        self.seen += len(batch[0])
        noise = torch.rand_like(batch[0]) * 0.1
        return self.modules.net(batch[0] + noise)

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        self.sizes.update(predictions.detach().abs())
        self.log("loss_too", loss.detach())
        if stage is Stage.VALID:
            self.die_if("batch")
        return loss

    def on_stage_start(self, stage, epoch=None):
        self.sizes.reset()
        self.seen = 0
        torch.rand(1)

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.die_if("step")

    def on_stage_end(self, stage, stage_loss, epoch=None):
        size = self.sizes.compute()
        self.told.append((stage.name, epoch, stage_loss, size, self.logged))
        if stage is Stage.VALID:
            self.validations.append((epoch, self.optimizer_step, self.seen, stage_loss))
            self.die_if("hook")
            if self.checkpointer is not None and self.saves:
                self.checkpointer.save_and_keep_only(num_to_keep=1)
            self.die_if("saved")


def net_with_norm():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1)
    ).double()


def brain_of(*parts, folder=None, net=None, cls=Noisy, epochs=2, **options):
    net = net or net_with_norm()
    counter = EpochCounter(epochs)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter}) if folder else None
    brain = cls(
        {"net": net},
        sgd(momentum=0.9),
        {},
        {**QUIET, "seed": 4, **options},
        checkpointer,
        parts=parts,
    )
    brain.counter = counter
    return brain


def fitted(brain, data=DATA, valid=VALID, size=2):
    torch.manual_seed(11)
    each = {"batch_size": size // (brain.run_opts.virtual_ranks or world_size())}
    try:
        brain.fit(brain.counter, data, valid, train_loader_kwargs=each, valid_loader_kwargs=each)
    except Killed:
        return None
    return brain


def of_training(brain):
    return [told for told in brain.told if told[0] == "TRAIN"]


VARIANTS = {
    "plain": {},
    "accumulated": {"grad_accumulation_factor": 2},
    "average": {"ema_decay": 0.9, "evaluate_ema": True},
    "virtual ranks": {"virtual_ranks": 2},
    "small batches": {"global_batch_size": 4, "micro_batch_size": 2},
    "measured": {"measure_steps": "all"},
}
SLOW = {"small batches", "measured"}


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=pytest.mark.slow) if v in SLOW else v for v in VARIANTS],
)
def test_the_training_is_what_it_is_without_the_validations(variant):
    options = VARIANTS[variant]
    without = fitted(brain_of(**options), valid=None, size=4)
    schedule = ValidationSchedule(every_steps=2, before_first=True, batches=2)
    brain = fitted(brain_of(schedule, **options), size=4)
    assert_same(weights(brain), weights(without))
    assert of_training(brain) == of_training(without)
    assert len(brain.validations) >= 3


def run_on_ranks(with_validations):
    parts = [ValidationSchedule(every_steps=2, every_epochs=1)] if with_validations else []
    brain = fitted(brain_of(*parts, shard_evaluation=True), valid=VALID if parts else None)
    return weights(brain), of_training(brain), [row[:2] for row in brain.validations]


@pytest.mark.costly
def test_the_training_of_two_ranks_is_what_it_is_without_the_validations(ranks):
    without = ranks.run(run_on_ranks, False, world_size=2)
    found = ranks.run(run_on_ranks, True, world_size=2)
    for (own, told, steps), (expected, expected_told, _) in zip(found, without, strict=True):
        assert_same(own, expected)
        assert told == expected_told
        assert steps == [(1, 2), (1, 4), (1, 6), (2, 8), (2, 10), (2, 12)]


def losses_of_validations():
    net = linear()
    schedule = ValidationSchedule(every_steps=2, batches=2)
    brain = brain_of(schedule, net=net, cls=Plain, shard_evaluation=True)
    return [(row[:2], row[3]) for row in fitted(brain).validations]


class Plain(Noisy):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])


@pytest.mark.costly
def test_two_ranks_find_the_losses_of_one(ranks):
    expected = losses_of_validations()
    assert [where for where, _ in expected] == [(1, 2), (1, 4), (1, 6), (2, 8), (2, 10), (2, 12)]
    for found in ranks.run(losses_of_validations, world_size=2):
        assert [where for where, _ in found] == [where for where, _ in expected]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected])


# ------------------------------------------------------------------------------------ when it comes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"every_steps": 4}, [(1, 4), (2, 8), (2, 12)]),
        ({"every_steps": 5, "every_epochs": 1}, [(1, 5), (1, 6), (2, 10), (2, 12)]),
        ({"every_epochs": 2}, [(2, 12)]),
        ({"before_first": True}, [(1, 0), (1, 6), (2, 12)]),
        ({"every_steps": 100}, []),
    ],
)
def test_validations_come_when_they_are_asked_for(arguments, expected):
    brain = fitted(brain_of(ValidationSchedule(**arguments)))
    assert [row[:2] for row in brain.validations] == expected


def test_a_validation_on_some_batches_takes_the_first_and_the_one_of_an_epoch_all():
    schedule = ValidationSchedule(every_steps=4, every_epochs=1, batches=2)
    brain = fitted(brain_of(schedule))
    assert [row[1:3] for row in brain.validations] == [(4, 4), (6, 6), (8, 4), (12, 6)]


class Numbers(IterableDataset):
    """A stream of pairs."""

    def __iter__(self):
        return iter(DATA)


def of_stream():
    brain = fitted(brain_of(ValidationSchedule(every_steps=3), net=linear()), data=Numbers())
    stages = [told[0] for told in brain.told]
    return [row[:2] for row in brain.validations], stages, weights(brain)


@pytest.mark.costly
def test_the_last_step_of_a_stream_has_one_validation_after_the_epoch(ranks):
    steps, stages, expected = of_stream()
    assert steps == [(1, 3), (1, 6), (2, 9), (2, 12)]
    assert stages == ["VALID", "TRAIN", "VALID"] * 2
    for found in ranks.run(of_stream, world_size=2):
        assert found[:2] == (steps, stages)
    without = fitted(brain_of(net=linear()), data=Numbers(), valid=None)
    assert_same(expected, weights(without))


class OwnValidation(Noisy):
    """Validates in a way of its own."""

    def _fit_valid(self, valid_set, epoch, enable):
        self.modules.eval()
        with torch.no_grad():
            for batch in valid_set or ():
                self.step += 1
                self.evaluate_batch(batch, Stage.VALID)
        self.step = 0
        self.validations.append((epoch, self.optimizer_step))


def test_a_validation_of_the_recipes_own_comes_at_the_same_steps():
    brain = fitted(brain_of(ValidationSchedule(every_steps=4), cls=OwnValidation))
    assert brain.validations == [(1, 4), (2, 8), (2, 12)]
    assert_same(weights(brain), weights(fitted(brain_of(), valid=None)))


class Terminated(Noisy):
    """The last rank gets the signal to end in a validation at an optimizer step."""

    at: int | None = None

    def compute_objectives(self, predictions, batch, stage):
        is_last = self.rank == world_size() - 1
        if stage is Stage.VALID and is_last and self.optimizer_step == self.at:
            signal.raise_signal(signal.SIGTERM)
        return super().compute_objectives(predictions, batch, stage)


def terminated(folder, at=None):
    brain = brain_of(ValidationSchedule(every_steps=2), cls=Terminated, folder=folder)
    brain.at = at
    try:
        fitted(brain)
    except RunStopped as stopped:
        return stopped.code
    return brain.validations, weights(brain)


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_in_a_validation_makes_it_again_and_goes_on(ranks, tmp_path, at):
    expected = ranks.run(terminated, tmp_path / "whole", world_size=2)
    assert ranks.run(terminated, tmp_path / "stopped", at, world_size=2) == [143, 143]
    resumed = ranks.run(terminated, tmp_path / "stopped", world_size=2)
    for (steps, own), (all_steps, whole) in zip(resumed, expected, strict=True):
        assert steps == all_steps[at // 2 - 1 :]
        assert_same(own, whole)


class AskedFor(Part):
    """Asks for a validation at given steps; notes when it was asked."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    def is_validation_due(self, brain, moment):
        self.asked.append((moment, brain.optimizer_step))
        return self.answers.get((moment, brain.optimizer_step))


def test_the_largest_answer_of_the_parts_counts():
    one = AskedFor({("step", 2): 1, ("step", 3): False, ("epoch", 6): False})
    two = AskedFor({("step", 2): 2, ("epoch", 6): None})
    two.name = "two"
    brain = fitted(brain_of(one, two, epochs=1))
    assert [row[1:3] for row in brain.validations] == [(2, 4)]
    assert one.asked == two.asked
    assert one.asked[0] == ("start", 0)
    assert one.asked[-2:] == [("epoch", 6), ("step", 6)]


@pytest.mark.parametrize("answer", ["yes", 1.5, -1])
def test_an_answer_that_is_none_is_named(answer):
    with pytest.raises(ConfigError, match=r"AskedFor\.is_validation_due returned"):
        fitted(brain_of(AskedFor({("step", 2): answer})))


def failed_inside():
    brain = brain_of(ValidationSchedule(every_steps=2))
    brain.dies_in = ("batch" if brain.rank else "step", 2 + 9 * (not brain.rank))
    try:
        fitted(brain)
    except RankFailedError as error:
        return str(error)
    return brain.progress.is_between_steps


@pytest.mark.costly
def test_a_failure_inside_of_a_validation_is_told_where_it_was(ranks):
    first, second = ranks.run(failed_inside, world_size=2)
    assert "rank 1" in first
    assert "in VALID of epoch 1 at step 1" in first
    assert second is False


class AskedOnOneRank(Part):
    def is_validation_due(self, brain, moment):
        return brain.rank + 1 if (moment, brain.optimizer_step) == ("step", 2) else None


def asked_differently():
    with pytest.raises((ConfigError, RankFailedError)) as caught:
        fitted(brain_of(AskedOnOneRank()))
    return str(caught.value)


@pytest.mark.costly
def test_ranks_that_answer_differently_are_told(ranks):
    for words in ranks.run(asked_differently, world_size=2):
        assert "is_validation_due was answered differently" in words


REFUSED = """
    import ddpkit
    from tests.recipes import Regression, linear, points, sgd

    class RefusedOnOneRank(ddpkit.Part):
        def is_validation_due(self, brain, moment):
            return brain.rank == 0 if (moment, brain.optimizer_step) == ("step", 2) else None

    options = {"device": "cpu", "noprogressbar": True}
    ddpkit.ddp_init_group(options)
    parts = [RefusedOnOneRank()]
    brain = Regression({"net": linear()}, sgd(), run_opts=options, parts=parts)
    brain.fit([1], points(8), points(4))
"""


@pytest.mark.slow
@pytest.mark.launch
def test_a_rank_that_alone_says_no_is_found_as_it_trains_on(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(REFUSED))
    ended = Run([*torchrun(2), "train.py"], tmp_path, warm=True).wait()
    assert ended.code != 0
    assert "was answered differently on two ranks, at optimizer step 2" in ended.tail()
    assert "and rank 1 trains on without it" in ended.tail()


# ------------------------------------------------------------------------------------ kill, resume


def killed_and_resumed(folder, dies_in, **options):
    first, second = (
        brain_of(
            ValidationSchedule(every_steps=2, before_first=True, batches=2),
            folder=folder,
            **options,
        )
        for _ in range(2)
    )
    first.dies_in = dies_in
    assert fitted(first) is None
    return first, fitted(second)


KILLS = {
    "in the first of all": ("batch", 0),
    "after its save": ("saved", 0),
    "in one between two steps": ("batch", 4),
    "in its hook": ("hook", 4),
    "after the save of one between two steps": ("saved", 4),
    "in a step after it": ("step", 5),
    "in the one of an epoch": ("batch", 6),
    "after that one": ("saved", 6),
    "in the second epoch": ("saved", 10),
}
EVERY_STEP = {"ckpt_interval_steps": 1}
FAST_KILLS = {
    ("after its save", "own saves"),
    ("after the save of one between two steps", "own saves"),
    ("in one between two steps", "saves of each step"),
}


SAVES = {"own saves": {}, "saves of each step": EVERY_STEP}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kill", "saves"),
    [
        pytest.param(*both, marks=[] if both in FAST_KILLS else pytest.mark.slow)
        for both in itertools.product(KILLS, SAVES)
    ],
)
def test_a_killed_run_ends_as_one_that_was_not_and_repeats_no_validation_that_was_saved(
    tmp_path, kill, saves
):
    options = SAVES[saves]
    what, step = dies_in = KILLS[kill]
    schedule = ValidationSchedule(every_steps=2, before_first=True, batches=2)
    whole = fitted(brain_of(schedule, folder=tmp_path / "whole", **options))
    first, second = killed_and_resumed(tmp_path / "killed", dies_in, **options)
    assert_same(weights(second), weights(whole))
    assert second.told[-1] == whole.told[-1]
    assert of_training(second)[-1] == of_training(whole)[-1]
    by_step = {row[1]: row for row in whole.validations}
    for row in [*first.validations, *second.validations]:
        assert row == by_step[row[1]]
    again = [row[1] for row in second.validations]
    assert again == [at for at in by_step if at >= again[0]]
    if what == "saved":
        assert again[0] > step
    if options and what in {"batch", "hook"} and step % 6:
        assert again[0] == step  # the save of the step came before


def killed_on_ranks(folder, dies_in):
    schedule = ValidationSchedule(every_steps=2)
    brain = brain_of(schedule, folder=folder, virtual_ranks=2, net=linear(), **EVERY_STEP)
    brain.dies_in = dies_in
    found = fitted(brain)
    return None if found is None else (weights(brain), [row[1] for row in brain.validations])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2, 1),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_inside_a_validation_with_another_number_of_ranks(
    ranks, tmp_path, before, after
):
    ((expected, _),) = ranks.run(killed_on_ranks, tmp_path / "whole", None, world_size=1)
    killed = ranks.run(killed_on_ranks, tmp_path / "killed", ("batch", 4), world_size=before)
    assert killed == [None] * before
    for found, steps in ranks.run(killed_on_ranks, tmp_path / "killed", None, world_size=after):
        assert_same(found, expected)
        assert steps == [4, 6, 8, 10, 12]


# --------------------------------------------------------------------------- stopping, plateaus


class Scored(Noisy):
    """Logs as its score how often it has been validated."""

    def compute_objectives(self, predictions, batch, stage):
        if stage is Stage.VALID:
            self.log("score", min(len(self.validations), 2))
        return super().compute_objectives(predictions, batch, stage)


def stopped_early(folder=None, patience=2):
    stopper = parts.EarlyStopping("score", mode="max", patience=patience)
    brain = brain_of(
        ValidationSchedule(every_steps=2), stopper, folder=folder, cls=Scored, epochs=4
    )
    torch.manual_seed(11)
    each = {"batch_size": 2 // world_size()}
    result = brain.fit(
        brain.counter, DATA, VALID, train_loader_kwargs=each, valid_loader_kwargs=each
    )
    return result.reason, result.optimizer_steps, [row[1] for row in brain.validations]


@pytest.mark.costly
def test_early_stopping_counts_validations_and_ends_the_epoch_where_it_is(ranks):
    # the third validation is the best, and two more are no better
    expected = ("early_stop", 10, [2, 4, 6, 8, 10])
    assert stopped_early() == expected
    assert ranks.run(stopped_early, world_size=2) == [expected] * 2


@pytest.mark.slow
def test_a_run_that_was_stopped_between_two_steps_goes_on_there_with_more_patience(tmp_path):
    assert stopped_early(tmp_path)[:2] == ("early_stop", 10)
    assert stopped_early(tmp_path)[:2] == ("early_stop", 10)
    assert stopped_early(tmp_path, patience=20) == ("epochs", 24, [*range(12, 26, 2)])


def rates(every, **schedule):
    def plateau(optimizer, total):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    def by_epoch(optimizer, total):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    brain = Regression(
        {"net": linear()},
        sgd(lr=0.0),
        {},
        {**QUIET, "scheduler_every": "epoch"},
        scheduler_class=plateau if every == "plateau" else by_epoch,
        parts=[ValidationSchedule(**schedule)],
    )
    brain.optimizer_rates = []
    brain.on_fit_batch_end = lambda *_: brain.optimizer_rates.append(
        brain.optimizer.param_groups[0]["lr"]
    )
    each = {"batch_size": 2}
    brain.fit(range(1, 3), DATA, VALID, train_loader_kwargs=each)
    return brain


def test_a_plateau_is_looked_for_in_each_validation_and_other_schedules_step_by_the_epoch():
    plateau = rates("plateau", every_steps=2)
    assert plateau.modules is not None
    # six validations, of which the first is the best: nothing is learnt at a rate of 0
    state = vars(plateau)["_Brain__run"].train_step.schedule
    assert state.scheduler.last_epoch == 6
    by_epoch = rates("epoch", every_steps=2)
    assert vars(by_epoch)["_Brain__run"].train_step.schedule.scheduler.last_epoch == 2


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "was not told when"),
        ({"every_steps": 0}, "every_steps=0 must be a whole number >= 1"),
        ({"every_steps": 1.5}, "every_steps=1.5"),
        ({"every_epochs": True}, "every_epochs=True"),
        ({"before_first": 3}, "before_first=3 must be True or False"),
        ({"every_epochs": 2, "batches": 3}, "batches=3 has no effect"),
        ({"every_steps": 2, "batches": 0}, "batches=0"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        ValidationSchedule(**arguments)


def test_a_schedule_without_data_to_validate_on_is_refused():
    with pytest.raises(ConfigError, match="ValidationSchedule says when to validate, and fit"):
        fitted(brain_of(ValidationSchedule(every_steps=2)), valid=None)


# ---------------------------------------------------------------------- the loss of the training


class Reporting(Regression):
    """Notes the loss of the training that a validation's hook reports."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reported = {}

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.reported[stage.name, self.optimizer_step] = self.avg_train_loss


def losses_reported(batch_size):
    brain = Reporting(
        {"net": linear()}, sgd(0.0), None, QUIET, parts=[ValidationSchedule(every_steps=2)]
    )
    kwargs = {"batch_size": batch_size}
    brain.fit([1, 2], DATA, VALID, None, kwargs, kwargs)
    return brain.reported


@pytest.mark.costly
def test_hooks_of_a_validation_have_the_loss_of_the_training_so_far(ranks):
    reported = losses_reported(4)
    assert [*reported] == [("VALID", 2), ("TRAIN", 3), ("VALID", 4), ("TRAIN", 6), ("VALID", 6)]
    assert reported["VALID", 6] == reported["TRAIN", 6]
    assert 0.0 < reported["VALID", 2] != reported["VALID", 4] > 0.0
    for own in ranks.run(losses_reported, 2, world_size=2):
        assert own == pytest.approx(reported, rel=1e-6)
