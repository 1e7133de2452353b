"""Losses that depend on no parameter, as of a batch without ground truth: in the same answer,
too.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ddpkit.errors import BatchError
from ddpkit.types import Stage
from tests.recipes import QUIET, Regression, points

EMPTY = 1e3  # first number of an input that has no target
# By batches of 2 of an epoch of 24: rank 0's of the first step, all of a step, rank 1's of one, the
# last one.
WITHOUT = frozenset({0, 3, 4, 5, 7, 11})
ALL = frozenset(range(12))


def data(number, without):
    """Return points, of which some batches of 2 have no target."""
    found = points(number)
    for position, (inputs, _) in enumerate(found):
        if position // 2 in without:
            inputs[0] = EMPTY
    return found


class Chain(nn.Module):
    """Two layers, of which the second is left out if the batch says so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 4).double()
        self.second = nn.Linear(4, 3).double()

    def forward(self, inputs, both=True):
        hidden = self.first(inputs)
        return self.second(hidden.tanh()) if both else hidden[:, :3]


class Sparse(Regression):
    """Its loss is the mean over the samples that have a target, or a leaf where none has."""

    def has_target(self, batch):
        return batch[0][:, 0] != EMPTY

    def compute_forward(self, batch, stage):
        return self.modules.head(self.modules.net(batch[0].clamp(max=10)))

    def none(self):
        return torch.zeros((), requires_grad=True)

    def squares(self, predictions, batch):
        there = self.has_target(batch)
        return (predictions - batch[1])[there].square().sum() if there.any() else None

    def compute_objectives(self, predictions, batch, stage):
        squares = self.squares(predictions, batch)
        return self.none() if squares is None else squares / len(batch[1])


class Sums(Sparse):
    """Returns a sum and a count, and a sum without a gradient where the count is 0."""

    def compute_objectives(self, predictions, batch, stage):
        squares = self.squares(predictions, batch)
        if squares is None:
            return torch.zeros(()), 0
        return squares, self.has_target(batch).sum()


class Divides(Sparse):
    """Adds losses up from zero, and divides: the graph has no parameter in it."""

    def none(self):
        return super().none() / 2


class Chooses(Sparse):
    """Uses a layer in some batches only."""

    def compute_forward(self, batch, stage):
        return self.modules.head(
            self.modules.net(batch[0].clamp(max=10), both=bool(batch[1].sum() > 0))
        )


