"""The sampling plan: orders are bijections, shares are exact, users' samplers are drawn alike."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddpkit.data import sampler_drawing
from ddpkit.data.dealt_batches import DealtBatchSampler
from ddpkit.data.plan import CHUNK, SMALL, Order, SamplingPlan, nested_samplers
from ddpkit.data.planned_batches import PlannedBatchSampler
from ddpkit.errors import ConfigError, DataError
from ddpkit.sampler import ConcatDatasetBatchSampler

FAST = settings(max_examples=150, deadline=None, derandomize=True, database=None)


# -------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_position_is_taken_once(world_size, drop_last):
    for size, batch_size in itertools.product(range(41), range(1, 8)):
        plan = SamplingPlan(size, batch_size, world_size, drop_last)
        together = batch_size * world_size
        assert plan.global_batch_size == together
        assert len(plan) == (size // together if drop_last else -(-size // together))
        expected = 0
        for batch in range(len(plan)):
            shares = [plan.share(batch, rank) for rank in range(world_size)]
            assert [start for start, _ in shares] == [expected, *(stop for _, stop in shares[:-1])]
            counts = [stop - start for start, stop in shares]
            assert sum(counts) == plan.total(batch)
            assert max(counts) - min(counts) <= 1
            assert max(counts) <= batch_size
            expected = shares[-1][1]
        assert expected == (size // together * together if drop_last else size)


@pytest.mark.parametrize("world_size", [8, 64, 1000])
@pytest.mark.parametrize(
    ("samples", "sizes"),
    [
        (100_003, {"batch_size": 3}),
        (999, {"batch_size": 2}),
        (100_003, {"global_batch_size": 2500}),
        (100_003, {"global_batch_size": 70_000, "micro_batches": 7}),
        (20_000, {"global_batch_size": 777, "micro_batches": 2}),
    ],
)
def test_large_worlds_are_covered_exactly_once_and_balanced(world_size, samples, sizes):
    """Every rank's plan, computed in one process: nothing is asked of the others."""
    plan = SamplingPlan(samples, world_size=world_size, **sizes)
    expected = 0
    for batch in range(len(plan)):
        shares = [plan.share(batch, rank) for rank in range(world_size)]
        assert [start for start, _ in shares] == [expected, *(stop for _, stop in shares[:-1])]
        counts = [stop - start for start, stop in shares]
        assert sum(counts) == plan.total(batch)
        assert max(counts) - min(counts) <= 1
        assert max(counts) <= plan.batch_size
        expected = shares[-1][1]
    assert expected == samples


def test_large_worlds_see_every_index_once():
    samples = 30_011
    world_size = 64
    ranks = [
        PlannedBatchSampler(samples, 7, rank, world_size, shuffle=True, seed=3)
        for rank in range(world_size)
    ]
    seen = Counter(
        index
        for sampler in ranks
        for number, indices in enumerate(sampler)
        for index in indices[: sampler.count(number)]
    )
    assert len(seen) == samples
    assert set(seen.values()) == {1}
    assert len({len(sampler) for sampler in ranks}) == 1, "all keep step"


