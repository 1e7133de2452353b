"""Loaders: sharded, made anew from ready-made ones, saved and continued."""

from __future__ import annotations

import itertools
import multiprocessing
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from ddpkit.checkpoints import Checkpointer
from ddpkit.data import DealtBatchSampler, PlannedBatchSampler, guess_batch_size
from ddpkit.dataloader import (
    LoopedLoader,
    SaveableDataLoader,
    Sharding,
    deal_batches,
    default_seed,
    make_dataloader,
    plan_of,
    reshard,
    set_epoch,
    shard,
)
from ddpkit.errors import ConfigError, DataError
from tests.data.test_streams import Stream


class Numbers(Dataset):
    """The numbers 0 to n - 1; remembers, in this process, which were loaded, and is told of
    epochs.
    """

    def __init__(self, size):
        self.size = size
        self.loaded = []
        self.epochs = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.loaded.append(index)
        return index

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Knowing(RandomSampler):
    """A user's sampler that knows epochs, with a length of its own."""

    def __init__(self, size):
        super().__init__(range(size))
        self.told = []

    def set_epoch(self, epoch):
        self.told.append(epoch)


def add_hundred(items):
    return [item + 100 for item in items]


def plain(batches):
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def over(world_size, make, **options):
    """What each rank's loader yields."""
    return [
        plain(make(Sharding(rank, world_size, seed=5, **options))) for rank in range(world_size)
    ]


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def counted(loader):
    """What a loader yields, less its fillers."""
    plan = plan_of(loader)
    return flat(batch[: plan.count(number)] for number, batch in enumerate(plain(loader)))


# -------------------------------------------------------------------------------------------- shard


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shard_divides_without_repeats(num_workers):
    for world_size in (1, 2, 3):
        found = [
            counted(
                shard(
                    Numbers(11),
                    Sharding(rank, world_size),
                    batch_size=2,
                    num_workers=num_workers,
                )
            )
            for rank in range(world_size)
        ]
        assert sorted(flat(found)) == list(range(11))
        if num_workers:
            break


def test_the_order_does_not_depend_on_the_number_of_ranks():
    alone = over(1, lambda sharding: shard(range(24), sharding, batch_size=6, shuffle=True))[0]
    for world_size in (2, 3, 6):
        size = 6 // world_size
        ranks = over(
            world_size,
            lambda sharding, size=size: shard(range(24), sharding, batch_size=size, shuffle=True),
        )
        assert [flat(parts) for parts in zip(*ranks, strict=True)] == alone


def test_shard_takes_loader_arguments_and_leaves_them_alone():
    arguments = {
        "batch_size": 2,
        "shuffle": False,
        "drop_last": True,
        "collate_fn": add_hundred,
        "sampler": None,
    }
    before = dict(arguments)
    loader = shard(range(5), Sharding(), **arguments)
    assert list(loader) == [[100, 101], [102, 103]]
    assert len(loader) == 2
    assert arguments == before
    assert isinstance(loader.batch_sampler, PlannedBatchSampler)


def test_samplers_and_batch_samplers_are_dealt_out():
    def of_sampler(sharding):
        return shard(range(8), sharding, sampler=[7, 5, 3, 1], batch_size=1)

    assert over(2, of_sampler) == [[[7], [3]], [[5], [1]]]

    def of_batches(sharding):
        return shard(
            range(8),
            sharding,
            batch_sampler=[[0, 1, 2], [3], [4, 5]],
            batch_size=1,
            drop_last=True,
        )

    assert over(2, of_batches) == [[[0, 1, 2]], [[3]]]
    assert isinstance(of_batches(Sharding()).batch_sampler, DealtBatchSampler)


def test_a_dataset_of_whole_batches():
    """batch_size=None: one index is one batch; each counts one, and the one that only keeps step
    counts none.
    """
    data = [[0, 1], [2], [3, 4, 5]]
    loaders = [shard(data, Sharding(rank, 2), batch_size=None) for rank in range(2)]
    assert [list(loader) for loader in loaders] == [[[0, 1], [3, 4, 5]], [[2], [3, 4, 5]]]
    assert [len(loader) for loader in loaders] == [2, 2]
    assert [[plan_of(loader).count(batch) for batch in range(2)] for loader in loaders] == [
        [1, 1],
        [1, 0],
    ]
    assert [plan_of(loaders[0]).total(batch) for batch in range(2)] == [2, 1]
    shuffled = shard(data * 5, Sharding(), batch_size=None, shuffle=True)
    orders = []
    for epoch in (1, 2, 1):
        shuffled.set_epoch(epoch)
        orders.append(list(shuffled))
    assert orders[0] == orders[2] != orders[1]


