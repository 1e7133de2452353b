"""Streams and loaders of batches: divided over ranks and workers, every item once, in the same
global batches.
"""

from __future__ import annotations

import gc
import itertools
import logging
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ddpkit.data import streams
from ddpkit.data.stream_kinds import is_sharded
from ddpkit.data.stream_shard import StreamShard
from ddpkit.dataloader import Sharding, deal_batches, is_batches, reshard, set_epoch, shard
from ddpkit.errors import ConfigError, DataError

# more workers than processors, for short
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Stream(IterableDataset):
    """The numbers from 1000 * epoch on; divides itself over its loader's workers, as torch's
    documentation shows.
    """

    def __init__(self, size=10):
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(1000 * self.epoch + first, 1000 * self.epoch + self.size, step))


class Lazy(Stream):
    """Minds its workers only when its first item is asked for, and again at every item."""

    def __iter__(self):
        for number in range(self.size):
            worker = get_worker_info()
            if worker is None or number % worker.num_workers == worker.id:
                yield number


class Files(Stream):
    """Some files with three numbers each, which can be shared out; in the manner of Hugging Face's
    datasets.
    """

    def __init__(self, files):
        super().__init__()
        self.files = list(files)

    @property
    def num_shards(self):
        return len(self.files)

    def shard(self, num_shards, index, contiguous=True):
        each, more = divmod(len(self.files), num_shards)
        start = index * each + min(index, more)
        # it begins with no epoch
        return type(self)(self.files[start : start + each + (index < more)])

    def __iter__(self):
        worker = get_worker_info()
        files = self.files if worker is None else self.files[worker.id :: worker.num_workers]
        return iter(
            [1000 * self.epoch + 10 * file + number for file in files for number in range(3)]
        )


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def plain(batches):
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def over(world_size, dataset, epoch=None, **options):
    """What each rank's loader yields."""
    found = []
    for rank in range(world_size):
        loader = shard(dataset, Sharding(rank, world_size), **options)
        if epoch is not None:
            set_epoch(loader, epoch)
        found.append(plain(loader))
    return found


def joined(ranks):
    """The global batches, each sorted."""
    return [sorted(flat(one)) for one in itertools.zip_longest(*ranks, fillvalue=())]


# -------------------------------------------------------------------------------------- by counting


def test_streams_are_dealt_out_by_counting():
    assert over(1, Stream(5), batch_size=2) == [[[0, 1], [2, 3], [4]]]
    assert over(2, Stream(5), batch_size=2) == [[[0, 2], [4]], [[1, 3]]]
    assert over(2, Stream(3), batch_size=None) == [[0, 2], [1]]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("size", [13, 0, 1, 7, 12, 40])
