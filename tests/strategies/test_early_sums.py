"""Sums of virtual ranks that begin while the last backward pass of a step computes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpkit.base import temporarily
from ddpkit.comm import OrderedSum, ordered_sum
from ddpkit.distributed import get_rank
from ddpkit.errors import ConfigError
from tests.cells import some_of
from tests.ranks.test_virtual_ranks import (
    CASES,
    CLASSES,
    FEATURES,
    TwoTerms,
    case,
    digest,
    points,
)
from tests.recipes import Regression

LARGE = 5  # gradients of Parts that are sent by themselves
STEPS = 4


class Parts(nn.Module):
    """Has a part that some samples use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(FEATURES, 40)
        self.rare = nn.Linear(40, 40)
        self.last = nn.Linear(40, CLASSES)

    def forward(self, inputs):
        inner = self.first(inputs)
        if bool((inputs[:, 0] > self.bound).any()):
            inner = inner + self.rare(inner)
        return self.last(inner)

    bound = 0.5


class Always(Parts):
    bound = -100.0


class Never(Parts):
    bound = 100.0


class Hooked(Always):
    """A hook of the recipe's own stands on a gradient."""

    def __init__(self):
        super().__init__()
        self.last.weight.register_post_accumulate_grad_hook(double)


def double(parameter):
    parameter.grad.mul_(2)


class HookedModule(Always):
    """A hook of a module changes the gradients of another."""

    def __init__(self):
        super().__init__()
        self.rare.register_full_backward_hook(self.double)

    def double(self, *_):
        double(self.last.weight)


HOOKED = (Hooked, HookedModule)


class Again(Always):
    """A block that is used twice, and computed again in each backward pass: its gradients come in
    two parts.
    """

    def forward(self, inputs):
        inner = self.first(inputs)
        for _ in range(self.uses):
            inner = checkpoint(self.rare, inner, use_reentrant=True)
        return self.last(inner)

    uses = 2


class AgainOnceUsed(Again):
    """In the first step rank 1 has no gradient of the block, and learns nothing of it."""

    def forward(self, inputs):
        is_idle = self.step == 0 and get_rank() == 1
        return self.last(self.first(inputs)) if is_idle else super().forward(inputs)


class AgainLater(Again):
    """Used twice from the second step on."""

    def forward(self, inputs):
        self.uses = 2 if self.step else 1
        return super().forward(inputs)


class Rare(Parts):
    """On rank 1, without the last gradients from the third step on."""

    def forward(self, inputs):
        inner = self.rare(self.first(inputs))
        return inner[:, :CLASSES] if self.step > 1 and get_rank() == 1 else self.last(inner)


class Together(nn.Module):
    """Two parameters whose gradients are in the same memory."""

    def __init__(self):
        super().__init__()
        self.terms = TwoTerms()

    def forward(self, inputs):
        return self.terms(inputs[:, :CLASSES])


class Recipe(Regression):
    """Classifies without noise."""

    def compute_forward(self, batch, stage):
        self.modules.net.step = self.optimizer_step
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.cross_entropy(predictions, batch[1])


class Ending(Recipe):
    """Ends with an error where an optimizer should step for the third time."""

    def init_optimizers(self):
        self.optimizers_dict = {"all": torch.optim.SGD(self.modules.parameters(), lr=0.1)}

    def freeze_optimizers(self, optimizers):
        if self.optimizer_step > 1:
            raise ValueError("enough")
        return optimizers


class Carrying(Recipe):
    """Adds the gradients of a step to those of the step before."""

    def init_optimizers(self):
        super().init_optimizers()
        self.optimizer.register_step_pre_hook(self.note)
        self.carried = {}

    def note(self, *_):
        self.carried = {one: one.grad for one in self.modules.parameters()}

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        for parameter, gradient in self.carried.items():
            parameter.grad = gradient
        self.carried = {}


def trained(kind, *, recipe=Recipe, virtual_ranks=6, begins_early=True, **options):
    """Train with small pieces, all of which go in rows; return the hash of the weights, and how
    many sums began early in each step.
    """
    most_paired = ordered_sum.MOST_PAIRED if begins_early else 1
    early = []
    give = OrderedSum.give_early
    brain = recipe(
        {"net": kind()},
        lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        run_opts={
            "device": "cpu",
            "noprogressbar": True,
            "virtual_ranks": virtual_ranks,
            "global_batch_size": virtual_ranks * 2,
            "max_grad_norm": 1.0,
            **options,
        },
    )

    def counted(self, *given):
        early.append(brain.optimizer_step)
        give(self, *given)

    with (
        temporarily(ordered_sum, PIECE_BYTES=256, WHOLE_BYTES=0, MOST_PAIRED=most_paired),
        temporarily(OrderedSum, give_early=counted),
    ):
        brain.fit([1], points(STEPS * virtual_ranks * 2), train_loader_kwargs={"shuffle": True})
    return digest(brain), [early.count(step) for step in range(STEPS)]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.costly)])
