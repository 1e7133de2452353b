"""The verdict of a rehearsal is true: real ranks agree with one process where it holds, and part where it does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddpkit.parity_sides import Sides
from ddpkit.parity_windows import ParityWindows
from ddpkit.types import Stage
from tests.contract.recipes import Regression, make, points, sgd, weights
from tests.unit.test_parity import OldFitBatch

BATCH = 3


class OwnForward(nn.BatchNorm1d):
    def forward(self, input):  # noqa: A002 -- torch's name
        return super().forward(input)


def net(norm=None):
    torch.manual_seed(0)
    middle = [] if norm is None else [norm(4)]
    return nn.Sequential(nn.Linear(3, 4, bias=norm is None), *middle, nn.Tanh(), nn.Linear(4, 1)).double()


class Sum(Regression):
    def compute_objectives(self, predictions, batch, stage):
        return (predictions - batch[1]).square().sum()


class TokenMean(Regression):
    def compute_objectives(self, predictions, batch, stage):
        weight = 0.2 + batch[1].sigmoid()
        return ((predictions - batch[1]).square() * weight).sum() / weight.sum()


class TokenSum(Regression):
    def compute_objectives(self, predictions, batch, stage):
        weight = 0.2 + batch[1].sigmoid()
        return ((predictions - batch[1]).square() * weight).sum(), weight.sum()


class Contrastive(Regression):
    def compute_objectives(self, predictions, batch, stage):
        return F.cross_entropy(predictions @ batch[1].T, torch.arange(len(predictions)))


RECIPES = {
    "plain": (Regression, None, True),
    "batch norm": (Regression, nn.BatchNorm1d, True),
    "sums and counts": (TokenSum, nn.BatchNorm1d, True),
    "own batch norm": (Regression, OwnForward, False),
    "sum": (Sum, None, False),
    "token mean": (TokenMean, None, False),
    "contrastive": (Contrastive, None, False),
    "old fit_batch": (OldFitBatch, None, False),  # only because of the last, uneven batch
}


def recipe(name, **options):
    cls, norm, _ = RECIPES[name]
    return make(cls, net=net(norm), opt=sgd(lr=0.05), max_grad_norm=None, **options)


def samples(name, world_size):
    """The last batch is uneven; where that is allowed, a rank of three has no sample of it."""
    return points(4 * BATCH * world_size + (2 if world_size == 3 and RECIPES[name][2] else 2 * world_size + 1))


def train(name, batch_size, world_size, **options):
    brain = recipe(name, **options)
    kwargs = {"batch_size": batch_size, "shuffle": True}
    brain.fit(range(1, 2), samples(name, world_size), train_loader_kwargs=kwargs)
    return weights(brain)


def apart(one, other):
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_the_verdict_is_true(ranks, name, world_size):
    kwargs = {"batch_size": BATCH, "shuffle": True}
    report = recipe(name).rehearse(samples(name, world_size), world_size, kwargs)
    distance = apart(
        ranks.run(train, name, BATCH, world_size, world_size=world_size)[0],
        train(name, BATCH * world_size, world_size),
    )
    assert report.holds is RECIPES[name][2], report
    if report.holds:
        assert distance < 1e-10
    else:
        assert distance > 1e-4


def first_step(name):
    """The gradient of the first step, read off the weights."""
    brain = recipe(name, optimizer_step_limit=1, grad_accumulation_factor=2)
    before = weights(brain)
    brain.fit(range(1, 2), samples(name, 2), train_loader_kwargs={"batch_size": BATCH, "shuffle": True})
    after = weights(brain)
    return {f"net.{key.removeprefix('net.')}": (before[key] - after[key]) / 0.05 for key in before}


@pytest.mark.parametrize("name", RECIPES)
def test_pretended_ranks_have_the_gradients_of_real_ones(ranks, name):
    """Also where those of one process are others."""
    brain = recipe(name, grad_accumulation_factor=2)
    kwargs = {"batch_size": BATCH, "shuffle": True}
    loaders = [brain._pretend(rank, 2)._loader(samples(name, 2), Stage.TRAIN, kwargs) for rank in range(2)]
    brain.on_fit_start()
    windows = ParityWindows(loaders, factor=2, epoch=1)
    [pretended] = Sides(brain, windows).as_ranks(windows.draw(2)[0]).steps
    real = ranks.run(first_step, name, world_size=2)[1]
    for key, gradient in pretended.items():
        torch.testing.assert_close(gradient, real[key], rtol=0, atol=1e-12)