class OneEntry(Sparse):
    """Has one module, which a batch without targets does not call."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])[:, :1] if self.has_target(batch).any() else None


class OneEntryOfSums(OneEntry, Sums):
    """Likewise, with a sum and a count."""


def own(cls, *, without_sync):
    """Give a recipe a ``fit_batch`` of its own."""

    def fit_batch(self, batch):
        with self.no_sync(without_sync and not self.should_step):
            loss = self.compute_objectives(
                self.compute_forward(batch, Stage.TRAIN),
                batch,
                Stage.TRAIN,
            )
            self.backward(loss)
        if self.should_step:
            self.optimizers_step()
        return (loss[0].detach(), loss[1]) if isinstance(loss, tuple) else loss.detach()

    return type(f"Own{cls.__name__}", (cls,), {"fit_batch": fit_batch})


def whole(weight):
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().flatten()


def train(cls, world_size, options, is_own=None, per_step=6, number=24, without=WITHOUT):
    """Return losses and weights after two epochs; AdamW moves whatever has a gradient, also one of
    zero.
    """
    torch.manual_seed(4)
    modules = {"net": Chain()}
    if not issubclass(cls, OneEntry):
        modules["head"] = nn.Linear(3, 1).double()
    kind = cls if is_own is None else own(cls, without_sync=is_own)
    sizes = {"global_batch_size": per_step, "micro_batch_size": 2}
    if options.keys() & {"virtual_ranks", "auto_micro_batch"}:
        del sizes["micro_batch_size"]
    optimizer = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
    brain = kind(modules, optimizer, None, {**QUIET, **sizes, **options})
    result = brain.fit([1, 2], data(number, without), train_loader_kwargs={"shuffle": False})
    weights = torch.cat([whole(one) for one in brain.raw_modules.parameters()]).tolist()
    return [result.train_loss, float(result.optimizer_steps), *weights]


def assert_equals_one_process(ranks, cls, world_size, options, **given):
    """On one process a step has as many micro-batches of 2 as there are on all ranks together."""
    train_on = functools.partial(train, cls, **given)
    numbers = {name: value for name, value in options.items() if name == "max_grad_norm"}
    expected = torch.tensor(train_on(1, numbers))
    found = torch.tensor(ranks.run(train_on, world_size, options, world_size=world_size))
    assert torch.equal(found[0], found[-1])
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-9)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("cls", [Sparse, Sums])
def test_a_loss_without_a_graph_counts_as_a_batch_that_uses_nothing(ranks, cls):
    assert_equals_one_process(ranks, cls, 3, {})


@pytest.mark.costly
def test_likewise_in_a_batch_that_does_not_call_the_module(ranks):
    assert_equals_one_process(ranks, OneEntryOfSums, 3, {})


def shown(value):
    return getattr(value, "__name__", None) or str(value)


OPTIONS = [
    {"find_unused_parameters": True},
    {"strategy": "zero1"},
    {"gradient_as_bucket_view": False},
    {"virtual_ranks": 6},
    {"auto_micro_batch": True},
    {"max_grad_norm": 0.1},
]


# Each option meets a loss without a graph, and a module that is not called. Two batches of a step
# take both ways: one is not averaged, and one is.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        *((cls, {}) for cls in (Sparse, Sums, Divides, OneEntry)),
        *((cls, options) for options in OPTIONS for cls in (Sparse, OneEntryOfSums)),
    ],
    ids=shown,
)
def test_with_other_options(ranks, cls, options):
    assert_equals_one_process(ranks, cls, 3, options, per_step=12)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"strategy": "zero1"}], ids=str)
def test_a_layer_that_other_batches_leave_out(ranks, options):
    options = {**options, "find_unused_parameters": True}
    assert_equals_one_process(ranks, Chooses, 3, options, per_step=12)


IN_FIT_BATCH = [
    *((cls, {}) for cls in (Sparse, Sums, Divides, OneEntry)),
    (Sparse, {"strategy": "zero1"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "options"),
    [*IN_FIT_BATCH, *((cls, {"find_unused_parameters": True}) for cls in (Sparse, OneEntry))],
    ids=shown,
)
def test_in_a_fit_batch_of_the_recipe(ranks, cls, options):
    assert_equals_one_process(ranks, cls, 2, options, per_step=8, is_own=True)


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "options"), IN_FIT_BATCH, ids=shown)
def test_in_a_fit_batch_of_the_recipe_without_no_sync(ranks, cls, options):
    assert_equals_one_process(ranks, cls, 2, options, per_step=8, is_own=False)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Sparse, Sums])
def test_what_the_other_ranks_send_must_be_known(ranks, cls):
    options = {"find_unused_parameters": True}
    outcomes = ranks.outcomes(train, cls, 2, options, False, 8, 24, ALL, world_size=2)
    assert all("it is not known what the other processes send" in one.error for one in outcomes), (
        outcomes
    )


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Sparse, Sums, OneEntry])
@pytest.mark.parametrize("number", [22, 26])
def test_where_the_last_step_has_samples_for_one_rank_only(ranks, cls, number):
    assert_equals_one_process(ranks, cls, 2, {}, per_step=8, number=number)


def refused(cls, options):
    """Return the error on each rank, and the number of the rank."""
    with pytest.raises(BatchError) as caught:
        train(cls, 2, options)
    return str(caught.value)


@pytest.mark.costly
def test_a_static_graph_has_no_such_batch(ranks):
    outcomes = ranks.outcomes(
        train,
        Sparse,
        2,
        {"static_graph": True},
        None,
        4,
        24,
        ALL,
        world_size=2,
    )
    assert {one.ok for one in outcomes} == {False}
    assert all("static_graph=True promises" in one.error for one in outcomes)
    assert "static_graph=True promises" in refused(Sparse, {"static_graph": True})


@pytest.mark.slow
def test_fsdp_says_what_to_return(ranks):
    outcomes = ranks.outcomes(
        train,
        Sparse,
        2,
        {"strategy": "fsdp"},
        None,
        4,
        24,
        ALL,
        world_size=2,
    )
    assert all("0.0 * outputs.sum()" in one.error for one in outcomes), outcomes


class SeveralEntries(Sparse):
    """A batch without targets calls neither of two entries."""

    def compute_forward(self, batch, stage):
        return super().compute_forward(batch, stage) if self.has_target(batch).any() else None


@pytest.mark.slow
def test_several_entries_must_be_called(ranks):
    outcomes = ranks.outcomes(train, SeveralEntries, 2, {}, None, 4, 24, ALL, world_size=2)
    assert all("Call the module in every batch" in one.error for one in outcomes), outcomes


class Clamped(Sparse):
    """Has a hook of its own on a gradient, which takes a tensor."""

    def on_fit_start(self):
        super().on_fit_start()
        for one in self.modules.parameters():
            one.register_hook(lambda gradient: gradient.clamp(-1, 1))


@pytest.mark.slow
def test_hooks_of_the_recipe_are_called_with_tensors(ranks):
    found = torch.tensor(ranks.run(train, Clamped, 2, {}, world_size=2))
    assert torch.equal(found[0], found[1])