@pytest.mark.costly
@FAST
@given(
    samples=st.integers(0, 60),
    world_size=st.integers(1, 9),
    whole=st.integers(1, 30),
    pieces=st.integers(1, 5),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_global_batches_of_several_micro_batches(
    samples,
    world_size,
    whole,
    pieces,
    drop_last,
    data,
):
    pieces = min(pieces, whole)
    plan = SamplingPlan(
        samples,
        world_size=world_size,
        global_batch_size=whole,
        micro_batches=pieces,
        drop_last=drop_last,
    )
    found = []
    for batch in range(len(plan)):
        shares = [range(*plan.share(batch, rank)) for rank in range(world_size)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert sum(map(len, shares)) == plan.total(batch)
        found += [position for share in shares for position in share]
        step = sum(
            plan.total(other) for other in range(len(plan)) if other // pieces == batch // pieces
        )
        assert step == min(whole, samples - batch // pieces * whole), (
            "an optimizer step is a global batch"
        )
    assert found == list(range(samples - samples % whole if drop_last else samples))
    assert len(found) == plan.used_samples
    ends = [0, *itertools.accumulate(plan.total(batch) for batch in range(len(plan)))]
    assert [plan.done_before(batch) for batch in range(len(plan) + 1)] == ends
    for done in range(samples + 1):
        after = plan.batch_after(done)
        assert ends[after] <= done, "nothing is left out"
        assert after == len(plan) or done < ends[after + 1], (
            "no more than a part of one batch is done again"
        )
    rank = data.draw(st.integers(0, world_size - 1))
    if not samples:
        return
    options = {"global_batch_size": whole, "micro_batches": pieces, "drop_last": drop_last}
    sampler = PlannedBatchSampler(samples, 1, rank, world_size, **options)
    batches = list(sampler)
    assert len(batches) == len(sampler) == len(plan)
    for number, indices in enumerate(batches):
        share = list(range(*plan.share(number, rank)))
        assert sampler.count(number) == len(share)
        assert indices == share or (not share and len(indices) == 1)
        assert sampler.parts(number) == 1
        assert sampler.part(number) == len(share) / plan.total(number)
    skip = sampler.skip = data.draw(st.integers(0, len(batches)))
    assert list(sampler) == batches[skip:]


def test_bad_global_batch_sizes():
    for bad in (0, -3, 2.5, True):
        with pytest.raises(
            ConfigError,
            match=r"^global_batch_size=.* is not a positive whole "
            r"number",
        ):
            SamplingPlan(4, global_batch_size=bad)
    with pytest.raises(ConfigError, match=r"^global_batch_size=3 cannot be divided into 4 batches"):
        SamplingPlan(4, global_batch_size=3, micro_batches=4)


@pytest.mark.parametrize("bad", [0, -1, 2.0, "4", None, True])
def test_bad_batch_sizes(bad):
    with pytest.raises(
        ConfigError,
        match=r"^batch_size=.* is not a positive whole number: .* "
        r"Set batch_size to 1",
    ):
        SamplingPlan(4, bad)
    with pytest.raises(ValueError, match="batch_size"):
        PlannedBatchSampler(4, bad)


def test_whole_numbers_of_numpy_are_whole_numbers():
    assert len(SamplingPlan(5, np.int64(2))) == 3


# ---------------------------------------------------------------------------------- planned batches


@pytest.mark.costly
@FAST
@given(
    size=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    world_size=st.integers(1, 8),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    keep_step=st.booleans(),
    epoch=st.integers(1, 3),
)
def test_planned_batches(size, batch_size, world_size, shuffle, drop_last, keep_step, epoch):
    options = {"shuffle": shuffle, "drop_last": drop_last, "keep_step": keep_step, "seed": 4}
    samplers = [
        PlannedBatchSampler(size, batch_size, rank, world_size, **options)
        for rank in range(world_size)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    batches = [list(sampler) for sampler in samplers]
    assert [len(own) for own in batches] == [len(sampler) for sampler in samplers]
    if keep_step:
        assert len({len(own) for own in batches}) == 1
    order = Order(size, 4, epoch, shuffle=shuffle).indices(0, size)
    together = batch_size * world_size
    for number in range(max(map(len, batches))):
        joined = []
        for sampler, own in zip(samplers, batches, strict=True):
            count = sampler.count(number)
            if number < len(own):
                # a filler holds one sample and counts none
                assert len(own[number]) == max(count, 1)
                joined += own[number][:count]
            else:
                assert count == 0
            assert sampler.total(number) == min(together, size - number * together)
        assert joined == order[number * together : (number + 1) * together]


@pytest.mark.parametrize(("sizes", "numbers"), [((2, 1, 4), [2, 2, 0]), ((5, 2, 5), [2, 2, 1])])
def test_a_rank_without_a_share_yields_nothing_where_it_need_not_keep_step(sizes, numbers):
    given = {"global_batch_size": sizes[0], "micro_batches": sizes[1], "keep_step": False}
    samplers = [PlannedBatchSampler(sizes[2], 1, rank, 3, **given) for rank in range(3)]
    assert [len(sampler) for sampler in samplers] == numbers
    assert [len(list(sampler)) for sampler in samplers] == numbers


@pytest.mark.parametrize("size", [SMALL * 2 + 11, 137])
@pytest.mark.parametrize("batch_size", [1, 3, CHUNK - 1, CHUNK + 1])
def test_chunks_do_not_show(size, batch_size):
    """Positions are computed a few thousand at a time; the batches are those of the plan."""
    for rank in (0, 2):
        sampler = PlannedBatchSampler(size, batch_size, rank, 3, shuffle=True, seed=2)
        order, plan = Order(size, 2, 1).indices(0, size), sampler.plan
        shares = [plan.share(batch, rank) for batch in range(len(plan))]
        expected = [order[slice(*share)] or order[-1:] for share in shares]
        assert list(sampler) == expected
        for skip in (1, len(plan) // 2, len(plan) - 1, len(plan), len(plan) + 3):
            sampler.skip = skip
            assert list(sampler) == expected[skip:]
        assert list(sampler) == expected, "a skip holds for one iteration"


def test_batches_hold_plain_integers():
    for sampler in (PlannedBatchSampler(5, 2, shuffle=True), PlannedBatchSampler(5, 2)):
        assert {type(index) for batch in sampler for index in batch} == {int}


def test_an_epoch_is_another_order_and_comes_again():
    sampler = PlannedBatchSampler(30, 4, shuffle=True)
    orders = []
    for epoch in (1, 2, 1):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]


# ---------------------------------------------------------------------------------- users' samplers


class Growing(Sampler):
    """A sampler whose length changes from epoch to epoch, and that knows its epoch."""

    def __init__(self, length=lambda epoch: 10 + epoch):
        self.length = length
        self.told = []
        self.epoch = 0

    def set_epoch(self, epoch):
        self.told.append(epoch)
        self.epoch = epoch

    def __len__(self):
        return self.length(self.epoch)

    def __iter__(self):
        return iter(range(100 * self.epoch, 100 * self.epoch + len(self)))


class Holder:
    """A batch sampler around another, which does not pass ``set_epoch`` on."""

    def __init__(self, inner, name="sampler"):
        setattr(self, name, inner)

    def __iter__(self):
        inner = getattr(self, "sampler", None) or self.batch_sampler
        return iter(inner)


def planned(source, world_size, batch_size=2, **options):
    return [
        PlannedBatchSampler(source, batch_size, rank, world_size, **options)
        for rank in range(world_size)
    ]


def dealt(make, world_size, **options):
    return [DealtBatchSampler(make(), rank, world_size, **options) for rank in range(world_size)]


def test_a_sampler_may_change_its_length():
    """The plan, the counts and the length follow, in whichever order they are asked for."""
    ranks = [
        PlannedBatchSampler(Growing(lambda epoch: 13 - 3 * epoch), 2, rank, 2) for rank in range(2)
    ]
    for epoch in (1, 2, 3, 4):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        size = 13 - 3 * epoch
        plan = SamplingPlan(size, 2, 2)
        for rank, sampler in enumerate(ranks):
            for batch in reversed(range(len(plan))):
                start, stop = plan.share(batch, rank)
                assert sampler.count(batch) == stop - start, "asked before anything else was"
            assert len(sampler) == len(plan)
        found = [
            index
            for own in ranks
            for number, batch in enumerate(own)
            for index in batch[: own.count(number)]
        ]
        assert sorted(found) == list(range(100 * epoch, 100 * epoch + size))
        assert ranks[0].source.told == list(range(1, epoch + 1))


def test_a_batch_sampler_may_change_its_length():
    ranks = dealt(lambda: BatchSampler(Growing(), 2, drop_last=False), 2)
    lengths = []
    for epoch in (1, 4, 2):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        lengths.append(len(ranks[0]))
        found = [
            index
            for own in ranks
            for number, batch in enumerate(own)
            for index in batch[: own.count(number)]
        ]
        assert sorted(found) == list(range(100 * epoch, 100 * epoch + 10 + epoch))
    assert lengths == [3, 4, 3]


def test_one_index_per_rank():
    ranks = planned(SequentialSampler(range(3)), 3, batch_size=1)
    assert [list(sampler) for sampler in ranks] == [[[0]], [[1]], [[2]]]
    ranks = dealt(lambda: BatchSampler(range(4), 2, drop_last=False), 2)
    assert [list(sampler) for sampler in ranks] == [[[0, 1]], [[2, 3]]]


def test_drop_last_leaves_out_an_incomplete_round():
    def make():
        return BatchSampler(range(10), 2, drop_last=False)

    assert [list(sampler) for sampler in dealt(make, 2, drop_last=True)] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]
    assert [list(sampler) for sampler in dealt(make, 2)] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [8]],  # a filler: one sample, which counts nothing
    ]
    ranks = dealt(make, 2, keep_step=False)
    assert (
        [len(sampler) for sampler in ranks] == [len(list(sampler)) for sampler in ranks] == [3, 2]
    )
    assert [[sampler.count(number) for number in range(3)] for sampler in ranks] == [
        [2, 2, 2],
        [2, 2, 0],
    ]
    assert list(planned(SequentialSampler(range(7)), 2, drop_last=True)[1]) == [[2, 3]]