def test_a_distributed_sampler_has_divided_the_data_already():
    """Dealt out once more, every rank would get a part of its part."""
    for rank in range(2):
        sampler = DistributedSampler(range(8), num_replicas=2, rank=rank, shuffle=False)
        batches = BatchSampler(sampler, 2, drop_last=False)
        expected = [[rank, rank + 2], [rank + 4, rank + 6]]
        sharding = Sharding(rank, 2)
        assert plain(shard(range(8), sharding, sampler=sampler, batch_size=2)) == expected
        assert plain(shard(range(8), sharding, batch_sampler=batches)) == expected
        for ready in (
            DataLoader(range(8), 2, sampler=sampler),
            DataLoader(range(8), batch_sampler=batches),
        ):
            assert reshard(ready, sharding) is ready
            set_epoch(ready, 4)
            assert sampler.epoch == 4


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"batch_size": 0}, ConfigError, r"^batch_size=0 is not a positive whole number"),
        ({"batch_size": "8"}, ConfigError, r"^batch_size='8' is not a positive whole number"),
        ({"shuffle": True, "sampler": [0]}, ConfigError, "a loader takes one of"),
        ({"shuffle": True, "batch_sampler": [[0]]}, ConfigError, "a loader takes one of"),
        ({"sampler": [0], "batch_sampler": [[0]]}, ConfigError, "a loader takes one of"),
        ({"batch_size": 4, "batch_sampler": [[0]]}, ConfigError, "a loader takes one of"),
    ],
)
def test_arguments_that_cannot_work(arguments, error, match):
    with pytest.raises(error, match=match):
        shard(range(4), Sharding(), **arguments)
    with pytest.raises(ValueError, match=match):
        make_dataloader(range(4), **arguments)


def test_data_that_cannot_work():
    with pytest.raises(
        DataError,
        match=r"^the dataset is empty: len\(list\) is 0\. Check the "
        r"paths and filters",
    ):
        shard([], Sharding(), batch_size=2)
    with pytest.raises(
        DataError,
        match=r"generator has no length: give .* or batches without "
        r"arguments",
    ):
        shard((x for x in range(3)), Sharding(), batch_size=2)
    with pytest.raises(
        ConfigError,
        match=r"shuffle=True cannot be done for Stream, an "
        r"IterableDataset",
    ):
        shard(Stream(), Sharding(), shuffle=True)
    with pytest.raises(ConfigError, match="batch_size=-1 is not a positive"):
        shard(Stream(), Sharding(), batch_size=-1)


# ------------------------------------------------------------------------------------------ reshard

READY = {
    "sequential": lambda data: DataLoader(data, 3),
    "drop_last": lambda data: DataLoader(data, 3, drop_last=True),
    "sampler": lambda data: DataLoader(data, 3, sampler=range(13, 0, -1)),
    "part of the data": lambda data: DataLoader(data, 3, sampler=SequentialSampler(range(5))),
    "explicit batches": lambda data: DataLoader(
        data,
        batch_sampler=BatchSampler(SequentialSampler(data), 3, drop_last=False),
    ),
    "explicit batches, drop_last": lambda data: DataLoader(
        data,
        batch_sampler=BatchSampler(range(2, 13), 3, drop_last=True),
    ),
    "whole batches": lambda data: DataLoader(data, batch_size=None),
    "whole batches, sampler": lambda data: DataLoader(data, batch_size=None, sampler=range(4, 9)),
    "opaque batches": lambda data: DataLoader(data, batch_sampler=[[0, 1], [2], [3, 4, 5]]),
    "ours": lambda data: shard(data, Sharding(1, 2), batch_size=3),
    "ours, drop_last": lambda data: shard(data, Sharding(), batch_size=3, drop_last=True),
    "ours, sampler": lambda data: shard(data, Sharding(), batch_size=3, sampler=[5, 3, 4, 1]),
    "ours, batch sampler": lambda data: shard(
        data,
        Sharding(),
        batch_sampler=[[0, 1], [2], [3, 4, 5]],
    ),
    "ours, whole batches": lambda data: shard(data, Sharding(), batch_size=None),
    "saveable": lambda data: SaveableDataLoader(data, 3, shuffle=False),
    "workers": lambda data: DataLoader(data, 3, num_workers=2),
}


