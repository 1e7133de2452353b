"""How fast a loader is alone, by its number of workers: any loader that ``fit`` may have."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddpkit.dataloader import LoopedLoader, Sharding, deal_batches, reshard, shard
from ddpkit.run.loader_rates import can_be_remade, loader_rates, own_workers, with_workers

SECONDS = 0.01  # of a sample


class SlowData(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(SECONDS)
        return torch.tensor([index])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


def test_a_slow_loader_is_measured_without_workers_and_with_two():
    loader = shard(SlowData(), Sharding(), batch_size=4)
    rates = loader_rates(loader, [0, 2], 0.4)
    assert list(rates) == [0, 2]
    assert 0 < rates[0] < 1 / SECONDS
    assert rates[2] > 1.2 * rates[0]
    assert loader.yielded is None, "the run's own loader is left as it is"


MAKERS = {
    "a dataset": lambda: shard(range(12), Sharding(), batch_size=2, shuffle=True),
    "a ready loader": lambda: reshard(
        DataLoader(range(12), batch_size=2, num_workers=1),
        Sharding(),
    ),
    "a loader with workers that stay": lambda: shard(
        range(12),
        Sharding(),
        batch_size=2,
        num_workers=1,
        persistent_workers=True,
        timeout=30,
        prefetch_factor=3,
    ),
    "a stream": lambda: shard(Stream(), Sharding(), batch_size=2),
    "batches of the dataset's own": lambda: shard([[1], [2], [3]], Sharding(), batch_size=None),
}


@pytest.mark.corner
@pytest.mark.parametrize("name", MAKERS)
def test_a_loader_is_made_anew_with_another_number_of_workers_and_the_same_batches(name):
    loader = MAKERS[name]()
    assert can_be_remade(loader)
    first = [list(batch) for batch in with_workers(loader, 0)]
    assert first == [list(batch) for batch in with_workers(loader, 1)]
    assert [with_workers(loader, number).num_workers for number in (0, 1)] == [0, 1]
    assert loader_rates(loader, [0], 0.05)[0] > 0


def test_a_nominal_epoch_is_measured_by_the_loader_inside_of_it():
    loader = LoopedLoader(shard(range(12), Sharding(), batch_size=2, num_workers=1), epoch_length=3)
    assert own_workers(loader) == 1
    assert set(loader_rates(loader, [0], 0.05)) == {0, 1}
    assert loader.total_steps == 0


def test_batches_that_the_recipe_makes_are_measured_as_they_are():
    made = deal_batches([torch.zeros(3)] * 50, Sharding())
    assert not can_be_remade(made)
    assert list(loader_rates(made, [0, 2], 0.05)) == [0]


def test_too_few_batches_give_no_rate():
    assert loader_rates(shard(range(2), Sharding(), batch_size=2), [0], 0.05) == {}