@pytest.mark.costly
@FAST
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=17),
    world_size=st.integers(1, 6),
    drop_last=st.booleans(),
    keep_step=st.booleans(),
    skip=st.integers(0, 4),
)
def test_dealt_batches(sizes, world_size, drop_last, keep_step, skip):
    numbers = iter(range(100))
    batches = [list(itertools.islice(numbers, size)) for size in sizes]
    ranks = dealt(lambda: batches, world_size, drop_last=drop_last, keep_step=keep_step)
    drawn = [list(sampler) for sampler in ranks]
    assert [len(own) for own in drawn] == [len(sampler) for sampler in ranks]
    if keep_step or drop_last:
        assert len({len(own) for own in drawn}) == 1
    rounds = max(map(len, drawn))
    found = []
    for number in range(rounds):
        of_round = []
        for sampler, own in zip(ranks, drawn, strict=True):
            batch = own[number] if number < len(own) else []
            count = sampler.count(number)
            assert len(batch) == count or (count == 0 and len(batch) == 1)
            of_round += [batch[:count]] if count else []
        assert ranks[0].total(number) == sum(map(len, of_round))
        found += of_round
    assert found == batches[: len(batches) // world_size * world_size if drop_last else None]
    for sampler, own in zip(ranks, drawn, strict=True):
        sampler.skip = skip
        assert list(sampler) == own[skip:]
        assert list(sampler) == own


class Numpy(Sampler):
    def __iter__(self):
        return iter(np.random.permutation(12).tolist())  # noqa: NPY002


class Python(Sampler):
    def __iter__(self):
        return iter(random.sample(range(12), 12))


RANDOM = {
    "random": lambda: RandomSampler(range(12)),
    "with replacement": lambda: RandomSampler(range(12), replacement=True),
    "own generator": lambda: RandomSampler(range(12), generator=torch.Generator().manual_seed(3)),
    "subset": lambda: SubsetRandomSampler(range(12)),
    "weighted": lambda: WeightedRandomSampler(
        torch.arange(1.0, 13.0),
        12,
        generator=torch.Generator().manual_seed(1),
    ),
    "numpy": Numpy,
    "python": Python,
}


def global_streams():
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        tuple(map(str, np.random.get_state())),  # noqa: NPY002
    )


