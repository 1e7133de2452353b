"""The samplers that recipes name: orders, seeds, epochs, lengths, and what they refuse."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

import ddpkit
from ddpkit import sampler
from ddpkit.data import PlannedBatchSampler
from ddpkit.dataloader import (
    Sharding,
    default_seed,
    distributed_loader_specifics,
    make_dataloader,
    plan_of,
    reshard,
    shard,
)
from ddpkit.errors import BucketingError, ConfigError, DataError
from ddpkit.sampler import (
    BalancingDataSampler,
    ConcatDatasetBatchSampler,
    DistributedSamplerWrapper,
    DynamicBatchSampler,
    ReproducibleRandomSampler,
    ReproducibleWeightedRandomSampler,
)
from ddpkit.seed import rng_state
from tests.launching import soon

NAMES = [
    "BalancingDataSampler",
    "ConcatDatasetBatchSampler",
    "DistributedSamplerWrapper",
    "DynamicBatchSampler",
    "ReproducibleRandomSampler",
    "ReproducibleWeightedRandomSampler",
]
LENGTHS = np.random.default_rng(3).lognormal(2.0, 0.6, 500).round(2).tolist()


class Items:
    """Items behind which stand cheap entries, as in SpeechBrain's DynamicItemDataset."""

    def __init__(self, entries, dynamic=None):
        self.data = entries
        self.data_ids = list(entries)
        self.dynamic = dynamic or {}
        self.keys = ["heavy"]
        self.computed = Counter()

    def __len__(self):
        return len(self.data_ids)

    def __getitem__(self, index):
        entry = self.data[self.data_ids[index]]
        self.computed.update(self.keys)
        return {
            key: self.dynamic[key](entry) if key in self.dynamic else entry[key]
            for key in self.keys
        }

    @contextlib.contextmanager
    def output_keys_as(self, keys):
        before = self.keys
        self.keys = keys
        try:
            yield
        finally:
            self.keys = before


class Growing:
    """As many indices as the epoch's number plus three, and no length of its own before that."""

    def __init__(self):
        self.epoch = 1
        self.told = []

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.told.append(epoch)

    def __len__(self):
        return 3 + self.epoch

    def __iter__(self):
        return iter(range(10, 13 + self.epoch))


def dynamic(lengths=LENGTHS, longest=100.0, buckets=8, **options):
    return DynamicBatchSampler(lengths, longest, buckets, lengths_list=lengths, **options)


MAKERS = {
    "random": lambda **options: ReproducibleRandomSampler(range(500), **options),
    "random, replacement": lambda **options: ReproducibleRandomSampler(
        range(500),
        replacement=True,
        **options,
    ),
    "weighted": lambda **options: ReproducibleWeightedRandomSampler(
        [1.0, 2.0] * 250,
        300,
        True,
        **options,
    ),
    "balancing": lambda **options: BalancingDataSampler(
        [{"y": k % 3} for k in range(500)],
        "y",
        **options,
    ),
    "dynamic": dynamic,
    "wrapper": lambda **options: DistributedSamplerWrapper(range(500), 2, 1, **options),
}


@pytest.mark.parametrize("name", NAMES)
def test_recipes_find_them_where_they_look(name):
    assert getattr(ddpkit.dataio.sampler, name) is getattr(sampler, name)


# --------------------------------------------------------------------------------- seeds and epochs


