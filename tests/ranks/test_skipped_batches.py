"""Batches for which ``compute_objectives`` returns None count as batches without samples, on any
number of processes.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch

from ddpkit.errors import BatchError
from tests.cells import some_of
from tests.ranks.test_losses_without_graph import (
    ALL,
    OneEntry,
    Sparse,
    assert_equals_one_process,
    data,
    train,
)
from tests.recipes import Killed, make, points


class Skipping(Sparse):
    """Skips batches without a target; the others have a sum and a count."""

    def compute_objectives(self, predictions, batch, stage):
        squares = self.squares(predictions, batch)
        return None if squares is None else (squares, self.has_target(batch).sum())


class SkippingUncalled(OneEntry, Skipping):
    """Its batches without a target do not call the module."""


class Means(Sparse):
    """Returns means, and None for a batch without a target."""

    def compute_objectives(self, predictions, batch, stage):
        squares = self.squares(predictions, batch)
        return None if squares is None else squares / len(batch[1])


def shown(value):
    return getattr(value, "__name__", None) or str(value)


# ---------------------------------------------------------------------- the same weights


@pytest.mark.costly
def test_two_processes_train_as_one_with_rank_0_skipping_the_first_batch(ranks):
    assert_equals_one_process(ranks, Skipping, 2, {}, per_step=4)


@pytest.mark.costly
def test_fsdp_trains_as_one_process(ranks):
    assert_equals_one_process(ranks, Skipping, 2, {"strategy": "fsdp"}, per_step=4)


@pytest.mark.costly
def test_a_short_pass_that_begins_without_a_call_on_one_rank(ranks):
    """DDP waits for all ranks in the first call of the second step, which is in the next pass."""
    given = {"per_step": 8, "number": 6, "without": frozenset({0, 2})}
    assert_equals_one_process(ranks, SkippingUncalled, 2, {}, **given)


WAYS = [
    {},
    {"find_unused_parameters": True},
    {"strategy": "zero1"},
    {"strategy": "fsdp", "fsdp_min_parameters": 1},
    {"strategy": "fsdp", "fsdp_whole_gradients": True},
    {"virtual_ranks": 6},
    {"auto_micro_batch": True},
    {"max_grad_norm": 0.1},
]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", some_of([2, 3], [2]))
@pytest.mark.parametrize("options", WAYS, ids=shown)
@pytest.mark.parametrize("cls", [Skipping, SkippingUncalled], ids=shown)
def test_each_way_to_train_has_the_weights_of_one_process(ranks, cls, options, world_size):
    if cls is SkippingUncalled and options.get("strategy") == "fsdp":
        pytest.skip("fsdp needs the modules called, which its own test says")
    assert_equals_one_process(ranks, cls, world_size, options, per_step=12)


LOCAL = {"ddp_comm_hook": "post_local_sgd", "local_sgd_period": 1}


@pytest.mark.costly
def test_post_local_sgd_steps_on_each_rank_where_another_has_a_loss(ranks):
    found = torch.tensor(ranks.run(train, Skipping, 2, LOCAL, None, 4, world_size=2))
    assert torch.equal(found[0], found[1])
    assert found[0, 1] == 2 * 5  # of 2 epochs of 6 steps; one of each epoch has no loss


# ---------------------------------------------------------------------- steps without a loss


class Noting(Skipping):
    """Notes the optimizer step and the loss that its hook sees after each batch."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0].clamp(max=10))

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.seen.append((self.optimizer_step, float(loss.detach())))


def batches_of(number, without):
    return {"train_set": data(number, without), "train_loader_kwargs": {"batch_size": 2}}


def test_a_step_without_a_loss_is_left_out_and_counted(caplog):
    brain = make(Noting, opt=lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.5))
    brain.scheduler_class = functools.partial(
        torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5
    )
    result = brain.fit([1], **batches_of(8, {1, 2}))
    assert [steps for steps, _ in brain.seen] == [1, 1, 1, 2]
    assert [math.isnan(loss) for _, loss in brain.seen] == [False, True, True, False]
    assert result.optimizer_steps == 2
    assert brain.optimizer.param_groups[0]["lr"] == 1e-3 / 4  # the schedule has stepped twice
    assert "none of their batches had a loss" not in caplog.text  # unless asked for
    assert caplog.text.count("was 0 over all batches of an optimizer step") == 1


def left_out_by(rank_without):
    brain = make(Noting, opt=lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.5))
    brain.fit([1], data(16, rank_without), train_loader_kwargs={"batch_size": 2, "shuffle": False})
    return brain.optimizer_step, brain.progress.empty_steps