@pytest.mark.parametrize("kind", RANDOM)
def test_random_samplers_are_drawn_alike_whatever_the_global_streams(kind):
    """On every rank, in every process that resumes, and without moving any stream; another epoch,
    another order.
    """
    orders = []
    for world in (4, 5):
        torch.manual_seed(world)
        random.seed(world)
        np.random.seed(world)  # noqa: NPY002
        torch.rand(world)
        sources = [RANDOM[kind](), RANDOM[kind]()]
        before = global_streams()
        ranks = [
            PlannedBatchSampler(source, 3, rank, 2, seed=8) for rank, source in enumerate(sources)
        ]
        for epoch in (1, 2) if world == 4 else (2,):
            for sampler in ranks:
                sampler.set_epoch(epoch)
            first, second = [list(sampler) for sampler in ranks]
            orders.append(
                [
                    index
                    for pair in zip(first, second, strict=True)
                    for batch in pair
                    for index in batch
                ]
            )
        assert global_streams() == before
    assert orders[0] != orders[1] == orders[2]
    if kind not in {"with replacement", "weighted"}:
        assert sorted(orders[0]) == list(range(12))


def test_a_generator_of_the_user_keeps_its_seed_and_state():
    def order(seed):
        generator = torch.Generator().manual_seed(seed)
        before = generator.get_state()
        sampler = DealtBatchSampler(
            BatchSampler(RandomSampler(range(50), generator=generator), 5, drop_last=False)
        )
        drawn = list(sampler)
        assert torch.equal(generator.get_state(), before)
        return drawn

    assert order(1) == order(1) != order(2)


