"""Two ranks exchange over gloo what more of them add up: the same bits as gloo's own all-reduce."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpkit.comm import exchange_tensor, is_exchanged, start_sum
from tests.recipes import QUIET, Regression, points, sgd

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int64]


def sums(dtype, shape):
    torch.manual_seed(dist.get_rank())
    own = torch.randn(shape, dtype=torch.float64).mul(10).to(dtype)
    by_gloo = own.clone()
    dist.all_reduce(by_gloo)
    start_sum(own)()
    return own, by_gloo


@pytest.mark.corner
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_that_of_an_all_reduce(ranks, dtype, world_size):
    for shape in ((), (1,), (3, 5), (0,)):
        if dtype.is_complex and world_size > 2:
            continue  # torch refuses them in some versions
        for own, by_gloo in ranks.run(sums, dtype, shape, world_size=world_size):
            assert own.shape == shape
            assert torch.equal(own, by_gloo)


def exchanged():
    received = exchange_tensor(torch.full((4,), float(dist.get_rank())))()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    small = torch.ones(2**17)
    large = torch.ones(2**17 + 1)
    elsewhere = torch.ones(1, device="meta")
    asked = ([small], [large], [small, small], [small, elsewhere])
    return (
        received.tolist(),
        [is_exchanged(tensors) for tensors in asked],
        is_exchanged([small], alone),
    )


def test_each_rank_gets_the_tensor_of_the_other_where_it_is_small(ranks):
    for other, found in enumerate(ranks.run(exchanged)):
        assert found == ([1.0 - other] * 4, [True, False, False, False], False)


class Branches(nn.Module):
    """A BatchNorm that all ranks share, between two layers of which each rank uses one, in its own
    order.
    """

    def __init__(self):
        super().__init__()
        self.after = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        self.norm = nn.BatchNorm1d(4)
        # the last ones are in the first buckets
        self.before = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)])

    def forward(self, x):
        rank = dist.get_rank()
        return self.after[1 - rank](self.norm(self.before[rank](x)))


def trained_in_branches():
    torch.manual_seed(1)
    net = Branches().double()
    options = {**QUIET, "find_unused_parameters": True, "bucket_cap_mb": 1e-5}
    Regression({"net": net}, sgd(), None, options).fit(
        [1],
        points(12),
        train_loader_kwargs={"batch_size": 2},
    )
    return [one.tolist() for one in net.parameters()]


@pytest.mark.costly
def test_ranks_that_use_other_parameters_do_not_wait_for_each_other(ranks):
    """With many buckets, which become ready in another order on each rank, and statistics that are
    exchanged.
    """
    first, second = ranks.run(trained_in_branches)
    assert first == second
