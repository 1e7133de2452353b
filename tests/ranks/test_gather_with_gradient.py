"""A contrastive loss over the samples of all ranks has the weights of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from ddpkit import Brain, Stage
from ddpkit.distributed import gather_with_gradient, get_rank, run_on_main
from ddpkit.errors import ConfigError, DataError, LaunchError
from tests.recipes import QUIET, points, sgd, weights, world_size

DATA = points(11)
CLOSE = {"rtol": 0, "atol": 1e-12}


class Pairs(Brain):
    """Two towers; each sample's pair is to be nearer than all others of the batch."""

    own_rows = False

    def compute_forward(self, batch, stage):
        left = functional.normalize(self.modules.left(batch[0]), dim=1)
        right = functional.normalize(self.modules.right(batch[0] ** 2), dim=1)
        return left, right

    def compute_objectives(self, predictions, batch, stage):
        left, right = predictions
        every_left = gather_with_gradient(left)
        every_right = gather_with_gradient(right)
        if not self.own_rows or stage is Stage.VALID:
            return functional.cross_entropy(
                8 * every_left @ every_right.T, torch.arange(len(every_left))
            )
        sizes = [0] * world_size()
        sizes[get_rank() or 0] = len(left)
        if world_size() > 1:
            total = torch.tensor(sizes)
            torch.distributed.all_reduce(total)
            sizes = total.tolist()
        first = sum(sizes[: get_rank() or 0])
        targets = torch.arange(first, first + len(left))
        return functional.cross_entropy(8 * left @ every_right.T, targets)


def trained(batch, own_rows=False, options=()):
    torch.manual_seed(3)
    towers = {name: nn.Linear(3, 4).double() for name in ("left", "right")}
    brain = Pairs(towers, sgd(0.3), {}, {**QUIET, **dict(options)})
    brain.own_rows = own_rows
    losses = []
    brain.on_stage_end = lambda stage, loss, epoch=None: losses.append(loss)
    loading = {} if batch is None else {"batch_size": batch}
    brain.fit([1, 2], DATA, DATA[:5], train_loader_kwargs=loading)
    return weights(brain), losses


# 11 samples in steps of 8: on two ranks the last step has 2 and 1; on three, in steps of 9, one and
# one and none
@pytest.mark.costly
@pytest.mark.parametrize(
    ("processes", "step", "own_rows"),
    [
        (2, 8, False),
        (2, 8, True),
        (3, 9, False),
    ],
)
def test_the_weights_are_those_of_one_process(ranks, processes, step, own_rows):
    expected, losses = trained(step)
    for found, its_losses in ranks.run(trained, step // processes, own_rows, world_size=processes):
        torch.testing.assert_close(found, expected, **CLOSE)
        # of the training; the validation has one row in each batch
        assert its_losses[::2] == pytest.approx(losses[::2], rel=1e-12)


def rows_of_ranks(dtype):
    rank = get_rank()
    rows = torch.full((rank, 2), rank + 1.0, dtype=dtype, requires_grad=True)
    found = gather_with_gradient(rows)
    (found * torch.arange(1, len(found) + 1).unsqueeze(1)).sum().backward()
    return found.detach(), rows.grad


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_number_come_in_the_order_of_the_ranks_and_gradients_are_added_up(ranks, dtype):
    for rank, (found, gradient) in enumerate(ranks.run(rows_of_ranks, dtype, world_size=3)):
        assert torch.equal(found, torch.tensor([[2.0] * 2, [3.0] * 2, [3.0] * 2], dtype=dtype))
        expected = {0: [], 1: [[3.0] * 2], 2: [[6.0] * 2, [9.0] * 2]}[rank]
        assert torch.equal(gradient, torch.tensor(expected, dtype=dtype).reshape(rank, 2))


def other_shapes():
    with pytest.raises(DataError, match="another rank has rows of another shape or type") as caught:
        gather_with_gradient(torch.ones(2, 3 + get_rank()))
    return str(caught.value)


def test_other_shapes_on_another_rank_are_refused_on_all(ranks):
    first, second = ranks.run(other_shapes, world_size=2)
    assert "rank 0 has rows of shape (3,) of torch.float32" in first
    assert "rank 1 has rows of shape (4,)" in second


def in_main_only_code():
    def gather():
        with pytest.raises(LaunchError, match="main-only code"):
            gather_with_gradient(torch.ones(1, 1))

    run_on_main(gather)


def test_main_only_code_is_refused(ranks):
    ranks.run(in_main_only_code, world_size=2)


@pytest.mark.parametrize("value", [torch.tensor(1.0), [1.0], None])
def test_what_has_no_rows_is_refused(value):
    with pytest.raises(DataError, match="first dimension counts samples"):
        gather_with_gradient(value)


class Evaluates(Pairs):
    """Gathers in each batch of an evaluation."""

    def evaluate_batch(self, batch, stage):
        left, _ = self.compute_forward(batch, stage)
        self.gathered.append(len(gather_with_gradient(left)))
        return left.sum()


def evaluated(shard_evaluation=False):
    towers = {name: nn.Linear(3, 4).double() for name in ("left", "right")}
    options = {**QUIET, "shard_evaluation": shard_evaluation}
    brain = Evaluates(towers, sgd(), {}, options)
    brain.gathered = []
    brain.evaluate(DATA[:8], test_loader_kwargs={"batch_size": 2})
    return brain.gathered


def test_in_an_evaluation_of_all_data_on_each_rank_rows_stay_as_they_are(ranks):
    assert evaluated() == [2] * 4
    assert ranks.run(evaluated, world_size=2) == [[2] * 4] * 2


def refused():
    with pytest.raises(ConfigError, match="one rank may have more batches"):
        evaluated(shard_evaluation=True)


def test_an_evaluation_whose_set_is_divided_is_refused(ranks):
    ranks.run(refused, world_size=2)


def refused_where_a_step_may_be_repeated():
    with pytest.raises(ConfigError, match="leave --auto_micro_batch out"):
        trained(None, options={"global_batch_size": 4, "auto_micro_batch": True})


def test_a_step_that_may_be_made_again_in_smaller_parts_is_refused(ranks):
    ranks.run(refused_where_a_step_may_be_repeated, world_size=2)
