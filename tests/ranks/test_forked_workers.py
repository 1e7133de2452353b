"""A process that a rank forks, such as a loader's worker, must not stumble over what the rank has
in memory.
"""

from __future__ import annotations

import gc
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ddpkit.control import start_loading


def wrapped_modules():
    return sum(isinstance(thing, DistributedDataParallel) for thing in gc.get_objects())


class Looking(Dataset):
    """Tells how many wrapped modules the garbage collector of its worker would look at."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(wrapped_modules())


def load_beside_garbage():
    """Leave a trained module behind that only the garbage collector can find, then start
    workers.
    """
    gc.collect()  # what other tests have left
    before = wrapped_modules()
    gc.disable()
    try:
        module = DistributedDataParallel(nn.Linear(2, 2))
        module(torch.ones(1, 2)).sum().backward()
        module.itself = [module]
        del module
        found = [
            int(item)
            for item in start_loading(DataLoader(Looking(), batch_size=None, num_workers=2))
        ]
        own = wrapped_modules() - before
    finally:
        gc.enable()
    dist.barrier()
    return own, found


@pytest.mark.costly
def test_a_worker_never_collects_a_module_of_an_earlier_training(ranks):
    assert ranks.run(load_beside_garbage, world_size=2) == [(1, [0, 0, 0, 0])] * 2


def wait_alone():
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=5))
    if dist.get_rank() == 0:
        while True:
            time.sleep(0.01)
    dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.slow
def test_a_rank_that_is_stuck_does_not_hide_what_the_others_say(ranks):
    outcomes = ranks.outcomes(wait_alone, world_size=2, timeout=15)
    assert [outcome.error_type for outcome in outcomes] == ["Hang", "RuntimeError"]
    assert ranks.run(dist.get_rank) == [0, 1], "other processes take their place"