def as_lists(batches):
    return [batch if isinstance(batch, list) else [batch] for batch in plain(batches)]


@pytest.mark.parametrize("kind", READY)
def test_ready_made_loaders_keep_their_order_and_sizes(kind):
    """On one rank the loader made anew is the old one; on two, together, they give the same samples
    once.
    """
    expected = (
        as_lists(READY[kind](Numbers(14)))
        if kind != "ours"
        else as_lists(DataLoader(Numbers(14), 3))
    )
    again = reshard(READY[kind](Numbers(14)), Sharding())
    assert type(again) is SaveableDataLoader
    assert as_lists(again) == expected
    assert len(again) == len(expected)
    if "drop_last" in kind:
        return
    ranks = [reshard(READY[kind](Numbers(14)), Sharding(rank, 2)) for rank in range(2)]
    found = []
    for loader in ranks:
        found += flat(
            batch[: plan_of(loader).count(number)] for number, batch in enumerate(as_lists(loader))
        )
    assert sorted(found) == sorted(flat(expected))


@pytest.mark.parametrize(
    "make",
    [
        lambda data: DataLoader(data, 3, shuffle=True),
        lambda data: DataLoader(
            data,
            batch_sampler=BatchSampler(RandomSampler(data), 3, drop_last=False),
        ),
        lambda data: shard(data, Sharding(), batch_size=3, shuffle=True),
    ],
)
def test_ready_made_random_loaders_are_shuffled_by_the_plan(make):
    expected = over(1, lambda sharding: shard(Numbers(14), sharding, batch_size=3, shuffle=True))
    assert over(1, lambda sharding: reshard(make(Numbers(14)), sharding)) == expected


def test_ready_made_loaders_with_a_sampler_of_chance():
    """With replacement, of another size, or a subclass: drawn alike on the ranks and dealt out."""
    for sampler in (
        RandomSampler(range(9), replacement=True),
        RandomSampler(range(9), num_samples=4),
        Knowing(9),
    ):
        loaders = [
            reshard(DataLoader(range(9), 2, sampler=sampler), Sharding(rank, 2))
            for rank in range(2)
        ]
        assert plan_of(loaders[0]).source is sampler
        found = flat(counted(loader) for loader in loaders)
        assert len(found) == len(sampler)
        if not sampler.replacement:
            assert len(set(found)) == len(found)


def test_resharding_keeps_the_other_settings():
    context = multiprocessing.get_context("fork")
    ready = DataLoader(
        Numbers(8),
        2,
        collate_fn=add_hundred,
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=True,
        timeout=500,
        worker_init_fn=print,
        multiprocessing_context=context,
    )
    again = reshard(ready, Sharding(1, 2))
    for name in (
        "collate_fn",
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
        "timeout",
        "worker_init_fn",
    ):
        assert getattr(again, name) == getattr(ready, name)
    assert again.multiprocessing_context is context
    assert again.dataset is ready.dataset
    stream = reshard(
        DataLoader(Stream(6), 2, drop_last=True, collate_fn=add_hundred),
        Sharding(0, 2),
    )
    assert list(stream) == [[100, 102]]


# ---------------------------------------------------------------------- epochs, generators, workers


def test_set_epoch_reaches_samplers_and_datasets():
    for make in (
        lambda sampler: shard(Numbers(6), Sharding(), batch_size=2, sampler=sampler),
        lambda sampler: shard(
            Numbers(6),
            Sharding(),
            batch_sampler=BatchSampler(sampler, 2, drop_last=False),
        ),
        lambda sampler: shard(Numbers(6), Sharding(), batch_size=None, sampler=sampler),
        lambda sampler: SaveableDataLoader(Numbers(6), 2, sampler=sampler),
        lambda sampler: DataLoader(
            Numbers(6),
            batch_sampler=BatchSampler(sampler, 2, drop_last=False),
        ),
    ):
        sampler = Knowing(6)
        loader = make(sampler)
        sampler.told.clear()
        set_epoch(loader, 4)
        assert sampler.told == [4], "told once"
        assert loader.dataset.epochs == [4]
    set_epoch([1, 2], 3)


