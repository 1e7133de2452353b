"""Data that is not the same on all ranks, though each is given its part of it: nobody trains on
half of it unawares.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ddpkit.errors import RankMismatchError
from tests.recipes import Squares, make, world_size

SIZE = 24
DIVIDES = "is_sharded = True"
RANDOM = "If it is random, seed it"


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


class Seen(Squares):
    """Trains on numbers, and remembers which count."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def compute_forward(self, batch, stage):
        numbers = batch[-1] if isinstance(batch, list) else batch
        if stage.name != "TRAIN" or self.progress.window.count:
            self.seen += numbers.reshape(len(numbers), -1)[:, 0].round().int().tolist()
        return self.modules.net(numbers.reshape(len(numbers), -1)[:, :1].double())


class Stream(IterableDataset):
    """The whole, in the same order on all ranks."""

    def __init__(self, size=SIZE):
        self.size = size
        self.noise = np.random.default_rng()  # that nobody has seeded

    def items(self):
        return range(self.size)

    def __iter__(self):
        return (torch.tensor([float(k)]) for k in self.items())


class DividesItself(Stream):
    """The usual idiom."""

    def items(self):
        first = int(os.environ["RANK"]) if "RANK" in os.environ else rank()
        return range(first, self.size, world_size())


class Marked(DividesItself):
    """Divides itself over ranks and workers, and says so."""

    is_sharded = True

    def items(self):
        worker = get_worker_info()
        part = range(rank(), self.size, world_size())
        return part if worker is None else part[worker.id :: worker.num_workers]


class Shuffled(Stream):
    """In an order that nobody has seeded."""

    def items(self):
        return [int(k) for k in self.noise.permutation(self.size)]

    def __iter__(self):
        return ((f"s{k}", torch.tensor([float(k)])) for k in self.items())


class ShuffledAlike(Stream):
    """In an order from a generator that is seeded alike while a stream is read."""

    def items(self):
        return random.sample(range(self.size), self.size)


class Noisy(Stream):
    """The same items in the same order, with noise that nobody has seeded."""

    def __iter__(self):
        return ((k, torch.tensor([k + 0.1 * self.noise.random()])) for k in self.items())


class NoisyAlone(Noisy):
    def __iter__(self):
        return (noisy for _, noisy in super().__iter__())


class Short(Stream):
    def __init__(self):
        super().__init__(1)


class ShortParts(DividesItself):
    def __init__(self):
        super().__init__(1)


def train_on(kind, num_workers, stage):
    """Run a stage over a stream; return the items that count, and what was warned of."""
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logger = logging.getLogger("ddpkit.data.sample_comparison")
    logger.addHandler(handler)
    try:
        brain = make(Seen, net=torch.nn.Linear(1, 1).double(), shard_evaluation=True)
        data = kind() if callable(kind) else kind
        kwargs = {"batch_size": 2, "num_workers": num_workers}
        if stage == "fit":
            brain.fit([1, 2], data, train_loader_kwargs=kwargs)
        elif stage == "predict":
            brain.predict(data, loader_kwargs=kwargs)
        else:
            brain.evaluate(data, test_loader_kwargs=kwargs)
    except RankMismatchError as error:
        return str(error), warnings
    finally:
        logger.removeHandler(handler)
    return brain.seen, warnings


@pytest.mark.corner
@pytest.mark.parametrize("stage", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_divides_itself_is_told(ranks, stage, num_workers):
    """It would be dealt out once more, and half of it would be lost."""
    for found, _ in ranks.run(train_on, DividesItself, num_workers, stage, world_size=2):
        assert isinstance(found, str), "some of it was lost in silence"
        assert "DividesItself" in found
        assert DIVIDES in found
        assert RANDOM in found


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_says_that_it_divides_itself_is_left_as_it_is(ranks, num_workers):
    results = ranks.run(train_on, Marked, num_workers, "fit", world_size=2)
    seen = Counter(itertools.chain.from_iterable(found for found, _ in results))
    assert seen == dict.fromkeys(range(SIZE), 2), "every item in both epochs"
    assert not any(warnings for _, warnings in results)


@pytest.mark.corner
@pytest.mark.parametrize(("kind", "world"), [(Shuffled, 2), (Shuffled, 3), (ShortParts, 2)])
def test_a_stream_that_is_random_or_short_is_told_too(ranks, kind, world):
    for found, _ in ranks.run(train_on, kind, 0, "fit", world_size=world):
        assert isinstance(found, str)
        assert RANDOM in found


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("stage", ["fit", "evaluate"])
@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        (Stream, 0),
        (Stream, 2),
        (ShuffledAlike, 0),
        (ShuffledAlike, 2),
        (Noisy, 0),
        (Noisy, 2),
        (Short, 0),
        (Short, 2),
    ],
)
def test_a_stream_that_is_the_same_but_for_noise_is_dealt_out(ranks, kind, num_workers, stage):
    results = ranks.run(train_on, kind, num_workers, stage, world_size=2)
    epochs = 2 if stage == "fit" else 1
    size = 1 if kind is Short else SIZE
    assert not any(isinstance(found, str) for found, _ in results), results[0][0]
    assert Counter(itertools.chain.from_iterable(found for found, _ in results)) == dict.fromkeys(
        range(size),
        epochs,
    )
    assert any(warnings for _, warnings in results) == (kind is Noisy)


