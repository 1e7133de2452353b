"""A part of a user hears each event, on each rank, in its order; what it knows is saved, and a
failure of it is told by its name.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from ddpkit import Brain, Part, Stage
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError, RankFailedError
from ddpkit.parts.events import PartEvents
from tests.recipes import (
    QUIET,
    Killed,
    OwnFitBatch,
    Regression,
    SavesAfterValidation,
    Sums,
    assert_same,
    linear,
    points,
    sgd,
    weights,
    world_size,
)

DATA = points(8)
VALID = points(3, seed=6)


class Listener(Part):
    """Notes what it hears."""

    def __init__(self, name="Listener", told=None):
        self.name = name
        self.told = [] if told is None else told

    def note(self, *words):
        self.told.append(" ".join(map(str, (self.name, *words))))

    def check(self, brain):
        self.note("check")

    @contextlib.contextmanager
    def around_fit(self, brain):
        self.note("around_fit enters")
        yield
        self.note("around_fit leaves")

    def on_sizes_known(self, brain, sizes):
        self.note("on_sizes_known", sizes.per_step, brain.total_steps)

    def on_optimizers_made(self, brain, optimizers):
        self.note("on_optimizers_made", *optimizers)

    def on_fit_start(self, brain):
        self.note("on_fit_start", brain.optimizer is not None)

    def on_stage_start(self, brain, stage, epoch):
        self.note("on_stage_start", stage.name, epoch, brain.modules.training)

    def wrap_batches(self, brain, batches, stage):
        self.note("wrap_batches", stage.name)
        yield from batches

    def on_gradients(self, brain):
        self.note("on_gradients", brain.optimizer_step)

    def on_step_counted(self, brain):
        self.note("on_step_counted", brain.optimizer_step)

    def after_step(self, brain):
        self.note("after_step", brain.optimizer_step)

    def on_sync(self, brain):
        self.note("on_sync", brain.step)

    def on_stage_end(self, brain, stage, stage_loss, epoch):
        self.note("on_stage_end", stage.name, epoch)

    def on_fit_end(self, brain, result):
        self.note("on_fit_end", result.reason)


class Recipe(Regression):
    told: list[str]

    def on_stage_start(self, stage, epoch=None):
        self.told.append(f"recipe on_stage_start {stage.name}")

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        self.told.append(f"recipe on_stage_end {stage.name}")


def brain_with(*parts, cls=Regression, folder=None, **options):
    net = linear()
    checkpointer = None if folder is None else Checkpointer(folder, {"net": net})
    run_opts = {**QUIET, **options}
    return cls({"net": net}, sgd(), {}, run_opts, checkpointer, parts=parts)


def heard_in_a_run():
    told = []
    brain = brain_with(Listener("a", told), Listener("b", told), cls=Recipe)
    brain.told = told
    batch = {"batch_size": 4 // world_size()}
    brain.fit([1], DATA, VALID, train_loader_kwargs=batch)
    brain.evaluate(VALID)
    return [line for line in told if "on_sync" not in line]


def test_events_come_in_the_order_of_the_docs():
    told = heard_in_a_run()
    assert [line for line in told if not line.startswith("b ")] == [
        "a check",
        "a around_fit enters",
        "a on_sizes_known 4 2",
        "a on_optimizers_made opt_class",
        "a on_fit_start True",
        "recipe on_stage_start TRAIN",
        "a on_stage_start TRAIN 1 True",
        "a wrap_batches TRAIN",
        "a on_gradients 0",
        "a after_step 1",
        "a on_step_counted 1",
        "a on_gradients 1",
        "a after_step 2",
        "a on_step_counted 2",
        "a on_stage_end TRAIN 1",
        "recipe on_stage_end TRAIN",
        "recipe on_stage_start VALID",
        "a on_stage_start VALID 1 False",
        "a wrap_batches VALID",
        "a on_stage_end VALID 1",
        "recipe on_stage_end VALID",
        "a on_fit_end epochs",
        "a around_fit leaves",
        "a check",
        "recipe on_stage_start TEST",
        "a on_stage_start TEST None False",
        "a wrap_batches TEST",
        "a on_stage_end TEST None",
        "recipe on_stage_end TEST",
    ]
    # what a hears, b hears right after it; generators of batches and contexts are outside of others
    nested = "recipe", "a wrap", "b wrap", "a around", "b around"
    of_parts = [line for line in told if not line.startswith(nested)]
    assert [line[2:] for line in of_parts[::2]] == [line[2:] for line in of_parts[1::2]]
    assert {line[0] for line in of_parts[::2]} == {"a"}


@pytest.mark.costly
def test_every_rank_hears_the_same(ranks):
    assert ranks.run(heard_in_a_run, world_size=2) == [heard_in_a_run()] * 2


def synced():
    part = Listener()
    brain_with(part).fit([1, 2], DATA, train_loader_kwargs={"batch_size": 4 // world_size()})
    return [line for line in part.told if "on_sync" in line]


@pytest.mark.costly
def test_a_sync_is_heard_at_the_same_step_on_every_rank(ranks):
    first, second = ranks.run(synced, world_size=2)
    assert first == second != []


# ------------------------------------------------------------------------------------- gradients


class Halved(Part):
    """Halves gradients; notes the norm that it has found."""

    def __init__(self):
        self.norms = []

    def on_gradients(self, brain):
        gradients = [parameter.grad for parameter in brain.modules.parameters()]
        self.norms.append(float(nn.utils.get_total_norm(gradients)))
        torch._foreach_mul_(gradients, 0.5)


class OwnStep(Regression):
    """Changes gradients in its own ``optimizers_step``, too: before the parts."""

    def optimizers_step(self):
        for parameter in self.modules.parameters():
            parameter.grad.mul_(2.0)
        super().optimizers_step()


RECIPES = {"mean": Regression, "sum": Sums, "own fit_batch": OwnFitBatch, "own step": OwnStep}


def halved(kind, factor=1):
    part = Halved()
    brain = brain_with(part, cls=RECIPES[kind], max_grad_norm=0.0, grad_accumulation_factor=factor)
    size = 4 // world_size() // factor
    brain.fit([1, 2], DATA, train_loader_kwargs={"batch_size": size})
    return part.norms, weights(brain)


@pytest.mark.costly
@pytest.mark.parametrize("kind", RECIPES)
def test_gradients_are_final_and_what_a_part_makes_of_them_is_stepped_on(ranks, kind):
    norms, found = halved(kind)
    plain = linear()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        for batch in (DATA[:4], DATA[4:]):
            inputs, targets = (torch.stack(column) for column in zip(*batch, strict=True))
            optimizer.zero_grad()
            nn.functional.mse_loss(plain(inputs), targets).backward()
            gradients = [parameter.grad for parameter in plain.parameters()]
            if kind == "own step":
                torch._foreach_mul_(gradients, 2.0)
            expected.append(float(nn.utils.get_total_norm(gradients)))
            torch._foreach_mul_(gradients, 0.5)
            optimizer.step()
    assert norms == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(found["net.weight"], plain.weight.detach(), rtol=0, atol=1e-12)
    for its_norms, its_weights in ranks.run(halved, kind, 2, world_size=2):
        assert its_norms == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(its_weights, found, rtol=0, atol=1e-12)


class Poison(Part):
    """Makes the gradients of one step infinite."""

    def on_gradients(self, brain):
        if brain.step == 1:
            next(brain.modules.parameters()).grad.fill_(float("inf"))


def test_a_skipped_step_is_not_heard_as_a_step():
    listener = Listener()
    brain = brain_with(Poison(), listener)
    brain.fit([1], DATA, train_loader_kwargs={"batch_size": 2})
    assert brain.nonfinite_count == 1
    assert [line for line in listener.told if "after_step" in line] == [
        f"Listener after_step {number}" for number in (1, 2, 3)
    ]
    assert sum("on_gradients" in line for line in listener.told) == 4


# ----------------------------------------------------------------------------------- saved state


class Counter(Part):
    """Counts steps and stages, and adds its count to the weights: what it knows is in them."""

    def __init__(self):
        self.steps = 0
        self.stages = 0

    def after_step(self, brain):
        self.steps += 1
        with torch.no_grad():
            brain.raw_modules["net"].bias.add_(self.steps + 10 * self.stages)

    def on_stage_end(self, brain, stage, stage_loss, epoch):
        self.stages += 1

    def state_dict(self):
        return {"steps": self.steps, "stages": self.stages}

    def load_state_dict(self, state):
        self.steps = state["steps"]
        self.stages = state["stages"]


class Saving(SavesAfterValidation):
    dies_at: int | None = None

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.optimizer_step == self.dies_at:
            raise Killed


def counted(folder, dies_at=None, interval=1):
    part = Counter()
    brain = brain_with(
        part, cls=Saving, folder=folder, ckpt_interval_steps=interval, virtual_ranks=2
    )
    counter = EpochCounter(3)
    brain.checkpointer.add_recoverable("counter", counter)
    brain.dies_at = dies_at
    try:
        brain.fit(counter, DATA, VALID, train_loader_kwargs={"batch_size": 1})
    except Killed:
        return None
    return part.steps, part.stages, weights(brain)


@pytest.mark.costly
@pytest.mark.parametrize("dies_at", [2, 5, 9])
def test_a_part_goes_on_where_the_run_does(tmp_path, dies_at):
    expected = counted(tmp_path / "whole")
    assert expected[:2] == (12, 6)
    counted(tmp_path / "killed", dies_at)
    found = counted(tmp_path / "killed")
    assert found[:2] == expected[:2]
    assert_same(found[2], expected[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1, 2),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_a_part_goes_on_with_another_number_of_ranks(ranks, tmp_path, before, after):
    expected = counted(tmp_path / "whole")
    assert ranks.run(counted, tmp_path / "killed", 5, world_size=before) == [None] * before
    for found in ranks.run(counted, tmp_path / "killed", world_size=after):
        assert found[:2] == expected[:2]
        assert_same(found[2], expected[2])


def test_a_checkpoint_of_a_run_without_the_part_can_be_gone_on_from(tmp_path):
    brain = brain_with(cls=Saving, folder=tmp_path)
    brain.fit([1], DATA, VALID)
    part = Counter()
    brain = brain_with(part, cls=Saving, folder=tmp_path)
    brain.fit([2], DATA, VALID)
    assert (part.steps, part.stages) == (8, 2)


# ------------------------------------------------------------------------------------- refusals


class NeedsCounter(Part):
    needs = (Counter,)


class Forgets(Part):
    def state_dict(self):
        return {"steps": 1}


REFUSED = {
    "saved and not loaded": ([Forgets()], "Forgets has one of state_dict and load_state_dict"),
    "no part": (["verb"], "'verb' is no part"),
    "a class": ([Counter], "parts: Counter is a class"),
    "two of one name": ([Counter(), Counter()], "the name 'Counter'"),
    "needed and missing": ([NeedsCounter()], "NeedsCounter needs Counter before it"),
    "needed and later": ([NeedsCounter(), Counter()], "before it in the list"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_list_of_parts_is_refused(kind):
    parts, words = REFUSED[kind]
    with pytest.raises(ConfigError, match=words):
        brain_with(*parts)


def test_one_part_that_is_no_list_is_refused():
    with pytest.raises(ConfigError, match="is no list"):
        Brain({"net": linear()}, sgd(), run_opts=QUIET, parts=Counter())


def test_parts_of_the_yaml_come_first_and_a_key_of_another_kind_is_the_recipes_own():
    told = []
    hparams = {"parts": [Listener("yaml", told)]}
    brain = Regression({"net": linear()}, sgd(), hparams, QUIET, parts=[Listener("own", told)])
    brain.fit([1], DATA[:1])
    assert told[:2] == ["yaml check", "own check"]
    Regression({"net": linear()}, sgd(), {"parts": ["verb", "noun"]}, QUIET).fit([1], DATA[:1])
    with pytest.raises(ConfigError, match="'verb' is no part"):
        Regression({"net": linear()}, sgd(), {"parts": [Counter(), "verb"]}, QUIET)


class Refusing(Part):
    def check(self, brain):
        raise ConfigError("needs more than this")


def test_what_a_part_refuses_is_refused_before_the_run():
    brain = brain_with(Refusing())
    with pytest.raises(ConfigError, match="needs more than this"):
        brain.fit([1], DATA)
    with pytest.raises(ConfigError, match="needs more than this"):
        brain.evaluate(DATA)
    with pytest.raises(ConfigError, match="needs more than this"):
        brain.predict(DATA)
    assert not brain.trained_on


class Nothing(Part):
    def wrap_batches(self, brain, batches, stage):
        return None


def test_a_part_that_returns_no_batches_is_named():
    with pytest.raises(ConfigError, match=r"Nothing\.wrap_batches returned None"):
        brain_with(Nothing()).fit([1], DATA)


class BreaksBatches(Part):
    """Raises an error of its own in the second batch of a stage."""

    def __init__(self, stage):
        self.stage = stage

    def wrap_batches(self, brain, batches, stage):
        for number, batch in enumerate(batches):
            if stage is self.stage and number:
                raise ValueError("boom")
            yield batch


class PassesOn(Part):
    def wrap_batches(self, brain, batches, stage):
        yield from batches


class After(PassesOn):
    pass


@pytest.mark.parametrize("stage", [Stage.TRAIN, Stage.VALID])
def test_a_part_whose_batches_fail_is_named_and_not_the_one_that_they_go_through(stage):
    with pytest.raises(ValueError, match="boom") as caught:
        brain_with(PassesOn(), BreaksBatches(stage), After()).fit([1], DATA, VALID)
    assert "BreaksBatches.wrap_batches" in "".join(caught.value.__notes__)
    assert "PassesOn" not in "".join(caught.value.__notes__)
    assert "After" not in "".join(caught.value.__notes__)


class Broken(list):
    def __getitem__(self, number):
        if number:
            raise ValueError("data")
        return super().__getitem__(number)


def test_an_error_of_the_data_has_no_name_of_a_part():
    with pytest.raises(ValueError, match="data") as caught:
        brain_with(PassesOn()).fit([1], Broken(DATA))
    assert "PassesOn" not in "".join(getattr(caught.value, "__notes__", ()))


class Fails(Part):
    def __init__(self, event, rank):
        self.event = event
        self.rank = rank
        setattr(self, event, self.fail)

    def fail(self, brain, *_):
        if self.rank in {None, brain.rank}:
            raise ValueError("boom")
        return contextlib.nullcontext()  # as around_fit does; of other events it is not looked at


def failing(event, rank):
    with pytest.raises((ValueError, RankFailedError)) as caught:
        brain_with(Fails(event, rank)).fit([1], DATA, VALID)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.costly
@pytest.mark.parametrize(
    "event",
    [
        "on_fit_start",
        "after_step",
        "on_stage_end",
        *(
            pytest.param(event, marks=pytest.mark.slow)
            for event in (
                "around_fit",
                "on_sizes_known",
                "on_optimizers_made",
                "on_step_counted",
            )
        ),
    ],
)
def test_a_part_that_fails_on_one_rank_ends_all_and_is_named(ranks, event):
    first, second = ranks.run(failing, event, 1, world_size=2)
    assert second == ("ValueError", "boom")
    assert first[0] == "RankFailedError"
    assert f"in Fails.{event}" in first[1]
    assert "boom" in first[1]


def different():
    parts = [Counter()] if torch.distributed.get_rank() else []
    with pytest.raises(Exception, match="parts") as caught:
        brain_with(*parts).fit([1], DATA)
    return type(caught.value).__name__


def test_other_parts_on_another_rank_are_refused(ranks):
    assert ranks.run(different, world_size=2) == ["RankMismatchError"] * 2


# ------------------------------------------------------------------------------- the end of a run


class StopsAt(Part):
    def __init__(self, epoch, rank=None):
        self.epoch = epoch
        self.rank = rank

    def on_stage_start(self, brain, stage, epoch):
        if epoch == self.epoch and self.rank in {None, brain.rank}:
            brain.stop_training("enough")


def stopped(rank=None):
    brain = brain_with(StopsAt(2, rank))
    return brain.fit(range(1, 5), DATA, VALID).reason, [line[:2] for line in brain.losses]


@pytest.mark.costly
def test_a_training_is_stopped_after_the_epoch_and_its_validation(ranks):
    expected = (
        "early_stop",
        [(stage, epoch) for epoch in (1, 2) for stage in ("TRAIN", "VALID")],
    )
    assert stopped() == expected
    assert ranks.run(stopped, world_size=2) == [expected] * 2


@pytest.mark.costly
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_stop_where_one_has_asked(ranks, rank):
    assert [found[0] for found in ranks.run(stopped, rank, world_size=2)] == ["early_stop"] * 2


def test_nothing_is_stopped_outside_of_fit():
    with pytest.raises(ConfigError, match="outside of fit"):
        brain_with().stop_training("enough")


class Listed(Part):
    """Returns rows in a list."""

    def start_rows(self, brain):
        return [("listed", "in a list")]


def test_rows_that_are_no_dict_are_refused_with_an_example():
    with pytest.raises(ConfigError, match="Listed.start_rows returned .* Return a dict"):
        PartEvents([Listed()]).rows(None)