@pytest.mark.corner
@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterating_does_not_move_the_global_stream(num_workers):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for arguments in (
        {"shuffle": True},
        {"sampler": Knowing(6)},
        {"batch_sampler": [[0]]},
        {"batch_size": None},
    ):
        next(iter(shard(range(6), Sharding(), num_workers=num_workers, **arguments)))
    for given in ({}, {"generator": None}):
        next(iter(shard(Stream(), Sharding(), num_workers=num_workers, **given)))
    assert torch.equal(torch.get_rng_state(), before)


class Seeds(Dataset):
    """Gives the seed of the worker that loads it."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return get_worker_info().seed


@pytest.mark.costly
def test_workers_get_a_seed_per_epoch(monkeypatch):
    monkeypatch.setenv("DDPKIT_GLOBAL_SEED", "3")
    loader = shard(Seeds(), Sharding(), num_workers=1)
    seeds = []
    for epoch in (1, 2, 1):
        loader.set_epoch(epoch)
        seeds.append(plain(loader)[0][0])
    assert seeds[0] == seeds[2] != seeds[1]


class Noise(torch.utils.data.IterableDataset):
    """Divides itself, and draws numbers as it is read."""

    is_sharded = True

    def __iter__(self):
        return (torch.rand(1).item() for _ in range(3))


@pytest.mark.corner
@pytest.mark.parametrize("kind", ["stream", "stream with a worker", "loader"])
def test_ranks_of_data_that_divides_itself_draw_numbers_of_their_own(kind):
    def drawn(rank):
        sharding = Sharding(rank=rank, world_size=2)
        if kind == "loader":
            return list(deal_batches(Noise(), sharding))
        return plain(shard(Noise(), sharding, num_workers=int(kind != "stream")))

    assert drawn(0) == drawn(0)
    assert not {str(one) for one in drawn(0)} & {str(one) for one in drawn(1)}


def test_a_generator_of_the_user_stays():
    generator = torch.Generator()
    assert shard(range(4), Sharding(), generator=generator).generator is generator
    assert shard(Stream(), Sharding(), generator=generator).generator is generator


def test_default_seed(monkeypatch):
    monkeypatch.delenv("DDPKIT_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("SB_GLOBAL_SEED", raising=False)
    assert default_seed() == Sharding().seed
    monkeypatch.setenv("DDPKIT_GLOBAL_SEED", "0")
    assert default_seed() == 0


# -------------------------------------------------------------------------------- save and continue

KINDS = {
    "planned": {"batch_size": 2, "shuffle": True},
    "sampler": {"batch_size": 2, "sampler": range(15, -1, -1)},
    "dealt": {"batch_sampler": [[n, n + 1] for n in range(0, 16, 2)]},
    "whole": {"batch_size": None},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [0, 1, 5, 8])
def test_a_loader_continues_where_it_was(tmp_path, kind, stop):
    whole = plain(shard(Numbers(16), Sharding(seed=2), **KINDS[kind]))
    loader = shard(Numbers(16), Sharding(seed=2), **KINDS[kind])
    done = plain(itertools.islice(loader, stop))
    loader.save(tmp_path / "loader.ckpt")
    again = shard(Numbers(16), Sharding(seed=2), **KINDS[kind])
    again.load(tmp_path / "loader.ckpt", end_of_epoch=False)
    rest = plain(again)
    assert done + rest == whole
    assert len(again.dataset.loaded) == len(flat(as_lists(rest))), "what was skipped was not loaded"
    assert plain(again) == whole, "the next epoch is a whole one"


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_yielded_count_not_those_prefetched(tmp_path, persistent):
    options = {
        "batch_size": 2,
        "num_workers": 2,
        "prefetch_factor": 4,
        "persistent_workers": persistent,
    }
    loader = shard(range(20), Sharding(), **options)
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(3)]
    loader.save(tmp_path / "loader.ckpt")
    assert (tmp_path / "loader.ckpt").read_text() == "3"
    del batches
    again = shard(range(20), Sharding(), **options)
    again.load(tmp_path / "loader.ckpt", end_of_epoch=False)
    assert flat(first + plain(again)) == list(range(20))
    assert flat(plain(again)) == list(range(20))
    again.skip_next(7)
    assert flat(plain(again)) == list(range(14, 20)), "also where the workers have stayed alive"


def test_what_a_saved_loader_holds(tmp_path):
    path = tmp_path / "loader.ckpt"
    loader = shard(range(6), Sharding(), batch_size=2)
    loader.save(path)
    assert path.read_text() == "None"
    loader.load(path, end_of_epoch=False)
    assert flat(plain(loader)) == list(range(6))
    loader._speechbrain_save(path)
    assert path.read_text() == "3"
    fresh = shard(range(6), Sharding(), batch_size=2)
    fresh._speechbrain_load(path, end_of_epoch=True)
    assert flat(plain(fresh)) == list(range(6)), "after the end of an epoch the next one begins"
    fresh = shard(range(6), Sharding(), batch_size=2)
    fresh._speechbrain_load(path, end_of_epoch=False)
    assert plain(fresh) == []


@pytest.mark.parametrize("nominal", [None, 3], ids=["saveable", "looped"])
def test_the_place_of_a_loader_is_saved_under_a_name_in_text(tmp_path, nominal):
    path = str(tmp_path / "loader.ckpt")

    def loader():
        return make_dataloader(range(6), looped_nominal_epoch=nominal, batch_size=2)

    begun = loader()
    batches = iter(begun)
    first = next(batches)
    begun.save(path)
    again = loader()
    again.load(path, end_of_epoch=False)
    assert flat([first.tolist(), *plain(again)]) == list(range(6))


def test_a_loader_in_use_ignores_a_checkpoint(tmp_path):
    """Recovering the best model for a test must not shorten the training that goes on
    afterwards.
    """
    path = tmp_path / "loader.ckpt"
    path.write_text("2")
    loader = shard(range(6), Sharding(), batch_size=2)
    batches = iter(loader)
    next(batches)
    loader.load(path, end_of_epoch=False)
    assert len(list(batches)) == 2
    assert len(list(loader)) == 3


def test_skipping_with_samplers_that_are_not_ours():
    loader = SaveableDataLoader(Numbers(6), batch_size=2)
    loader.skip_next(1)
    assert plain(loader) == [[2, 3], [4, 5]]
    assert loader.yielded == 3
    assert plain(loader) == [[0, 1], [2, 3], [4, 5]]
    ready = SaveableDataLoader(Stream(5), batch_size=2)
    ready.skip_next(2)
    assert plain(ready) == [[4]]


def test_loaders_in_a_checkpoint(tmp_path):
    def loaders():
        return {
            "dataloader": shard(range(12), Sharding(), batch_size=2),
            "looped": LoopedLoader(shard(range(12), Sharding(), batch_size=2), 4),
        }

    saved = loaders()
    for loader in saved.values():
        list(itertools.islice(loader, 3))
    Checkpointer(tmp_path, saved).save_checkpoint(end_of_epoch=False)
    fresh = loaders()
    Checkpointer(tmp_path, fresh).recover_if_possible()
    assert plain(fresh["dataloader"]) == [[6, 7], [8, 9], [10, 11]]
    assert plain(fresh["looped"]) == [[6, 7]]
    assert plain(fresh["looped"]) == [[8, 9], [10, 11], [0, 1], [2, 3]]


# ------------------------------------------------------------------------------------ looped loader


def epochs_of(looped, number, length=None):
    """Nominal epochs as the training loop takes them: by number, without asking for one batch too
    many.
    """
    length = looped.epoch_length if length is None else length
    return [plain(itertools.islice(looped, length)) for _ in range(number)]


def test_nominal_epochs_go_on_through_the_passes():
    for take in (
        lambda looped: [plain(looped) for _ in range(4)],
        lambda looped: epochs_of(looped, 4),
    ):
        looped = make_dataloader(range(5), looped_nominal_epoch=3, batch_size=1)
        assert isinstance(looped, LoopedLoader)
        assert len(looped) == 3
        found = take(looped)
        assert [len(epoch) for epoch in found] == [3, 3, 3, 3]
        assert flat(flat(found)) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
        assert (looped.total_steps, looped.total_samples) == (12, 12)


def test_every_pass_is_shuffled_anew():
    looped = make_dataloader(range(20), looped_nominal_epoch=4, batch_size=5, shuffle=True)
    passes = [flat(epoch) for epoch in epochs_of(looped, 3)]
    assert [sorted(one) for one in passes] == [list(range(20))] * 3
    assert len(set(map(tuple, passes))) == 3
    stream = LoopedLoader(DataLoader(Stream(2), batch_size=1), 2)
    assert [flat(epoch) for epoch in epochs_of(stream, 2)] == [[1000, 1001], [2000, 2001]]


def test_numbers_of_samples():
    class Padded:
        batchsize = 7

    cases = [
        (Padded(), 7),
        (torch.zeros(4, 2), 4),
        ([torch.zeros(3), torch.zeros(3, 5)], 3),
        ((torch.zeros(6), 1), 6),
        ({"x": torch.zeros(2, 9), "y": 1}, 2),
        (["a", "b", "c"], 3),
        ({}, 1),
        (5, 1),
        (torch.tensor(3.0), 1),
    ]
    for batch, expected in cases:
        looped = LoopedLoader([batch], 2)
        assert len(list(looped)) == 2
        assert looped.total_samples == 2 * expected
    looped = LoopedLoader([1, 2, 3], 2, batchsize_fn=lambda batch: 10 * batch)
    list(looped)
    assert looped.total_samples == 30


@pytest.mark.parametrize("stop", [1, 2, 4, 5, 7, 9])
def test_a_looped_loader_continues_where_it_was(tmp_path, stop):
    """The passes go on, in their order, whatever the place in the nominal epoch and in the pass."""

    def make():
        return make_dataloader(range(14), looped_nominal_epoch=5, batch_size=2, shuffle=True)

    expected = flat(epochs_of(make(), 6))
    looped = make()
    done = flat(epochs_of(looped, (stop - 1) // 5)) + plain(
        itertools.islice(looped, (stop - 1) % 5 + 1)
    )
    looped.save(tmp_path / "looped.ckpt")
    assert (tmp_path / "looped.ckpt").read_text().split() == [
        str((stop - 1) % 5 + 1),
        str(stop),
        str(2 * stop),
    ]
    again = make()
    again.load(tmp_path / "looped.ckpt", end_of_epoch=False)
    rest = plain(again)
    assert len(done) + len(rest) == -(-stop // 5) * 5, (
        "the nominal epoch is completed, if only by nothing"
    )
    assert done + rest + flat(epochs_of(again, 2)) == expected[: len(done) + len(rest) + 10]


def test_a_looped_loader_after_the_end_of_an_epoch(tmp_path):
    looped = make_dataloader(range(6), looped_nominal_epoch=4, batch_size=1)
    epochs_of(looped, 1)
    looped.save(tmp_path / "looped.ckpt")
    for take in (plain, lambda looped: plain(itertools.islice(looped, 4))):
        again = make_dataloader(range(6), looped_nominal_epoch=4, batch_size=1)
        again.load(tmp_path / "looped.ckpt")
        assert flat(take(again)) == [4, 5, 0, 1]
    for take in (plain, lambda looped: plain(itertools.islice(looped, 0))):
        again = make_dataloader(range(6), looped_nominal_epoch=4, batch_size=1)
        again.load(tmp_path / "looped.ckpt", end_of_epoch=False)
        assert take(again) == [], (
            "saved at the very end, in the midst of the stage: nothing is left of it"
        )
        assert flat(plain(again)) == [4, 5, 0, 1]


@pytest.mark.parametrize("state", [True, False], ids=["with state", "numbers alone"])
@pytest.mark.parametrize("drawn", [1, 4, 6, 8, 13])
def test_a_looped_stream_goes_on_where_it_was(tmp_path, drawn, state):
    """In the middle of an epoch and at its end, in the middle of a pass and at its end."""

    def looped():
        return LoopedLoader(DataLoader(Stream(6), batch_size=1), 4)

    def draw(loader, number):
        found = []
        while len(found) < number:
            found += [batch.tolist() for batch in itertools.islice(loader, number - len(found))]
        return found

    whole = looped()
    stopped = looped()
    again = looped()
    expected = draw(whole, 20)
    draw(stopped, drawn)
    stopped.save(tmp_path / "looped.ckpt")
    again.load(tmp_path / "looped.ckpt", end_of_epoch=drawn % 4 == 0)
    if state:
        again.resume_in_pass(stopped.state_in_pass())
    assert draw(again, 20 - drawn) == expected[drawn:]


@pytest.mark.parametrize("state", [True, False], ids=["with state", "numbers alone"])
@pytest.mark.parametrize("drawn", [1, 2, 5, 7])
@pytest.mark.parametrize(("before", "now"), [(2, 1), (4, 2), (1, 2)])
def test_a_looped_loader_of_dealt_batches_on_another_number_of_ranks(
    tmp_path,
    before,
    now,
    drawn,
    state,
):
    """Its place is that of the batches of all ranks, in the pass as in the nominal epoch."""

    def looped(rank, world_size):
        batches = [[2 * index, 2 * index + 1] for index in range(12)]
        return LoopedLoader(shard(range(24), Sharding(rank, world_size), batch_sampler=batches), 20)

    place = drawn * before
    expected = plain(looped(0, 1))
    found = []
    for rank in range(now):
        whole = looped(0, before)
        again = looped(rank, now)
        list(itertools.islice(whole, drawn))
        whole.save(tmp_path / "looped.ckpt")
        again.load(tmp_path / "looped.ckpt", end_of_epoch=False)
        again.resume_at(place // now, whole.state_in_pass() if state else None)
        found.append(plain(again))
        assert len(found[-1]) == 20 - place // now
    read = [batch for one in zip(*found, strict=True) for batch in one]
    start = place // now * now % 12
    assert read[: 12 - start] == expected[start:12][: len(read)]


def test_a_looped_loader_counts_samples():
    """Law 1 for looped loaders: a filler counts nothing, a short batch counts what it holds."""
    loaders = [
        LoopedLoader(shard(Numbers(9), Sharding(rank, 2), batch_size=2), 4) for rank in range(2)
    ]
    assert all(loader.has_counts for loader in loaders)
    found = [[], []]
    for _ in range(3):
        totals = None
        for rank, loader in enumerate(loaders):
            for number, batch in enumerate(itertools.islice(loader, 4)):
                totals = [loader.total(place) for place in range(4)] if totals is None else totals
                assert [loader.total(place) for place in range(4)] == totals, (
                    "equal on the ranks, and known beforehand"
                )
                found[rank] += batch[: loader.count(number)].tolist()
    assert sorted(flat(found)) == sorted(list(range(9)) * 4)
    assert not LoopedLoader([1], 1).has_counts
    assert LoopedLoader(shard(range(4), Sharding(), sampler=range(4)), 1).has_counts
    by_batches = shard(range(4), Sharding(), batch_sampler=[[0, 1], [2, 3]])
    assert not LoopedLoader(by_batches, 1).has_counts


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(3, 2), torch.zeros(3)], 3),
        ((np.zeros((4, 2)), np.zeros(4)), 4),
        ([["a", "b", "c"], torch.zeros(3)], 3),
        ({"name": ["a", "b"], "x": torch.zeros(2, 5)}, 2),
        ({"x": {"ids": torch.zeros(4, 5)}}, 4),
        (UserDict(x=torch.zeros(6)), 6),
        ([(torch.zeros(5), 1), (torch.zeros(7), 2)], 2),
        ({"x": [torch.zeros(5), torch.zeros(7)]}, 2),
        ([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)], 3),
        (SimpleNamespace(batchsize=torch.tensor(9)), 9),
        (torch.tensor(1.0), 1),
        (None, 1),
        ({}, 1),
    ],
)
def test_how_many_samples_a_batch_has(batch, size):
    assert guess_batch_size(batch) == size


@pytest.mark.parametrize("begin", [iter, lambda looped: looped], ids=["iterator", "loader"])
def test_next_after_the_end_of_a_nominal_epoch_begins_the_next(begin):
    looped = make_dataloader(range(5), looped_nominal_epoch=3, batch_size=1)
    batches = begin(looped)
    found = []
    for _ in range(3):
        found.append(flat([next(batches) for _ in range(3)]))
        assert next(batches, "the end") == "the end"
    assert found == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    batches = iter(looped)
    assert [flat(batches), flat(batches)] == [[4, 0, 1], [2, 3, 4]]


def test_nothing_to_loop_over():
    with pytest.raises(DataError, match=r"LoopedLoader: list yields no batch at all"):
        list(LoopedLoader([], 2))