@pytest.mark.parametrize("kind", MAKERS)
def test_the_order_follows_seed_and_epoch(kind):
    def order(seed, epoch):
        made = MAKERS[kind](seed=seed)
        made.set_epoch(epoch)
        first = list(made)
        assert list(made) == first, "the same epoch twice"
        return str(first)

    orders = {(seed, epoch): order(seed, epoch) for seed in (1, 2, 3) for epoch in (0, 1, 2)}
    assert len(set(orders.values())) == len(orders), "seed 1 epoch 2 is not seed 2 epoch 1"
    assert order(2, 1) == orders[2, 1]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_seed_that_is_left_out_is_the_experiments(kind, monkeypatch):
    def order(**options):
        return str(list(MAKERS[kind](**options)))

    monkeypatch.delenv("DDPKIT_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("SB_GLOBAL_SEED", raising=False)
    without = order()
    pinned = order(seed=9)
    monkeypatch.setenv("DDPKIT_GLOBAL_SEED", "77")
    assert order() == order(seed=77) != without
    assert order(seed=9) == pinned


@pytest.mark.parametrize("kind", MAKERS)
def test_the_global_streams_stay_where_they_are(kind):
    def states():
        state = rng_state()
        return state["python"], state["numpy"]["pos"], state["torch_cpu"].tolist()

    before = states()
    list(MAKERS[kind]())
    assert states() == before


@pytest.mark.parametrize("kind", ["random", "weighted", "balancing"])
def test_a_generator_is_refused(kind):
    with pytest.raises(TypeError, match="unexpected keyword argument 'generator'"):
        MAKERS[kind](generator=torch.Generator())


# ------------------------------------------------------------------------------------------- random


def test_reproducible_random_sampler_is_shuffle_with_the_experiments_seed():
    loader = shard(range(40), Sharding(seed=default_seed()), batch_size=40, shuffle=True)
    own = ReproducibleRandomSampler(range(40))
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        own.set_epoch(epoch)
        assert next(iter(loader)).tolist() == list(own)


@pytest.mark.parametrize("number", [1, 7, 10, 11, 25])
def test_reproducible_random_sampler_draws_as_many_as_asked(number):
    drawn = list(ReproducibleRandomSampler(range(10), seed=1, num_samples=number))
    assert len(drawn) == number
    counts = Counter(drawn)
    assert set(counts.values()) <= {number // 10, number // 10 + 1}
    if number == 25:
        assert drawn[:10] != drawn[10:20], "another order in the second round"


def test_reproducible_random_sampler_stores_nothing():
    started = time.monotonic()
    first = iter(ReproducibleRandomSampler(range(10**12), seed=1))
    assert 0 <= next(first) < 10**12
    assert soon(started, 5.0)


def test_reproducible_random_sampler_follows_a_source_that_grows():
    data = list(range(4))
    own = ReproducibleRandomSampler(data, seed=1)
    assert sorted(own) == [0, 1, 2, 3]
    data += [4, 5]
    assert sorted(own) == [0, 1, 2, 3, 4, 5]
    assert len(own) == 6


# ----------------------------------------------------------------------------------------- weighted


def test_weights_decide_how_often():
    drawn = Counter(ReproducibleWeightedRandomSampler([3.0, 0.0, 1.0], 4000, seed=1))
    assert drawn[1] == 0
    assert drawn[0] / drawn[2] == pytest.approx(3.0, rel=0.15)
    once = list(ReproducibleWeightedRandomSampler([3.0, 0.0, 1.0], 2, False, seed=1))
    assert sorted(once) == [0, 2]


def test_balancing_draws_the_classes_alike():
    data = Items({str(k): {"y": "rare" if k < 10 else "usual"} for k in range(500)})
    balancing = BalancingDataSampler(data, "y", seed=4)
    assert len(balancing) == 500
    rare = sum(index < 10 for index in balancing)
    assert 180 < rare < 320
    assert data.computed == {"y": 500}


def test_balancing_computes_the_key_alone_where_it_is_dynamic():
    data = Items(
        {str(k): {"n": k} for k in range(20)},
        {"y": lambda entry: entry["n"] % 2, "heavy": None},
    )
    balancing = BalancingDataSampler(data, "y", num_samples=7)
    assert len(list(balancing)) == len(balancing) == 7
    assert data.computed == {"y": 20}
    assert data.keys == ["heavy"]
    with pytest.raises(KeyError, match="z"):
        BalancingDataSampler([{"y": 1}], "z")


# ------------------------------------------------------------------------------------------- concat


def test_concat_batches_take_from_every_part():
    parts = [
        ReproducibleRandomSampler(range(10), seed=1),
        ReproducibleRandomSampler(range(7), seed=2),
    ]
    batches = ConcatDatasetBatchSampler(parts, [2, 3])
    assert (len(batches), batches.batch_size, batches.offsets) == (2, 5, [0, 10])
    epochs = []
    for epoch in (1, 2, 1):
        batches.set_epoch(epoch)
        drawn = list(batches)
        assert [len(batch) for batch in drawn] == [5, 5]
        assert all(index < 10 for batch in drawn for index in batch[:2])
        assert all(10 <= index < 17 for batch in drawn for index in batch[2:])
        assert len({index for batch in drawn for index in batch}) == 10
        epochs.append(drawn)
    assert epochs[0] == epochs[2] != epochs[1]
    assert parts[1].epoch == 1


def test_concat_offsets_are_those_of_the_parts_and_not_of_what_is_drawn():
    parts = [
        ReproducibleWeightedRandomSampler([1.0] * 30, 4),
        ReproducibleRandomSampler(range(20), num_samples=6),
        SequentialSampler(range(5)),
    ]
    batches = ConcatDatasetBatchSampler(parts, (1, 1, 1), epoch=3)
    assert batches.offsets == [0, 30, 50]
    assert [one.epoch for one in parts[:2]] == [3, 3], (
        "a sampler that knows no epochs stands in no other's way"
    )
    assert [batch[2] for batch in batches] == [50, 51, 52, 53]


@pytest.mark.parametrize(
    ("samplers", "sizes", "match"),
    [
        (range(3), [1], r"^samplers=range\(0, 3\) and batch_sizes=\[1\] must be lists"),
        ([range(3)], 1, r"batch_sizes=1 must be lists of the same length"),
        ([], [], r"^samplers=\[\] and"),
        ([range(3)], [1, 2], r"must be lists of the same length"),
        ([range(3)], [0], r"^batch_sizes=0 is not a positive whole number"),
    ],
)
def test_concat_arguments_that_cannot_work(samplers, sizes, match):
    with pytest.raises(ValueError, match=match):
        ConcatDatasetBatchSampler(samplers, sizes)


# ------------------------------------------------------------------------------------------ dynamic


@pytest.mark.parametrize("ordering", ["random", "ascending", "descending"])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("most", [None, 6])
def test_dynamic_batches(ordering, shuffle, drop_last, most):
    """Each sample once, batches that fit, their number the same in every epoch, in the order asked
    for.
    """
    batches = dynamic(
        batch_ordering=ordering,
        shuffle=shuffle,
        drop_last=drop_last,
        max_batch_ex=most,
    )
    bounds = batches._bucket_boundaries
    for epoch in (1, 2, 3):
        batches.set_epoch(epoch)
        drawn = list(batches)
        assert len(drawn) == len(batches)
        indices = [index for batch in drawn for index in batch]
        assert len(set(indices)) == len(indices)
        longest = [max(batches.get_durations(batch)) for batch in drawn]
        if ordering != "random":
            assert longest == sorted(longest, reverse=ordering == "descending")
        full = 0
        for batch, length in zip(drawn, longest, strict=True):
            buckets = set(np.searchsorted(bounds, batches.get_durations(batch)).tolist())
            assert len(buckets) == 1, "one bucket"
            size = min(int(100.0 / bounds[buckets.pop()]), most or math.inf)
            assert len(batch) * length <= 100.0
            assert len(batch) <= size
            full += len(batch) == size
        if drop_last:
            assert full == len(drawn)
        else:
            assert sorted(indices) == list(range(500))
            assert full >= len(drawn) - len(bounds)


def test_dynamic_batches_change_with_the_epoch_unless_nothing_is_random():
    def epochs(**options):
        batches = dynamic(**options)
        found = []
        for epoch in (1, 2):
            batches.set_epoch(epoch)
            found.append(list(batches))
        return found

    first, second = epochs()
    assert {tuple(sorted(batch)) for batch in first} != {tuple(sorted(batch)) for batch in second}
    first, second = epochs(shuffle=False)
    assert first != second
    assert sorted(map(tuple, first)) == sorted(map(tuple, second)), (
        "the same batches in another order"
    )
    first, second = epochs(shuffle=False, batch_ordering="ascending")
    assert first == second


def test_dynamic_batches_are_made_once_an_epoch(monkeypatch):
    made = []
    batches = dynamic()
    original = DynamicBatchSampler._make
    monkeypatch.setattr(
        DynamicBatchSampler,
        "_make",
        lambda self: made.append(self.epoch) or original(self),
    )
    for epoch in (1, 2):
        batches.set_epoch(epoch)
        len(batches)
        list(batches)
        list(batches)
        list(shard(LENGTHS, Sharding(0, 2), batch_sampler=batches).batch_sampler)
    assert made == [1, 2, 1], "the loader began with its own first epoch"


def test_the_quantiles_are_those_of_the_log_normal_distribution():
    """Against ``scipy.stats.lognorm.ppf([0.25, 0.5, 0.75], 1)``, computed once."""
    bounds = dynamic(buckets=3)._bucket_boundaries
    expected = np.array([0.5094162838632775, 1.0, 1.9630310841582578])
    assert bounds == pytest.approx(expected * (100.0 / expected[-1]), rel=1e-12)
    assert dynamic(buckets=1)._bucket_boundaries.tolist() == [100.0]


def test_dynamic_batches_of_explicit_boundaries():
    lengths = [1, 4, 4, 5, 6, 11, 12, 0, 30]
    batches = DynamicBatchSampler(
        lengths,
        12,
        None,
        shuffle=False,
        batch_ordering="ascending",
        bucket_boundaries=[4, 6],
        lengths_list=lengths,
    )
    assert list(batches) == [[7], [0, 1, 2], [3, 4], [5], [6], [8]]
    assert batches.get_durations([0, 8]) == [1.0, 30.0]


def test_lengths_are_asked_of_the_entries_and_nothing_is_loaded():
    data = Items(
        {str(k): {"duration": length, "n": 2 * length} for k, length in enumerate(LENGTHS)}
    )
    assert list(DynamicBatchSampler(data, 100.0, 8, seed=1)) == list(dynamic(seed=1))
    doubled = DynamicBatchSampler(data, 200.0, 8, lambda item: item["n"], seed=1)
    assert list(doubled) == list(dynamic(seed=1))
    assert not data.computed
    part = Items(data.data)
    part.data_ids = part.data_ids[::2]
    assert DynamicBatchSampler(part, 100.0, 8).get_durations([1]) == [LENGTHS[2]]


@pytest.mark.parametrize(
    ("lengths", "longest", "expected"),
    [
        ([5.0], 10.0, [1]),
        ([50.0], 10.0, [1]),
        ([0.0, 0.0, 0.0], 10.0, [3]),
        ([4.0] * 7, 10.0, [1, 2, 2, 2]),
        ([10.0] * 3, 10.0, [1, 1, 1]),
        ([4.0, 50.0, 50.0], 10.0, [1, 1, 1]),
    ],
)
def test_degenerate_lengths(lengths, longest, expected):
    batches = DynamicBatchSampler(
        lengths,
        longest,
        None,
        bucket_boundaries=[3.0, 5.0, 10.0],
        lengths_list=lengths,
    )
    drawn = list(batches)
    assert sorted(len(batch) for batch in drawn) == expected
    assert sorted(index for batch in drawn for index in batch) == list(range(len(lengths)))


def test_verbose_tells_the_buckets(caplog):
    caplog.set_level("INFO", logger="ddpkit")
    DynamicBatchSampler([1, 99], 10.0, 2, lengths_list=[1, 99], verbose=True)
    assert "Lengths from 10.00 to inf: 1 samples, 1 in a batch." in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_buckets": None}, BucketingError, r"neither num_buckets nor bucket_boundaries"),
        (
            {"lengths_list": None},
            BucketingError,
            (
                r"cannot know how long the samples of list "
                r"are.*Give lengths_list"
            ),
        ),
        (
            {"lengths_list": [1.0]},
            ConfigError,
            (
                r"^lengths_list has 1 entries for the 3 samples "
                r"of list"
            ),
        ),
        ({"lengths_list": [1.0, -2.0, 3.0]}, DataError, r"must be numbers, 0 or more"),
        ({"lengths_list": [1.0, 2.0, math.nan]}, DataError, r"must be numbers, 0 or more"),
        ({"lengths_list": ["a", 1, 2]}, ValueError, r"could not convert string to float"),
        ({"lengths_list": [[1], [1], [2]]}, DataError, r"one for each of some samples"),
        ({"dataset": [], "lengths_list": []}, DataError, r"one for each of some samples"),
        ({"max_batch_length": 0}, ConfigError, r"^max_batch_length=0 is not a positive number"),
        ({"max_batch_length": math.nan}, ConfigError, r"^max_batch_length=nan"),
        ({"num_buckets": 0}, ConfigError, r"^num_buckets=0 is not a positive whole number"),
        ({"max_batch_ex": 0}, ConfigError, r"^max_batch_ex=0 is not a positive whole number"),
        ({"batch_ordering": "sorted"}, ConfigError, r"^batch_ordering='sorted' is not known"),
        (
            {"bucket_boundaries": [2, 1]},
            ConfigError,
            (
                r"^bucket_boundaries=\[2, 1\] must be "
                r"lengths above 0"
            ),
        ),
        ({"bucket_boundaries": [1, 1]}, ConfigError, r"each greater than the one before"),
        ({"bucket_boundaries": [0, 1]}, ConfigError, r"must be lengths above 0"),
    ],
)
def test_dynamic_arguments_that_cannot_work(options, error, match):
    given = {
        "dataset": [1, 2, 3],
        "max_batch_length": 10,
        "num_buckets": 2,
        "lengths_list": [1, 2, 3],
        **options,
    }
    with pytest.raises(error, match=match):
        DynamicBatchSampler(**given)