def test_two_ranks_leave_out_a_step_that_neither_has_a_loss_for(ranks):
    assert ranks.run(left_out_by, {0, 3, 4, 5}, world_size=2) == [(3, 1), (3, 1)]


class Evaluated(Means):
    """Has one module, and losses that are means."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0].clamp(max=10))


@pytest.mark.parametrize("cls", [Noting, Evaluated])
def test_a_validation_leaves_out_what_is_skipped(cls):
    brain = make(cls)
    valid = points(4)
    expected = brain.evaluate(valid, test_loader_kwargs={"batch_size": 2})
    found = brain.evaluate(data(6, {2})[4:] + valid, test_loader_kwargs={"batch_size": 2})
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_validation_of_nothing_else_says_so(caplog):
    loss = make(Evaluated).evaluate(data(4, {0, 1}), test_loader_kwargs={"batch_size": 2})
    assert math.isnan(loss)
    assert "TEST: compute_objectives returned None for all 2 batches" in caplog.text


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("without", [{0}, {2}], ids=["the first batch", "a later batch"])
def test_means_do_not_go_with_skipped_batches(without):
    with pytest.raises(BatchError, match=r"Return \(loss_sum, count\) where a batch has a loss"):
        make(Evaluated).fit([1], **batches_of(8, without))


def fit_means(without):
    data_of = data(16, without)
    make(Evaluated).fit([1], data_of, train_loader_kwargs={"batch_size": 2, "shuffle": False})


def test_neither_on_two_ranks_of_which_one_skips_its_first_batch(ranks):
    outcomes = ranks.outcomes(fit_means, {0}, world_size=2)
    for outcome in outcomes:
        assert "a mean loss for others" in outcome.error, outcomes


def test_an_epoch_without_any_loss_looks_for_a_missing_return():
    with pytest.raises(BatchError, match="each of the 4 batches of the first epoch"):
        make(Noting).fit([1], **batches_of(8, {0, 1, 2, 3}))


class OwnFitBatch(Noting):
    """Passes what it has on to ``backward``."""

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, None), batch, None)
        self.backward(loss)
        return loss


class OnTop(Noting):
    """Adds to the library's ``fit_batch``."""

    def fit_batch(self, batch):
        return super().fit_batch(batch)


def test_a_fit_batch_of_the_recipe():
    with pytest.raises(BatchError, match=r"pass \(torch.zeros\(\(\)\), 0\) to self.backward"):
        make(OwnFitBatch).fit([1], **batches_of(4, {0}))
    brain = make(OnTop)
    brain.fit([1], **batches_of(4, {0}))
    assert brain.optimizer_step == 1


@pytest.mark.slow
def test_fsdp_needs_the_modules_called(ranks):
    given = (None, 4, 24, ALL)
    outcomes = ranks.outcomes(
        train, SkippingUncalled, 2, {"strategy": "fsdp"}, *given, world_size=2
    )
    assert all("has called no entry of modules" in one.error for one in outcomes), outcomes


PAGE = Path(__file__).parents[2] / "docs/how-to/skip-batches.md"


def run_page():
    block = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    shown = {}
    exec(compile(block, str(PAGE), "exec"), shown)
    return shown["result"].optimizer_steps, shown["modules"]["net"].weight.tolist()


def test_the_page_is_true(ranks):
    assert run_page()[0] == 2 * 3
    assert [steps for steps, _ in ranks.run(run_page, world_size=2)] == [2 * 2] * 2


# ---------------------------------------------------------------------- a run that goes on


class Stops(Noting):
    """Saves after a batch, and is killed there."""

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        super().on_fit_batch_end(batch, outputs, loss, should_step)
        if self.run_opts.debug_batches == 5 and self.step == 5:
            self.checkpointer.save_checkpoint(end_of_epoch=False)
            raise Killed


def test_a_run_that_goes_on_has_counted_what_it_skipped(tmp_path):
    given = batches_of(16, {1, 2, 6})
    straight = make(Noting, folder=tmp_path / "straight")
    straight.fit([1], **given)
    with pytest.raises(Killed):
        make(Stops, folder=tmp_path / "killed", debug_batches=5).fit([1], **given)
    resumed = make(Noting, folder=tmp_path / "killed")
    resumed.fit([1], **given)
    assert resumed.progress.empty_steps == straight.progress.empty_steps == 3
    assert torch.equal(resumed.modules.net.weight, straight.modules.net.weight)