def test_a_stream_of_which_only_noise_is_seen_is_refused(ranks):
    """Nobody can tell noise from another order there."""
    for found, _ in ranks.run(train_on, NoisyAlone, 0, "fit", world_size=2):
        assert isinstance(found, str)
        assert RANDOM in found


# ----------------------------------------------------------------------------- loaders and datasets


class Loader:
    """A loader of one's own."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        return iter(DataLoader(self.stream, 2))


def train_on_loader(kind):
    return train_on_plain(Loader(kind()))


def train_on_plain(data, kwargs=None):
    brain = make(Seen, net=torch.nn.Linear(1, 1).double())
    try:
        brain.fit([1], data, train_loader_kwargs=kwargs)
    except RankMismatchError as error:
        return str(error)
    return brain.seen


@pytest.mark.costly
def test_a_loader_of_ones_own_that_divides_itself_is_told(ranks):
    for found in ranks.run(train_on_loader, DividesItself, world_size=2):
        assert isinstance(found, str)
        assert "`is_sharded = True` on the loader" in found
    whole = ranks.run(train_on_loader, Stream, world_size=2)
    assert sorted(itertools.chain.from_iterable(whole)) == list(range(SIZE))


class OwnFiles(Dataset):
    """Every rank has loaded files of its own; loading a sample draws noise."""

    def __init__(self, *, own, noise=None):
        self.first = 100 * rank() if own else 0
        self.noise = noise
        self.asked = []

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        self.asked.append(index)
        drawn = 0.0 if self.noise is None else 0.1 * float(self.noise())
        return f"s{self.first + index}", torch.tensor([self.first + index + drawn])


def train_on_files(own, noise, num_workers):
    generators = {
        "seeded": lambda: torch.rand(()),
        "own": np.random.default_rng().random,
        None: None,
    }
    data = OwnFiles(own=own, noise=generators[noise])
    before = torch.get_rng_state()
    found = train_on_plain(data, {"batch_size": 2, "num_workers": num_workers})
    return found, len(data.asked), torch.equal(before, torch.get_rng_state())


@pytest.mark.corner
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("noise", [None, "seeded", "own"])
def test_a_dataset_of_each_ranks_own_files_is_told(ranks, noise, num_workers):
    for found, asked, _ in ranks.run(train_on_files, True, noise, num_workers, world_size=2):
        assert isinstance(found, str)
        assert "the ranks do not hold the same data" in found
        assert re.search(r"s0 on rank 0, s100 on rank 1", found)
        assert asked == 0 or not num_workers, "what it opens is opened in a worker"


@pytest.mark.corner
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("noise", [None, "seeded", "own"])
def test_the_same_dataset_on_all_ranks_is_divided_whatever_noise_it_draws(
    ranks,
    noise,
    num_workers,
):
    results = ranks.run(train_on_files, False, noise, num_workers, world_size=2)
    assert not any(isinstance(found, str) for found, *_ in results), results[0][0]
    assert sorted(itertools.chain.from_iterable(found for found, *_ in results)) == list(
        range(SIZE)
    )


class Crops(OwnFiles):
    """Nothing but noise of a generator that nobody has seeded tells the samples apart."""

    def __getitem__(self, index):
        return torch.from_numpy(self.noise.integers(9, size=20, dtype=np.uint8))


def train_on_crops():
    return train_on_plain(Crops(own=False, noise=np.random.default_rng()), {"batch_size": 2})


def test_samples_that_are_others_each_time_are_not_compared(ranks):
    assert [len(found) for found in ranks.run(train_on_crops, world_size=2)] == [SIZE / 2] * 2


def train_on_own_loader():
    data = DataLoader(OwnFiles(own=True), 2)
    data.is_sharded = True
    return train_on_plain(data)


@pytest.mark.costly
def test_a_loader_of_each_ranks_own_files_may_say_so(ranks):
    first, second = ranks.run(train_on_own_loader, world_size=2)
    assert sorted(first) == list(range(SIZE))
    assert sorted(second) == list(range(100, 100 + SIZE))