def test_accelerators_are_not_seeded(monkeypatch):
    """``torch.manual_seed`` would seed every GPU, and alike on every rank."""
    monkeypatch.setattr(torch, "manual_seed", None)
    monkeypatch.setattr(torch.random, "manual_seed", None)
    assert len(list(PlannedBatchSampler(RandomSampler(range(12)), 4))) == 3


def test_a_failing_sampler_leaves_the_streams_alone():
    class Failing(Sampler):
        def __iter__(self):
            yield int(torch.rand(()) * 0)
            raise KeyError("lost")

    before = global_streams()
    with pytest.raises(KeyError, match="lost"):
        list(PlannedBatchSampler(Failing(), 1))
    assert global_streams() == before


def test_a_sampler_is_drawn_once_an_epoch():
    class Counting(Growing):
        drawn = 0

        def __iter__(self):
            self.drawn += 1
            return super().__iter__()

    for make in (
        lambda source: PlannedBatchSampler(source, 2),
        lambda source: DealtBatchSampler(BatchSampler(source, 2, drop_last=False)),
    ):
        source = Counting()
        sampler = make(source)
        for epoch in (1, 2):
            sampler.set_epoch(epoch)
            list(sampler)
            assert (len(sampler), sampler.total(0), sampler.count(0)) == (6, 2, 2)
            list(sampler)
        assert source.drawn == 2


@pytest.mark.parametrize(
    "names",
    [["sampler"], ["batch_sampler"], ["sampler", "batch_sampler", "sampler"]],
)
def test_set_epoch_reaches_inner_samplers_once(names):
    innermost = Growing()
    outer = innermost
    for name in names:
        outer = Holder(outer, name)
    for sampler in (PlannedBatchSampler(outer, 2), DealtBatchSampler(outer)):
        innermost.told.clear()
        sampler.set_epoch(5)
        assert innermost.told == [5]
    setattr(outer, names[-1], outer)  # a sampler that holds itself
    assert [id(one) for one in nested_samplers(outer)] == [id(outer)]


def test_nothing_to_draw():
    sampler = PlannedBatchSampler(Growing(lambda epoch: 3 - epoch), 2)
    sampler.set_epoch(3)
    with pytest.raises(
        DataError,
        match=r"Growing yields nothing in epoch 3: there is no data "
        r"to train on",
    ):
        len(sampler)
    once = DealtBatchSampler(iter([[0], [1]]))
    assert list(once) == [[0], [1]]
    once.set_epoch(2)
    with pytest.raises(DataError, match="yields nothing in epoch 2"):
        list(once)