@pytest.mark.parametrize("cls", [Stream, Lazy])
def test_the_same_global_batches_on_any_number_of_ranks_and_workers(cls, size):
    """Also at the ragged end, and for a stream that would divide itself over the workers."""
    expected = [list(range(start, min(start + 6, size))) for start in range(0, size, 6)]
    for world_size in (1, 2, 3):
        alone = over(world_size, cls(size), batch_size=6 // world_size)
        assert joined(alone) == expected
        last = [len(rank[-1]) if rank and len(rank) == len(expected) else 0 for rank in alone]
        assert not expected or max(last) - min(last) <= 1, (
            "the last one is divided to within one item"
        )
        for num_workers in (1, 3) if world_size < 3 or size == 13 else ():
            assert (
                over(world_size, cls(size), batch_size=6 // world_size, num_workers=num_workers)
                == alone
            )


@pytest.mark.costly
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    size=st.integers(0, 60),
    block_size=st.integers(1, 9),
    world_size=st.integers(1, 4),
    workers=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_blocks(size, block_size, world_size, workers, drop_last):
    """Every item once, or all but the incomplete last block; each block with one worker, and fair
    to the ranks.
    """
    seen = Counter()
    end = size - size % block_size if drop_last else size
    for rank in range(world_size):
        stream = StreamShard(
            range(size),
            Sharding(rank, world_size),
            block_size,
            drop_last=drop_last,
        )
        for worker in range(workers):
            torch_worker._worker_info = SimpleNamespace(id=worker, num_workers=workers)
            try:
                items = flat(block.items[rank] for block in stream)
                assert get_worker_info() is not None, "put back"
            finally:
                torch_worker._worker_info = None
            assert items == sorted(items)
            assert {item // block_size % workers for item in items} <= {worker}
            assert all(item % block_size % world_size == rank for item in items)
            seen.update(items)
    assert seen == Counter(range(end))


@pytest.mark.corner
@pytest.mark.parametrize("num_workers", [0, 2])
def test_drop_last_drops_the_same_global_batch_on_every_rank(num_workers):
    """Rank 0 could fill its batch with items 12 and 14: it must not."""
    options = {"batch_size": 2, "drop_last": True, "num_workers": num_workers}
    assert over(2, Stream(15), **options) == [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9, 11]]]
    assert over(2, Stream(3), **options) == [[], []]


@pytest.mark.corner
@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_global_batch_that_cannot_be_divided_evenly(num_workers):
    found = [
        plain(shard(Stream(17), Sharding(rank, 3, global_batch_size=7), num_workers=num_workers))
        for rank in range(3)
    ]
    assert found == [
        [[0, 3, 6], [7, 10, 13], [14]],
        [[1, 4], [8, 11], [15]],
        [[2, 5], [9, 12], [16]],
    ]
    with pytest.raises(
        ConfigError,
        match="global_batch_size=2 cannot divide a stream: .* every one of 3 processes",
    ):
        shard(Stream(), Sharding(0, 3, global_batch_size=2))


def test_the_worker_is_hidden_while_the_stream_is_read_and_nowhere_else():
    """Between two items, at the end, and after an error the loader's code sees its worker."""

    class Looking(Stream):
        def __iter__(self):
            for _ in range(3):
                yield get_worker_info()
            raise ValueError("the file is broken")

    info = SimpleNamespace(id=0, num_workers=1, dataset=None)
    torch_worker._worker_info = info
    try:
        blocks = iter(StreamShard(Looking(), Sharding()))
        for _ in range(3):
            assert next(blocks).items == {0: [None]}
            assert get_worker_info() is info
        with pytest.raises(ValueError, match="broken"):
            next(blocks)
        assert get_worker_info() is info
    finally:
        torch_worker._worker_info = None


class Shuffled(Stream):
    """Draws its order, and noise, from the process's random streams, all the time."""

    def __iter__(self):
        numbers = list(range(self.size))
        random.shuffle(numbers)
        for number in numbers:
            yield number, (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: NPY002


@pytest.mark.costly
def test_a_stream_that_draws_random_numbers_is_the_same_everywhere():
    """Law 1: on any number of ranks and workers it has the same order and the same noise; in each
    epoch another.
    """

    def everything(world_size, epoch, **options):
        ranks = over(
            world_size,
            Shuffled(13),
            epoch,
            batch_size=6 // world_size,
            collate_fn=list,
            **options,
        )
        return joined(ranks)

    random.seed(5)
    expected = everything(1, 2)
    assert sorted(number for number, _ in flat(expected)) == list(range(13))
    assert len({noise for _, noises in flat(expected) for noise in noises}) == 39
    random.seed(6)
    torch.manual_seed(7)
    for world_size, num_workers in ((1, 0), (2, 0), (3, 0), (1, 2), (2, 3)):
        assert everything(world_size, 2, num_workers=num_workers) == expected
    assert everything(1, 3) != expected


class Normal(Stream):
    """Draws an odd number of normal numbers: Python and numpy make two at a time, and keep the
    second.
    """

    def __iter__(self):
        for number in range(self.size):
            yield number, random.gauss(0, 1) + np.random.randn()  # noqa: NPY002


@pytest.mark.parametrize("cls", [Shuffled, Normal])
def test_the_random_streams_of_the_process_go_on_as_if_nothing_had_been_read(cls):
    """Also where the process has the second of two normal numbers in store, or the stream leaves
    one there.
    """

    def draw():
        uniform = random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002
        return *uniform, random.gauss(0, 1), float(np.random.randn())  # noqa: NPY002

    def seed():
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    seed()
    expected = [draw() for _ in range(5)]
    seed()
    assert [draw() for _ in shard(cls(5), Sharding(), batch_size=1, collate_fn=list)] == expected


# ----------------------------------------------------------------------------------- its own shards


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    "num_workers",
    [3, *(pytest.param(one, marks=pytest.mark.slow) for one in (0, 1))],
)
@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("files", [6, 8])
def test_streams_that_can_divide_themselves_do(files, world_size, num_workers, caplog):
    with caplog.at_level(logging.INFO):
        ranks = over(world_size, Files(range(files)), batch_size=2, num_workers=num_workers)
    numbers = [10 * file + number for file in range(files) for number in range(3)]
    assert sorted(flat(flat(rank) for rank in ranks)) == numbers
    own = [{number // 10 for number in flat(rank)} for rank in ranks]
    assert sum(map(len, own)) == files, "no file is read by two ranks"
    assert caplog.messages == []


@pytest.mark.costly
def test_too_few_files_are_dealt_out_by_counting(caplog):
    """Instead of leaving ranks or workers without a file; the log says so."""
    caplog.set_level(logging.INFO)
    for num_workers in (0, 2):
        ranks = over(2, Files([0]), batch_size=1, num_workers=num_workers)
        assert ranks == [[[0], [2]], [[1]]]
    assert over(3, Files([0, 1]), batch_size=1) == [[[0], [10]], [[1], [11]], [[2], [12]]]
    told = [message for message in caplog.messages if "dealt out by counting" in message]
    assert len(set(told)) == 3, "by 2, 4 and 3 processes"
    assert told[0].startswith(
        "Files is dealt out by counting: 2 processes (ranks x loader workers) read all of it."
    )


# -------------------------------------------------------------------------- divided by their makers


class Own(Stream):
    is_sharded = True


@pytest.mark.costly
def test_a_stream_that_says_so_is_left_alone():
    assert over(2, Own(4), batch_size=4, num_workers=2) == [[[0, 2], [1, 3]]] * 2


class Pipeline(Stream):
    """Stands for a pipeline of webdataset, which yields batches."""

    def __iter__(self):
        return iter([[0, 1], [2]])


Pipeline.__module__ = "webdataset.pipeline"


class SplitByNode(Stream):
    """Stands for what ``split_dataset_by_node`` of Hugging Face's datasets returns."""

    _distributed = (0, 2)


SplitByNode.__module__ = "datasets.iterable_dataset"


def test_pipelines_of_other_packages():
    assert over(2, Pipeline()) == [[[0, 1], [2]]] * 2
    assert over(2, Pipeline(), batch_size=2, collate_fn=list) == [[[[0, 1], [2]]]] * 2
    assert over(2, SplitByNode(2), batch_size=2) == [[[0, 1]]] * 2
    SplitByNode._distributed = None
    assert over(2, SplitByNode(2), batch_size=2) == [[[0]], [[1]]]
    assert not is_sharded(Stream())
    assert is_sharded(SimpleNamespace(is_sharded=True))
    assert not is_sharded(SimpleNamespace(is_sharded=lambda: True)), "somebody else's word"


# ------------------------------------------------------------------------------------------- epochs


def test_streams_are_told_the_epoch():
    for loader in (
        shard(Stream(2), Sharding(0, 2), batch_size=1),
        DataLoader(Stream(2), batch_size=1),
    ):
        set_epoch(loader, 3)
        assert flat(plain(loader))[0] == 3000
    StreamShard([1, 2, 3], Sharding(0, 2)).set_epoch(1)


@pytest.mark.corner
@pytest.mark.parametrize("num_workers", [0, 2])
def test_shards_are_told_the_epoch(num_workers):
    loader = shard(Files(range(4)), Sharding(1, 2), batch_size=3, num_workers=num_workers)
    for epoch in (1, 2):
        set_epoch(loader, epoch)
        start = 1000 * epoch + 20
        assert plain(loader) == [
            [start, start + 1, start + 2],
            [start + 10, start + 11, start + 12],
        ]


@pytest.mark.slow
def test_a_stream_in_spawned_workers():
    """Its copy there is told of epochs, too."""
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
    loader = shard(Stream(5), Sharding(0, 2), batch_size=2, **options)
    for epoch in (1, 2):
        set_epoch(loader, epoch)
        assert plain(loader) == [[1000 * epoch, 1000 * epoch + 2], [1000 * epoch + 4]]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_are_told_the_epoch_also_if_they_outlive_it(persistent):
    loader = shard(
        Stream(4),
        Sharding(0, 2),
        batch_size=1,
        num_workers=2,
        persistent_workers=persistent,
    )
    for epoch in (1, 2, 5):
        set_epoch(loader, epoch)
        assert flat(plain(loader)) == [1000 * epoch, 1000 * epoch + 2]


class Seeds(Own):
    """Yields the seed of the worker it is in."""

    def __iter__(self):
        return iter([get_worker_info().seed])


@pytest.mark.slow
def test_workers_have_seeds_of_their_own_on_every_rank_and_in_every_epoch():
    found = {}
    for rank, epoch in itertools.product(range(2), (1, 2)):
        loader = shard(Seeds(), Sharding(rank, 2), batch_size=1, num_workers=2)
        set_epoch(loader, epoch)
        found[rank, epoch] = flat(plain(loader))
    assert len(set(flat(found.values()))) == 8
    loader = shard(Seeds(), Sharding(1, 2), batch_size=1, num_workers=2)
    set_epoch(loader, 2)
    assert flat(plain(loader)) == found[1, 2], "law 2"
    generator = torch.Generator().manual_seed(3)
    own = shard(Stream(), Sharding(), generator=generator)
    set_epoch(own, 4)
    assert own.generator is generator
    assert generator.initial_seed() == 3


# ------------------------------------------------------------------------------- ready-made loaders


def test_a_stream_that_was_divided_is_divided_anew_as_a_whole():
    part = shard(Stream(8), Sharding(0, 2), batch_size=1)
    assert flat(plain(reshard(part, Sharding(3, 4)))) == [3, 7]
    assert flat(plain(reshard(part, Sharding()))) == list(range(8))


def test_a_ready_made_loader_of_a_stream_keeps_its_settings():
    ready = DataLoader(
        Stream(14),
        2,
        drop_last=True,
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=True,
    )
    found = reshard(ready, Sharding(1, 2))
    assert (found.num_workers, found.prefetch_factor, found.persistent_workers) == (2, 3, True)
    assert plain(found) == [[1, 3], [5, 7], [9, 11]]


def divide_in_worker(worker):
    stream = get_worker_info().dataset
    stream.size = stream.size // 2


@pytest.mark.slow
def test_a_worker_init_fn_that_would_divide_it_again_is_told(monkeypatch):
    # torch gives a worker that has failed so many seconds to end before it terminates it
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    loader = shard(
        Stream(8),
        Sharding(),
        batch_size=2,
        num_workers=1,
        worker_init_fn=divide_in_worker,
    )
    batches = iter(loader)
    with pytest.raises(AttributeError, match="'StreamShard' object has no attribute 'size'"):
        next(batches)
    del batches
    gc.collect()


# ------------------------------------------------------------------------------- loaders of batches


class Batches:
    """A loader of one's own: yields batches, knows epochs."""

    def __init__(self, number):
        self.number = number
        self.told = []

    def set_epoch(self, epoch):
        self.told.append(epoch)

    def __iter__(self):
        return (f"batch {number}" for number in range(self.number))


def test_what_counts_as_a_loader_of_batches():
    assert is_batches(Batches(2))
    assert is_batches(iter([1]))
    for other in ([1], {"a": 1}, Stream(), DataLoader([1]), Dataset(), 3, torch.zeros(2)):
        assert not is_batches(other)


def test_loaders_of_batches_are_dealt_out(caplog):
    with caplog.at_level(logging.INFO):
        found = [list(shard(Batches(5), Sharding(rank, 3))) for rank in range(3)]
    assert found == [["batch 0", "batch 3"], ["batch 1", "batch 4"], ["batch 2"]]
    assert set(caplog.messages) == {
        "Batches is dealt out by batches: every rank reads all of them, and trains on one in 3."
    }
    whole = shard(Batches(2), Sharding())
    assert list(whole) == list(whole) == ["batch 0", "batch 1"]
    set_epoch(whole, 4)
    assert whole.whole.told == [4]
    assert list(deal_batches(deal_batches(Batches(4), Sharding(0, 2)), Sharding(1, 2))) == [
        ("batch 1"),
        ("batch 3"),
    ]
    with pytest.raises(
        DataError,
        match=r"Batches has no length: give .* or batches without "
        r"arguments",
    ):
        shard(Batches(2), Sharding(), batch_size=2)


def test_a_loader_inside_is_told_the_epoch():
    """A loader of one's own around a dataset that knows epochs."""
    stream = Stream(2)
    wrapped = SimpleNamespace(dataset=stream)
    StreamShard(wrapped, Sharding()).set_epoch(7)
    assert stream.epoch == 7


class StartsOver:
    """Its own iterator, which each ``iter()`` begins anew."""

    def __iter__(self):
        self.number = 0
        return self

    def __next__(self):
        if self.number == 5:
            raise StopIteration
        self.number += 1
        return self.number


class StartsOverStream(StartsOver, IterableDataset):
    pass


def test_what_starts_over_whenever_it_is_asked_to_begin_is_read_to_its_end():
    def read(kind, rank, **options):
        return list(itertools.islice(shard(kind(), Sharding(rank, 2), **options), 9))

    assert [read(StartsOver, rank) for rank in range(2)] == [[1, 3, 5], [2, 4]]
    assert [read(StartsOverStream, rank, batch_size=1, collate_fn=list) for rank in range(2)] == [
        [[1], [3], [5]],
        [[2], [4]],
    ]


class Drawing(Batches):
    def __iter__(self):
        numbers = list(range(self.number))
        random.shuffle(numbers)
        for number in numbers:
            yield number, float(torch.rand(()))


def test_a_loader_of_batches_that_shuffles_does_so_alike_everywhere():
    def everything(world_size, epoch):
        parts = [shard(Drawing(9), Sharding(rank, world_size)) for rank in range(world_size)]
        for part in parts:
            part.set_epoch(epoch)
            random.seed(world_size)  # whatever the process has drawn before
        found = [list(part) for part in parts]
        return [
            one for together in itertools.zip_longest(*found) for one in together if one is not None
        ]

    assert everything(2, 1) == everything(3, 1) == everything(1, 1)
    assert sorted(number for number, _ in everything(2, 1)) == list(range(9))
    assert everything(1, 2) != everything(1, 1)


@pytest.mark.parametrize("kind", ["own class", "ready-made"])
def test_a_loader_that_was_divided_by_its_maker_is_used_as_it_is(kind):
    loader = Batches(3) if kind == "own class" else DataLoader([1, 2, 3], batch_size=None)
    loader.is_sharded = True
    sharding = Sharding(1, 2)
    found = shard(loader, sharding) if kind == "own class" else reshard(loader, sharding)
    assert len(list(found)) == 3


@pytest.mark.corner
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_of_a_stream_counts_the_items_that_were_collated(num_workers):
    """Whatever the collate function makes of them."""
    for collate in (list, nothing_that_tells):
        loader = shard(
            Stream(7),
            Sharding(),
            batch_size=3,
            collate_fn=collate,
            num_workers=num_workers,
        )
        assert [loader.size_of(batch) for batch in loader] == [3, 3, 1]


def nothing_that_tells(items):
    return object()


def test_a_batch_that_does_not_tell_its_size_is_warned_of(caplog):
    assert streams.guess_batch_size(object()) == 1
    assert "A batch of the type object does not tell how many samples it has" in caplog.text