def test_errors_are_those_that_callers_catch():
    assert issubclass(BucketingError, (ConfigError,))
    assert issubclass(BucketingError, NotImplementedError)
    assert issubclass(BucketingError, RuntimeError)
    assert issubclass(BucketingError, ValueError)


@pytest.mark.slow
def test_a_million_lengths_take_a_second_or_two():
    lengths = np.random.default_rng(1).lognormal(2.0, 0.6, 1_000_000)
    started = time.monotonic()
    batches = DynamicBatchSampler(lengths, 300.0, 30, lengths_list=lengths)
    assert sum(len(batch) for batch in batches) == 1_000_000
    assert soon(started, 10.0)  # about one, on an idle machine


# ------------------------------------------------------------------------------------------ wrapper


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_one_index_or_one_batch_per_rank(world, shuffle):
    """A tuple of one was taken for what it held."""
    for inner in ([7, 5, 3][:world], [[0, 1], [2], [3, 4]][:world]):
        found = [
            list(DistributedSamplerWrapper(inner, world, rank, shuffle)) for rank in range(world)
        ]
        assert all(len(part) == 1 for part in found)
        assert sorted(str(part[0]) for part in found) == sorted(map(str, inner))


def test_the_length_may_change_between_epochs():
    wrappers = [DistributedSamplerWrapper(Growing(), 2, rank, seed=1) for rank in range(2)]
    for epoch in (1, 5, 3, 4):
        for one in wrappers:
            one.set_epoch(epoch)
        found = [list(one) for one in wrappers]
        assert (
            {len(part) for part in found}
            == {len(one) for one in wrappers}
            == {math.ceil((3 + epoch) / 2)}
        )
        assert set(found[0] + found[1]) == set(range(10, 13 + epoch))