def test_all_sums_begin_early_from_the_second_step_on(ranks, world_size):
    alone, _ = trained(Always)
    for found, early in ranks.run(trained, Always, world_size=world_size):
        assert found == alone
        assert early == [0] + [LARGE] * (STEPS - 1)


@pytest.mark.costly
@pytest.mark.parametrize("strategy", ["single", "zero1"])
@pytest.mark.parametrize("kind", [Parts, Never, Hooked, HookedModule, Together])
def test_the_same_bits_whatever_gives_gradients(ranks, kind, strategy):
    """A part without gradients on some ranks; one without any; gradients that a recipe changes;
    gradients in the same memory.
    """
    options = {"strategy": strategy} if strategy != "single" else {}
    alone, _ = trained(kind, virtual_ranks=2, **options)
    for world_size in (1, 2):
        train = functools.partial(trained, kind, virtual_ranks=2, **options)
        for found, early in ranks.run(train, world_size=world_size):
            assert found == alone
            assert (sum(early) > 0) == (world_size == 2 and kind not in HOOKED)


def test_the_memory_of_a_sum_that_is_still_a_gradient_is_left_alone(ranks):
    carrying = functools.partial(trained, Always, recipe=Carrying, virtual_ranks=2)
    (at_the_end, _), *_ = ranks.run(functools.partial(carrying, begins_early=False), world_size=2)
    assert at_the_end != trained(Always, virtual_ranks=2)[0]
    for found, early in ranks.run(carrying, world_size=2):
        assert found == at_the_end
        assert sum(early) > 0


def train_twice_after_an_error():
    """The first training ends with an error on all ranks, when one rank has begun its sums."""
    with pytest.raises(ValueError, match="enough"):
        trained(Rare, recipe=Ending, virtual_ranks=2)
    return trained(Always, virtual_ranks=2)


def test_what_an_error_has_left_under_way_is_not_taken_for_what_comes_later(ranks):
    alone, _ = trained(Always, virtual_ranks=2)
    for found, _ in ranks.run(train_twice_after_an_error, world_size=2):
        assert found == alone


@pytest.mark.filterwarnings("ignore")  # torch's own, of use_reentrant
def test_a_gradient_that_comes_in_two_parts_is_sent_at_the_end(ranks):
    alone, _ = trained(Again, virtual_ranks=2)
    for found, early in ranks.run(functools.partial(trained, Again, virtual_ranks=2), world_size=2):
        assert found == alone
        assert early[1] == LARGE - 2


@pytest.mark.filterwarnings("ignore")
def test_a_rank_learns_for_itself_which_gradients_come_in_two_parts(ranks):
    train = functools.partial(trained, AgainOnceUsed, virtual_ranks=2)
    (at_the_end, _), *_ = ranks.run(functools.partial(train, begins_early=False), world_size=2)
    for found, _ in ranks.run(train, world_size=2):
        assert found == at_the_end


def two_parts_later():
    with pytest.raises(ConfigError, match=r"use_reentrant=False"):
        trained(AgainLater, virtual_ranks=2)


@pytest.mark.filterwarnings("ignore")
def test_a_gradient_that_comes_in_two_parts_once_its_sum_has_begun_is_an_error(ranks):
    ranks.run(two_parts_later, world_size=2)


def test_an_audit_looks_before_anything_is_added_up(ranks):
    audited = functools.partial(trained, Always, virtual_ranks=2, audit_every=1)
    for _, early in ranks.run(audited, world_size=2):
        assert early == [0] * STEPS


def case_in_rows(name):
    with temporarily(ordered_sum, PIECE_BYTES=256, WHOLE_BYTES=0):
        return case(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_of(CASES, [*CASES][::4]))
def test_every_kind_of_training_has_the_same_bits(ranks, name):
    assert ranks.run(case_in_rows, name, world_size=2) == [case(name)] * 2
