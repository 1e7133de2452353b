"""Gradients are averaged once: what DDP has averaged is left alone."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from ddpkit.strategies import ddp, wrapped_ddp
from tests.recipes import QUIET, BackwardByHand, linear, points, sgd


class Looking(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True).double()
        self.out = nn.Linear(3, 1).double()

    def forward(self, inputs):
        return self.out(self.table((inputs.abs().sum(1) * 2).long() % 5))


def count_averages(kind):
    """Return how often gradients were averaged beside DDP, and the weights."""
    torch.manual_seed(4)
    brain = BackwardByHand({"net": Looking() if kind == "sparse" else linear()}, sgd(), None, QUIET)
    averaging = mock.Mock(wraps=ddp.average_gradients)
    in_steps = mock.patch.object(ddp, "average_gradients", averaging)
    of_leftovers = mock.patch.object(wrapped_ddp, "average_gradients", averaging)
    with in_steps, of_leftovers:
        brain.fit([1], points(16), train_loader_kwargs={"batch_size": 2})
    return averaging.call_count, [one.tolist() for one in brain.raw_modules.parameters()]


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["sparse", pytest.param("dense", marks=pytest.mark.slow)])
def test_what_ddp_has_averaged_is_not_averaged_once_more(ranks, kind):
    (calls, first), (_, second) = ranks.run(count_averages, kind)
    assert (calls, first) == (0, second)