@pytest.mark.parametrize(("drop_last", "each"), [(True, 3), (False, 4)])
def test_the_wrapper_honours_drop_last(drop_last, each):
    found = [
        list(DistributedSamplerWrapper(range(10), 3, rank, False, drop_last=drop_last))
        for rank in range(3)
    ]
    assert [len(part) for part in found] == [each] * 3
    drawn = [index for part in found for index in part]
    assert len(set(drawn)) == (9 if drop_last else 10)
    fewer = [
        list(DistributedSamplerWrapper(range(1), 3, rank, drop_last=drop_last)) for rank in range(3)
    ]
    assert fewer == ([[], [], []] if drop_last else [[0], [0], [0]])


@pytest.mark.parametrize("own", [False, True])
def test_a_random_sampler_inside_the_wrapper_is_drawn_alike(own):
    """Each rank has a random stream of its own by then; drawn from it, the shares would overlap."""

    def share(rank, epoch, seed):
        torch.manual_seed(100 + rank)
        generator = torch.Generator().manual_seed(seed) if own else None
        inner = RandomSampler(range(12), generator=generator)
        wrapper = DistributedSamplerWrapper(
            inner,
            3,
            rank,
            shuffle=False,
            seed=None if own else seed,
        )
        wrapper.set_epoch(epoch)
        return list(wrapper)

    def drawn(*args):
        return [index for rank in range(3) for index in share(rank, *args)]

    assert sorted(drawn(1, 5)) == list(range(12))
    assert len({tuple(drawn(epoch, seed)) for epoch in (1, 2) for seed in (5, 6)}) == 4