def test_samplers_inside_a_sampler_of_several_are_found():
    generators = [torch.Generator(), torch.Generator()]
    inner = [RandomSampler(range(4), generator=generator) for generator in generators]
    outer = ConcatDatasetBatchSampler(inner, [1, 2])
    assert [
        one.generator for one in nested_samplers(outer) if isinstance(one, RandomSampler)
    ] == generators
    before = [generator.get_state() for generator in generators]
    dealt = DealtBatchSampler(outer, 0, 1, seed=3)
    assert list(dealt) == list(DealtBatchSampler(outer, 0, 1, seed=3))
    for generator, state in zip(generators, before, strict=True):
        assert torch.equal(generator.get_state(), state)


class Endless:
    def __iter__(self):
        return itertools.count()


def test_a_sampler_without_an_end_is_an_error_and_no_hang(monkeypatch):
    monkeypatch.setattr(sampler_drawing, "MOST_DRAWN", 1000)
    with pytest.raises(
        DataError,
        match=r"^Endless seems to have no end: it has yielded 1,001 "
        r"times\. .* Let it end",
    ):
        list(PlannedBatchSampler(Endless(), 2))
    known = SubsetRandomSampler(range(3000))
    assert len(list(PlannedBatchSampler(known, 2))) == 1500, (
        "one that has a len() may be as long as it is"
    )


def test_batches_of_any_kind():
    dealt = DealtBatchSampler([(index for index in (1, 2)), (3,)], 0, 1)
    assert list(dealt) == [[1, 2], (3,)]
    with pytest.raises(
        DataError,
        match=r"^list yields a batch without any index in epoch 1: "
        r"leave empty ones out",
    ):
        list(DealtBatchSampler([[1], [], [2]], 0, 1))
    once = DealtBatchSampler((batch for batch in [[1], [2]]), 0, 1)
    assert list(once) == [[1], [2]]
    once.set_epoch(2)
    with pytest.raises(
        DataError,
        match="generator yields nothing in epoch 2: .* can be iterated only once",
    ):
        list(once)


def test_what_was_drawn_in_words():
    assert PlannedBatchSampler(5, 2).drawn_words() == {}
    words = [PlannedBatchSampler(draw, 1).drawn_words() for draw in ([1, 2], [1, 2], [2, 1])]
    assert words[0] == words[1] != words[2]
    (name,) = words[0]
    assert name.startswith("draw of list for epoch 1 (its randomness must follow from a seed")
    objects = [DealtBatchSampler([[object()]], 0, 1).drawn_words() for _ in range(2)]
    assert objects[0] == objects[1], "where an object lies in memory is no difference"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("samples", [1, 7, 12, 30])
def test_shards_of_a_rank_are_the_batches_of_as_many_ranks_one_after_another(world_size, samples):
    """Six ranks' batches, on fewer ranks: with global batches in two micro-batches, and user's
    batches.
    """
    inner = BatchSampler(SequentialSampler(range(samples)), 2, drop_last=False)

    def planned(rank, world_size, shards):
        sizes = {"global_batch_size": 13, "micro_batches": 2, "shards": shards}
        return PlannedBatchSampler(samples, 1, rank, world_size, shuffle=True, **sizes)

    def dealt(rank, world_size, shards):
        return DealtBatchSampler(inner, rank, world_size, shards=shards)

    for make in (planned, dealt):
        apart = [make(rank, 6, 1) for rank in range(6)]
        shards = 6 // world_size
        batches = [list(one) for one in apart]
        for rank in range(world_size):
            own = make(rank, world_size, shards)
            mine = range(rank * shards, (rank + 1) * shards)
            numbers = [(number, shard) for number in range(len(apart[0])) for shard in mine]
            assert list(own) == [batches[shard][number] for number, shard in numbers]
            assert len(own) == len(numbers)
            assert [own.count(place) for place in range(len(own))] == [
                apart[shard].count(number) for number, shard in numbers
            ]
            total = [
                sum(own.total(place + one) for one in range(shards))
                for place in range(0, len(own), shards)
            ]
            assert total == [apart[0].total(number) for number in range(len(apart[0]))]
            own.skip = 1
            assert list(own) == [batches[shard][number] for number, shard in numbers][1:]
