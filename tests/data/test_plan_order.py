"""Orders are bijections that look like chance, and cost the same wherever they are asked."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ddpkit.data.plan import SMALL, Order
from ddpkit.data.planned_batches import PlannedBatchSampler
from ddpkit.seed import mix, mix_key

FAST = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def whole(size, seed=1, epoch=1):
    return Order(size, seed, epoch).indices(0, size)


# ------------------------------------------------------------------------------------------- orders


def test_small_orders_are_bijections():
    for size in range(1, 301):
        assert sorted(whole(size)) == list(range(size))


@pytest.mark.parametrize(
    "size",
    [SMALL - 1, SMALL, SMALL + 1, 2**15, 2**16 - 1, 2**16, 2**16 + 1, 10**6],
)
def test_large_orders_are_bijections(size):
    found = np.array(whole(size, seed=3, epoch=2))
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), np.arange(size))
    assert not np.array_equal(found, np.arange(size))


@pytest.mark.parametrize("size", [50, SMALL + 1])
def test_seed_and_epoch_matter_independently(size):
    """With seed + epoch, (10, 2) and (11, 1) would give one order."""
    pairs = list(itertools.product([0, 1, 2, 10, 11, -1, 2**40, 2**63], [0, 1, 2, 3, 1000]))
    orders = {tuple(whole(size, seed, epoch)) for seed, epoch in pairs}
    assert len(orders) == len(pairs)
    assert whole(size, 10, 2) == whole(size, 10, 2)


@pytest.mark.parametrize("size", [1000, 20_000])
def test_successive_epochs_and_seeds_are_uncorrelated(size):
    """Pearson's r of independent permutations has a standard deviation of 1/sqrt(size)."""
    orders = [whole(size, 1, epoch) for epoch in range(1, 7)] + [
        whole(size, seed, 1) for seed in range(2, 7)
    ]
    correlations = np.corrcoef(np.array([*orders, list(range(size))], dtype=float))
    assert np.abs(correlations[~np.eye(len(correlations), dtype=bool)]).max() < 4.5 / size**0.5
    for one, other in itertools.combinations(orders, 2):  # in one place out of `size` on average
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 9


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.costly
def test_all_permutations_of_four_are_alike_frequent():
    draws = 12_000
    found = Counter(
        tuple(whole(4, seed, epoch)) for seed in range(draws // 100) for epoch in range(100)
    )
    assert len(found) == 24
    # 23 degrees of freedom, p = 0.001
    assert chi_square(np.array(list(found.values())), draws / 24) < 49.7


def test_values_and_positions_of_a_large_order_are_uniform():
    """Sixteen by sixteen cells of position and value, and of position and how far the next value
    is.
    """
    size = 50_000
    cells = 16
    order = np.array(whole(size, 5, 4))
    for values in (order, (np.roll(order, -1) - order) % size, order % cells * (size // cells)):
        table, _, _ = np.histogram2d(
            np.arange(size),
            values,
            bins=cells,
            range=[[0, size], [0, size]],
        )
        assert chi_square(table, size / cells**2) < 330  # at most 255 degrees of freedom, p = 0.001


@pytest.mark.costly
@pytest.mark.parametrize("size", [SMALL + 5, pytest.param(3 * SMALL, marks=pytest.mark.slow)])
def test_every_position_takes_every_value_over_the_epochs(size):
    """Where the first sample stands, and what stands first, over many epochs of a Feistel order."""
    epochs = 2000
    cells = 16
    first = np.array([Order(size, 9, epoch).indices(0, 1)[0] for epoch in range(epochs)])
    last = np.array([Order(size, 9, epoch).indices(size - 1, size)[0] for epoch in range(epochs)])
    for values in (first, last):
        counts, _ = np.histogram(values, bins=cells, range=(0, size))
        assert chi_square(counts, epochs / cells) < 37.7  # 15 degrees of freedom, p = 0.001


@pytest.mark.costly
@FAST
@given(
    size=st.one_of(st.integers(1, 100), st.integers(SMALL - 2, SMALL + 2000)),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    shuffle=st.booleans(),
)
def test_seeking_is_slicing(size, cut, shuffle):
    order = Order(size, 7, 3, shuffle=shuffle)
    start, stop = sorted(int(one * size) for one in cut)
    assert order.indices(start, stop) == order.indices(0, size)[start:stop]
    positions = np.arange(start, stop)[::-1]
    assert order.at(positions).tolist() == order.indices(start, stop)[::-1]


def test_positions_of_any_shape():
    order = Order(SMALL * 3, 7, 3)
    block = order.at(np.arange(600).reshape(20, 30))
    assert block.reshape(-1).tolist() == order.indices(0, 600)


def test_a_billion_samples_start_like_ten():
    tracemalloc.start()
    began = time.process_time()
    sampler = PlannedBatchSampler(10**9, 32, rank=3, world_size=8, shuffle=True)
    assert len(sampler) == 10**9 // 256
    sampler.skip = len(sampler) - 2000
    batches = list(itertools.islice(sampler, 1500))
    seconds = time.process_time() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(itertools.chain(*batches))) == 1500 * 32
    assert peak < 8 << 20
    assert seconds < 2


def test_mix_is_a_bijection_on_samples_and_keys_depend_on_the_order():
    assert len({mix(value) for value in range(5000)}) == 5000
    assert mix(-1) == mix(2**64 - 1)
    assert mix_key(1, 2) != mix_key(2, 1)
    assert len({mix_key(a, b) for a in range(60) for b in range(60)}) == 3600


def test_trivial_orders():
    assert whole(0) == []
    assert whole(1) == [0]
    assert Order(5, 1, 1, shuffle=False).indices(1, 4) == [1, 2, 3]


@pytest.mark.parametrize("size", [SMALL + 1, 2**15, 2**15 + 1, 10**6 + 3])
def test_the_network_hardly_ever_walks(size):
    """Its domain is larger than the set by less than one part in a hundred."""
    order = Order(size, 1, 1)
    assert size <= int(order._high_size) << int(order._low_bits) < 1.01 * size


@pytest.mark.parametrize("size", [SMALL + 1, 50_021])
def test_neighbours_are_not_neighbours_afterwards(size):
    """The distance of what stands next to each other is spread evenly over the whole set."""
    found = np.concatenate([np.diff(np.array(whole(size, seed))) % size for seed in range(8)])
    counts = np.histogram(found, bins=64, range=(0, size))[0]
    expected = found.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 128, (
        "chi-square of 63 degrees: 103 is one in a thousand"
    )