def test_the_wrapper_is_a_division_made_already():
    for rank in range(2):
        wrapper = DistributedSamplerWrapper(range(8), 2, rank, shuffle=False)
        expected = [[rank, rank + 2], [rank + 4, rank + 6]]
        loader = shard(range(8), Sharding(rank, 2), sampler=wrapper, batch_size=2)
        assert [batch.tolist() for batch in loader] == expected
        ready = DataLoader(range(8), 2, sampler=wrapper)
        assert reshard(ready, Sharding(rank, 2)) is ready
        loader.set_epoch(6)
        assert wrapper.epoch == 6
    assert list(DistributedSamplerWrapper(range(3), shuffle=False)) == [0, 1, 2], (
        "one process by itself"
    )


def test_the_wrapper_tells_the_inner_sampler_the_epoch():
    inner = Growing()
    wrapper = DistributedSamplerWrapper(inner, 2, 0)
    wrapper.set_epoch(4)
    assert inner.told == [4]
    assert wrapper.sampler is wrapper.dataset is inner


# --------------------------------------------------------------------- loader arguments that divide


def test_distributed_loader_specifics_leave_alone_what_they_cannot_divide(caplog):
    """CONTRACT 1.10: one process, and streams."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    given = {"batch_size": 2, "shuffle": True}
    assert distributed_loader_specifics(False, 0, range(4), given) is given
    caplog.set_level("WARNING", logger="ddpkit")
    assert distributed_loader_specifics(True, 0, Stream(), given) is given
    assert "Stream is a stream: give it to Brain.fit, which divides it." in caplog.text


def test_arguments_that_hold_a_share_are_not_divided_again():
    """CONTRACT 1.10: a loader made with them gives the share, and is divided as a whole when it is
    given to ``fit``.
    """
    planned = PlannedBatchSampler(10, 2, rank=1, world_size=2)
    loader = make_dataloader(range(10), batch_sampler=planned)
    assert loader.batch_sampler is planned
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7], [9]]
    alone = reshard(loader, Sharding())
    assert sorted(index for batch in alone for index in batch.tolist()) == list(range(10))
    whole = shard(range(10), Sharding(1, 2), batch_sampler=PlannedBatchSampler(10, 2))
    assert [plan_of(whole).count(number) for number in range(3)] == [2, 2, 0], (
        "of one process: dealt out by batches"
    )


def test_a_recovered_loader_says_how_much_it_skips_under_its_old_name(tmp_path):
    """CONTRACT 1.10 and decision 14: names beginning with ``_speechbrain_``."""
    loader = make_dataloader(range(6), batch_size=2)
    assert loader._speechbrain_recovery_skip_to is None
    next(iter(loader))
    loader._speechbrain_save(tmp_path / "loader")
    again = make_dataloader(range(6), batch_size=2)
    again._speechbrain_load(tmp_path / "loader", False)
    assert again._speechbrain_recovery_skip_to == 1
    assert [batch.tolist() for batch in again] == [[2, 3], [4, 5]]
    assert again._speechbrain_recovery_skip_to is None
