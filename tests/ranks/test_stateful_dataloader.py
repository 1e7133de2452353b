"""The real StatefulDataLoader of torchdata on real ranks: the same answer, and a resume inside an
epoch.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from tests.ecosystem import (
    SAMPLES,
    assert_same_training,
    each_once,
    needs,
    rows,
    run_through_and_killed,
)
from tests.rank_pool import RankPool

pytestmark = needs("torchdata")
STEP = {"global_batch_size": 4}


@pytest.fixture(scope="module")
def own_ranks():
    """Ranks that end with this module, and with them what it has imported."""
    with RankPool(timeout=300) as pool:
        yield pool


class Part(IterableDataset):
    """Every ``number``-th row; knows where it is."""

    def __init__(self, first=0, number=1):
        self.data = rows()
        self.first = first
        self.number = number
        self.place = None

    def __iter__(self):
        self.place = self.first if self.place is None else self.place
        while self.place < SAMPLES:
            self.place += self.number
            yield self.data[self.place - self.number]
        self.place = None

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def stateful(dataset, **options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    # torchdata 0.11 calls it, of any newer torch
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    return StatefulDataLoader(dataset, batch_size=2, **options)


def of_a_set(num_workers=0, **options):
    return stateful(rows(), num_workers=num_workers, **options), {}


def shuffled(num_workers, **options):
    return of_a_set(num_workers, shuffle=True, **options)


def dropping():
    return shuffled(0, drop_last=True)


def of_a_stream():
    return stateful(Part()), {}


def divided(by_sampler):
    """One that its maker has divided, which keeps its own way of going on."""
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    rank = dist.get_rank()
    world = dist.get_world_size()
    if by_sampler:
        return of_a_set(sampler=StatefulDistributedSampler(rows(), world, rank, shuffle=True))
    loader = stateful(Part(rank, world))
    loader.is_sharded = True
    return loader, {}


@pytest.mark.parametrize(
    ("data", "arguments"),
    [(of_a_set, ()), (shuffled, (0,)), (shuffled, (2,)), (of_a_stream, ())],
)
def test_it_gives_the_same_training_on_two_ranks_and_goes_on_inside_an_epoch(
    own_ranks,
    tmp_path,
    data,
    arguments,
):
    alone, two = (
        run_through_and_killed(own_ranks, tmp_path / str(world), world, data, *arguments, **STEP)
        for world in (1, 2)
    )
    assert each_once(alone[2])
    assert_same_training(two, alone)


@pytest.mark.exhaustive
def test_the_last_samples_are_dropped_alike(own_ranks, tmp_path):
    alone, two = (
        run_through_and_killed(
            own_ranks,
            tmp_path / str(world),
            world,
            dropping,
            dies_at=(2, 5),
            **STEP,
        )
        for world in (1, 2)
    )
    assert all(len(seen) == 4 for seen in alone[2].values())
    assert len(alone[2]) == 3 * (SAMPLES // 4)
    assert_same_training(two, alone)


@pytest.mark.parametrize("by_sampler", [False, True])
def test_one_that_its_maker_has_divided_goes_on_inside_an_epoch(own_ranks, tmp_path, by_sampler):
    _, _, steps = run_through_and_killed(own_ranks, tmp_path, 2, divided, by_sampler)
    assert each_once(steps)


def order_of_loader(seed):
    """Return which samples a shuffled loader gives in the first step, made after another seed of
    torch.
    """
    from ddpkit.dataloader import Sharding, reshard

    torch.manual_seed(seed)
    return next(iter(reshard(shuffled(0)[0], Sharding())))["id"].tolist()


def test_its_order_follows_from_the_seed_of_the_run(own_ranks):
    """Not from when it was made."""
    (one,), (other,) = (own_ranks.run(order_of_loader, seed, world_size=1) for seed in (1, 2))
    assert one == other
