"""Random augmentation: a function of (seed, epoch, sample), whoever loads the sample, and however
often.
"""

# ruff: noqa: NPY002 -- the global streams are what is tested

from __future__ import annotations

import functools
import itertools
import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)

import ddpkit.augmentation
from ddpkit.augmentation import KeyedBatch, KeyedDataset, sample_seed
from ddpkit.compat import random_streams
from ddpkit.dataloader import (
    LoopedLoader,
    SaveableDataLoader,
    Sharding,
    make_dataloader,
    plan_of,
    reshard,
    shard,
)
from ddpkit.errors import DataError
from ddpkit.seed import mix, mix_key

SEED = 5
SIZE = 22
KINDS = ("python", "numpy", "torch", "all", "own", "torch and own")
SINGLE = ("python", "numpy", "torch", "own")  # "all" and "torch and own" draw from all of these

of_each_kind = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) if kind in SINGLE else kind for kind in KINDS],
)
more_workers_than_cores = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning"
)


def draw(kind):
    """What one sample draws, from each of the streams that ``kind`` names, in float64."""
    drawn = []
    if kind in {"python", "all"}:
        drawn += [random.random(), random.gauss(0, 1)]
    if kind in {"numpy", "all"}:
        drawn += [np.random.rand(), np.random.randn()]
    if "torch" in kind or kind == "all":
        drawn += torch.rand(1, dtype=torch.float64).tolist()
    if "own" in kind:
        drawn += [np.random.default_rng(sample_seed()).random()]
    return drawn


class Noisy(Dataset):
    """A sample is its index and what it drew."""

    def __init__(self, kind, size=SIZE, first=0):
        self.kind = kind
        self.size = size
        self.first = first
        self.loaded = []
        self.epoch = 1

    def __len__(self):
        return self.size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        self.loaded.append(index)
        return torch.tensor(
            [index, *(draw(self.kind) if index >= self.first else [])],
            dtype=torch.float64,
        )


class Ragged(Noisy):
    """Some samples draw, some do not, and which stream they draw from differs."""

    def __getitem__(self, index):
        self.loaded.append(index)
        drawn = draw(("python", "numpy", "torch", "none")[index // 4 % 4])
        return torch.tensor([index, *[*drawn, 0, 0][:2]], dtype=torch.float64)


def expected_of(index, kind, *, seed=SEED, epoch=1, repeat=None):
    """What a sample must draw, from the definition alone."""
    key = mix_key(seed, epoch, index) if repeat is None else mix_key(seed, epoch, index, repeat)
    random.seed(mix(key ^ 1))
    np.random.seed(mix(key ^ 2) & 0xFFFFFFFF)
    torch.manual_seed(mix(key ^ 3) >> 1)
    drawn = draw(kind.replace("own", ""))
    return [index, *drawn, *([np.random.default_rng(key).random()] if "own" in kind else [])]


def states():
    numpy = np.random.get_state(legacy=False)
    words = (
        numpy["state"]["key"].tobytes(),
        numpy["state"]["pos"],
        numpy["has_gauss"],
        numpy["gauss"],
    )
    return random.getstate(), words, torch.get_rng_state().numpy().tobytes()


def samples(loader):
    """The samples that count, as lists, in the order of the loader."""
    plan = plan_of(loader)
    found = []
    for number, batch in enumerate(loader):
        found += batch.tolist() if plan is None else batch[: plan.count(number)].tolist()
    return found


def epochs_of(loader, epochs):
    found = []
    for epoch in epochs:
        loader.set_epoch(epoch)
        found.append(sorted(samples(loader)))
    return found


@pytest.fixture(autouse=True)
def seeded():
    """Streams that differ from test to test and from what the loaders are keyed on."""
    random.seed(101)
    np.random.seed(102)
    torch.manual_seed(103)


# --------------------------------------------------------------------------- the numbers themselves

# seed, epoch, indices and repeats of a batch; what Python, numpy, torch and sample_seed give each
# sample; the collating
GOLDEN = [
    (
        (5, 1, [0, 3], None),
        [
            [12356838303, 201906963, 0.5600654097989117, 30611560, 11896831165054609744],
            [756938385469, 158644182, 0.8227130943119114, 695424560, 17622605168387468854],
        ],
        [831339719061, 557343906, 0.5884972394676833, 417897931, 9782973730742553594],
    ),
    (
        (77, 2, [21], None),
        [
            [581072698564, 205969441, 0.47823607973355187, 850462046, 10532322582038806692],
        ],
        [764050357053, 672734699, 0.19180166971511847, 529600537, 13326322614315983896],
    ),
    (
        (123456789, 40, [1000000000, 2], [0, 1]),
        [
            [348779977077, 1004511055, 0.9747531664657292, 396516230, 7296533980201216489],
            [862700500768, 325481787, 0.2671390081710783, 905669498, 14649803359329610876],
        ],
        [604692005479, 732826763, 0.59556652006353, 466954425, 9452073549455801441],
    ),
]


def some_of_each():
    streams = (
        random.getrandbits(40),
        int(np.random.randint(1 << 30)),
        np.random.rand(),
        torch.randint(1 << 30, ()),
    )
    return [*streams[:3], streams[3].item(), sample_seed()]


class Drawing:
    def __getitem__(self, index):
        return some_of_each()


def also_drawing(items):
    return items, some_of_each()


@pytest.mark.parametrize(("batch", "samples", "collated"), GOLDEN)
def test_the_numbers_are_those_of_every_version(batch, samples, collated):
    """A sample gets bit for bit what it got in earlier versions: a run may be resumed with a newer
    one.
    """
    seed, epoch, indices, repeats = batch
    keyed = KeyedDataset(Drawing(), also_drawing)
    for _ in range(2):  # while it learns what is drawn from, and later
        assert keyed[KeyedBatch(mix_key(seed, epoch), epoch, indices, repeats)] == (
            samples,
            collated,
        )


# -------------------------------------------------------------------------------- the same, and why


@pytest.mark.corner
@more_workers_than_cores
@pytest.mark.parametrize("num_workers", [0, 3, pytest.param(1, marks=pytest.mark.slow)])
@of_each_kind
def test_the_same_whatever_the_workers_and_ranks(kind, num_workers):
    expected = [
        [expected_of(index, kind, epoch=epoch) for index in range(SIZE)] for epoch in (1, 2, 3)
    ]
    for world_size in (1, 2):
        found = [[], [], []]
        for rank in range(world_size):
            options = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
            loader = shard(
                Noisy(kind),
                Sharding(rank, world_size, seed=SEED),
                batch_size=4,
                shuffle=True,
                **options,
            )
            for epoch, own in enumerate(epochs_of(loader, (1, 2, 3))):
                found[epoch] += own
        assert [sorted(epoch) for epoch in found] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_samples_and_seeds_differ(kind):
    found = []
    for seed in (5, 6):
        loader = shard(Noisy(kind), Sharding(seed=seed), batch_size=4, shuffle=True)
        found += epochs_of(loader, (1, 2))
    drawn = [number for epoch in found for sample in epoch for number in sample[1:]]
    assert len(set(drawn)) == len(drawn) == 4 * SIZE * (len(found[0][0]) - 1)


@pytest.mark.corner
@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_that_only_some_samples_draw_from(num_workers):
    """Keyed from the first draw on, though the first batches, and the first of a worker, draw
    nothing or otherwise.
    """
    kinds = ("python", "numpy", "torch", "none")
    expected = [[*expected_of(index, kinds[index // 4 % 4]), 0, 0][:3] for index in range(SIZE)]
    for batch_size in (1, 2, 5):
        loader = shard(
            Ragged(""),
            Sharding(seed=SEED),
            batch_size=batch_size,
            num_workers=num_workers,
        )
        assert sorted(samples(loader)) == expected
    for start in (1, 9):
        backwards = shard(
            Ragged(""),
            Sharding(seed=SEED),
            batch_size=1,
            sampler=range(SIZE - start, -1, -1),
            num_workers=num_workers,
        )
        assert sorted(samples(backwards)) == expected[: SIZE - start + 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_draw_is_keyed_and_loaded_once_more(kind):
    dataset = Noisy(kind, size=12, first=8)
    loader = shard(dataset, Sharding(seed=SEED), batch_size=1)
    before = states()
    found = samples(loader)
    assert states() == before
    assert found == [[index] if index < 8 else expected_of(index, kind) for index in range(12)]
    assert dataset.loaded == [*range(9), *([] if kind == "own" else [8]), *range(9, 12)]


def test_drawing_a_single_number_that_numpy_had_kept():
    """numpy makes normal numbers in pairs: the second moves nothing but a flag."""

    class One(Noisy):
        def __getitem__(self, index):
            return np.random.randn() if index == 6 else float(index)

    np.random.randn()
    before = states()
    assert before[1][2] == 1
    batches = torch.cat(list(shard(One(""), Sharding(seed=SEED), batch_size=2))).tolist()
    assert states() == before
    np.random.seed(mix(mix_key(SEED, 1, 6) ^ 2) & 0xFFFFFFFF)
    assert batches == [np.random.randn() if index == 6 else index for index in range(SIZE)]


# ------------------------------------------------------------------------- what it must not disturb


@pytest.mark.parametrize("kind", [*KINDS, "nothing"])
def test_the_callers_streams_stay_as_they_were(kind):
    """Also if the caller draws between the batches, as dropout does."""
    random.gauss(0, 1)  # keeps a second one for later
    np.random.randn()
    before = states()
    list(shard(Noisy(kind), Sharding(seed=SEED), batch_size=4))
    assert states() == before
    drawn = [draw("all") for _ in range(3)]
    random.setstate(before[0])
    torch.set_rng_state(torch.frombuffer(bytearray(before[2]), dtype=torch.uint8))
    np.random.seed(102)
    np.random.randn()
    assert states() == before
    between = [
        draw("all")
        for _ in itertools.islice(shard(Noisy(kind), Sharding(seed=SEED), batch_size=4), 3)
    ]
    assert between == drawn


def test_without_randomness_nothing_is_loaded_twice():
    dataset = Noisy("nothing")
    list(shard(dataset, Sharding(seed=SEED), batch_size=4))
    assert dataset.loaded == list(range(SIZE))
    dataset = Noisy("all")
    list(shard(dataset, Sharding(seed=SEED), batch_size=4))
    assert dataset.loaded == list(range(SIZE)), "nor where every batch draws"


def test_without_randomness_no_stream_is_seeded_after_the_first_sample(monkeypatch):
    seeded = []
    seed = np.random.seed
    monkeypatch.setattr(np.random, "seed", lambda key: (seeded.append(key), seed(key)))
    list(shard(Noisy("nothing"), Sharding(), batch_size=4))
    assert len(seeded) == 1
    list(shard(Noisy("python", size=8), Sharding(), batch_size=4))
    assert len(seeded) == 1 + 8 + 2, "each sample, and the collating of each batch"


def test_the_loader_keeps_the_users_objects():
    dataset = Noisy("all")
    collate = list
    loader = shard(dataset, Sharding(), batch_size=4, collate_fn=collate)
    next(iter(loader))
    assert loader.dataset is dataset
    assert loader.collate_fn is collate
    assert loader.batch_sampler is plan_of(loader)
    assert loader.worker_init_fn is None


class Failing(Noisy):
    def __getitem__(self, index):
        draw("all")
        if index == 6:
            raise IndexError("no sample 6 here")
        return index


@pytest.mark.parametrize("batch_size", [1, 8])
def test_errors_come_out_as_they_are(batch_size):
    loader = iter(shard(Failing("all"), Sharding(), batch_size=batch_size))
    before = states()
    with pytest.raises(IndexError, match=r"^no sample 6 here$") as caught:
        list(loader)
    assert caught.traceback[-1].name == "__getitem__"
    assert caught.traceback[-1].path.name == "test_augmentation.py"
    assert states() == before
    assert ddpkit.augmentation._NOW.batch is None
    with pytest.raises(
        IndexError,
        match=r"(?s)DataLoader worker process 0.*no sample 6 here",
    ) as caught:
        list(shard(Failing("all"), Sharding(), batch_size=batch_size, num_workers=1))
    assert 'in __getitem__\n    raise IndexError("no sample 6 here")' in str(caught.value)


def test_after_an_error_the_next_batch_is_right():
    class Once(Noisy):
        def __getitem__(self, index):
            if index == 1 and 1 not in self.loaded:
                self.loaded.append(1)
                raise OSError("try again")
            return super().__getitem__(index)

    keyed = KeyedDataset(Once("all"), torch.stack)
    batch = KeyedBatch(mix_key(SEED, 1), 1, [0, 1])
    with pytest.raises(OSError, match="try again"):
        keyed[batch]
    assert keyed[batch].tolist() == [expected_of(index, "all") for index in (0, 1)]


# --------------------------------------------------------------------------------- kinds of loaders


def jitter(items, kind="all"):
    return torch.stack(list(items)), draw(kind)


@pytest.mark.corner
@pytest.mark.parametrize("num_workers", [0, 2])
@of_each_kind
def test_collating_is_keyed_on_the_first_sample(kind, num_workers):
    collate = functools.partial(jitter, kind=kind)
    dataset = Noisy("nothing")
    before = states()
    loader = shard(
        dataset,
        Sharding(seed=SEED),
        batch_size=4,
        collate_fn=collate,
        num_workers=num_workers,
    )
    found = list(loader)
    assert states() == before
    # no sample of the first batch had told that anything is drawn
    twice = () if kind == "own" else range(4)
    assert dataset.loaded == ([] if num_workers else [*twice, *range(SIZE)])
    for batch, drawn in found:
        key = mix(mix_key(SEED, 1, int(batch[0])) ^ ddpkit.augmentation._COLLATE)
        random.seed(mix(key ^ 1))
        np.random.seed(mix(key ^ 2) & 0xFFFFFFFF)
        torch.manual_seed(mix(key ^ 3) >> 1)
        own = [np.random.default_rng(key).random()] if "own" in kind else []
        assert drawn == draw(kind.replace("own", "")) + own
    assert len({tuple(drawn) for _, drawn in found}) == len(found)


class Listing(Noisy):
    """Loads a list in one go."""

    def __getitems__(self, indices):
        self.calls = [*getattr(self, "calls", []), list(indices)]
        return [Noisy.__getitem__(self, index) for index in indices]

    def __getitem__(self, index):
        raise AssertionError("the list is to be asked for")


@pytest.mark.corner
@pytest.mark.parametrize(
    ("num_workers", "batch_size"),
    [(0, 1), (0, 4), (2, 4), pytest.param(2, 1, marks=pytest.mark.slow)],
)
@of_each_kind
def test_a_dataset_that_loads_lists(kind, num_workers, batch_size):
    for dataset in (
        Listing(kind),
        Subset(Listing(kind), range(SIZE)),
        Subset(Noisy(kind), range(SIZE)),
    ):
        loader = shard(
            dataset,
            Sharding(seed=SEED),
            batch_size=batch_size,
            shuffle=True,
            num_workers=num_workers,
        )
        assert sorted(samples(loader)) == [expected_of(index, kind) for index in range(SIZE)]


def test_lists_are_taken_apart_only_for_randomness():
    dataset = Listing("nothing", size=8)
    whole = [[0, 1, 2, 3], [4, 5, 6, 7]]
    for collate in (None, functools.partial(jitter, kind="all")):
        dataset.calls = []
        list(shard(dataset, Sharding(), batch_size=4, collate_fn=collate))
        assert dataset.calls == (whole if collate is None else [whole[0], *whole])
    dataset = Listing("torch", size=8)
    samples(shard(dataset, Sharding(seed=SEED), batch_size=4))
    assert dataset.calls == [[0, 1, 2, 3], *([index] for index in range(8))]
    late = Listing("torch", size=12, first=4)
    found = samples(shard(late, Sharding(seed=SEED), batch_size=4))
    assert found == [[index] if index < 4 else expected_of(index, "torch") for index in range(12)]
    assert late.calls[:2] == whole
    assert late.calls[-4:] == [[8], [9], [10], [11]]


def test_lists_that_begin_to_draw_what_only_the_collating_drew():
    loader = shard(
        Listing("torch", size=12, first=4),
        Sharding(seed=SEED),
        batch_size=4,
        collate_fn=functools.partial(jitter, kind="torch"),
    )
    found = [sample for batch, _ in loader for sample in batch.tolist()]
    assert found == [[index] if index < 4 else expected_of(index, "torch") for index in range(12)]


def test_lists_whose_seeds_are_asked_for_by_index_stay_whole():
    class Bulk(Listing):
        def __getitems__(self, indices):
            self.calls = [*getattr(self, "calls", []), list(indices)]
            return [sample_seed(index) for index in indices]

    dataset = Bulk("nothing", size=8)
    loader = shard(dataset, Sharding(seed=SEED), batch_size=4, collate_fn=list)
    assert list(itertools.chain(*loader)) == [mix_key(SEED, 1, index) for index in range(8)]
    assert dataset.calls == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.costly
def test_a_dataset_that_makes_the_batch_itself_is_keyed_by_the_batch():
    class Made(Listing):
        def __getitems__(self, indices):
            return {"indices": list(indices), "noise": torch.rand(len(indices))}

    for num_workers in (0, 2):
        before = states()
        loader = shard(
            Made(""),
            Sharding(seed=SEED),
            batch_size=4,
            collate_fn=dict,
            num_workers=num_workers,
        )
        found = list(loader)
        assert states() == before
        for batch in found:
            torch.manual_seed(mix(mix_key(SEED, 1, batch["indices"][0]) ^ 3) >> 1)
            assert torch.equal(batch["noise"], torch.rand(len(batch["indices"])))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_of_whole_batches(num_workers):
    loader = shard(
        Noisy("all"),
        Sharding(seed=SEED),
        batch_size=None,
        shuffle=True,
        num_workers=num_workers,
    )
    assert sorted(batch.tolist() for batch in loader) == [
        expected_of(index, "all") for index in range(SIZE)
    ]


def test_a_ready_made_loader_is_keyed_like_any_other():
    ready = DataLoader(Noisy("all"), batch_size=4, shuffle=True)
    assert sorted(samples(reshard(ready, Sharding(seed=SEED)))) == [
        expected_of(index, "all") for index in range(SIZE)
    ]


def test_a_loader_without_a_plan_is_keyed_on_the_global_seed(monkeypatch):
    monkeypatch.setenv("DDPKIT_GLOBAL_SEED", "77")
    loader = SaveableDataLoader(Noisy("all"), batch_size=4, shuffle=True)
    for epoch, found in enumerate(epochs_of(loader, (1, 2)), 1):
        assert found == [expected_of(index, "all", seed=77, epoch=epoch) for index in range(SIZE)]


def test_a_looped_loader_is_keyed_by_its_passes():
    looped = LoopedLoader(shard(Noisy("all", size=6), Sharding(seed=SEED), batch_size=2), 4)
    found = [sample for batch in itertools.chain(looped, looped) for sample in batch.tolist()]
    assert found == [expected_of(step % 6, "all", epoch=step // 6 + 1) for step in range(16)]


def test_streams_are_left_alone():
    class Stream(IterableDataset):
        def __iter__(self):
            return (torch.rand(()) for _ in range(3))

    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    loader = SaveableDataLoader(Stream(), batch_size=3)
    assert torch.equal(next(iter(loader)), expected)


# ----------------------------------------------------------------- samples that come more than once


def weighted():
    return WeightedRandomSampler([1.0, 2.0, 4.0], 24, replacement=True)


@pytest.mark.corner
@pytest.mark.parametrize("make", ["sampler", "batch_sampler", "no plan"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_repeated_sample_is_augmented_anew(make, num_workers):
    """And alike on any number of ranks: every draw of an index is one of the same set."""
    found = {}
    for world_size in (1,) if make == "no plan" or num_workers else (1, 2, 3):
        size = 6 // world_size
        parts = []
        for rank in range(world_size):
            sharding = Sharding(rank, world_size, seed=SEED)
            options = {"num_workers": num_workers}
            if make == "sampler":
                loader = shard(
                    Noisy("all"),
                    sharding,
                    sampler=weighted(),
                    batch_size=size,
                    **options,
                )
            elif make == "batch_sampler":
                loader = shard(
                    Noisy("all"),
                    sharding,
                    batch_sampler=BatchSampler(weighted(), size, False),
                    **options,
                )
            else:
                loader = SaveableDataLoader(
                    Noisy("all"),
                    batch_size=6,
                    sampler=weighted(),
                    **options,
                )
            parts += epochs_of(loader, (2,))[0]
        found[world_size] = sorted(parts)
    alone = found[1]
    assert len({tuple(sample) for sample in alone}) == len(alone) == 24
    if make != "no plan":
        times = {index: sum(sample[0] == index for sample in alone) for index in range(3)}
        assert alone == sorted(
            expected_of(index, "all", epoch=2, repeat=repeat or None)
            for index in range(3)
            for repeat in range(times[index])
        )
        assert all(parts == alone for parts in found.values())


def test_a_repeated_sample_after_a_recovery():
    expected = [
        batch.tolist()
        for batch in shard(Noisy("all"), Sharding(seed=SEED), sampler=weighted(), batch_size=4)
    ]
    for done in range(6):
        loader = shard(Noisy("all"), Sharding(seed=SEED), sampler=weighted(), batch_size=4)
        loader.skip_next(done)
        assert [batch.tolist() for batch in loader] == expected[done:]


class Sized(Noisy):
    def __getitem__(self, index):
        number, size = index
        return [number, size, *draw("all")]


@pytest.mark.costly
def test_indices_that_are_no_numbers():
    batches = [[(0, "small"), (1, "small")], [(0, "large")], [(0, "small")]]
    found = []
    for num_workers in (0, 2):
        loader = shard(
            Sized(""),
            Sharding(seed=SEED),
            batch_sampler=batches,
            collate_fn=list,
            num_workers=num_workers,
        )
        found.append(list(itertools.chain(*loader)))
    assert found[0] == found[1]
    assert len({sample[2] for sample in found[0]}) == 4
    tensors = shard(
        Noisy("all"),
        Sharding(seed=SEED),
        batch_sampler=[torch.tensor([3, 4]), np.array([5])],
    )
    assert samples(tensors) == [expected_of(index, "all") for index in (3, 4, 5)]


# ------------------------------------------------------------------------------- resume and workers


@pytest.mark.corner
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("done", [1, 3])
def test_the_rest_of_an_epoch_after_a_recovery(num_workers, done):
    def make():
        loader = shard(
            Noisy("all"),
            Sharding(seed=SEED),
            batch_size=4,
            shuffle=True,
            num_workers=num_workers,
        )
        loader.set_epoch(2)
        return loader

    expected = [batch.tolist() for batch in make()]
    loader = make()
    loader.skip_next(done)
    assert [batch.tolist() for batch in loader] == expected[done:]
    ready = SaveableDataLoader(Noisy("all"), batch_size=4, num_workers=num_workers)
    whole = [batch.tolist() for batch in ready]
    ready.skip_next(done)
    assert [batch.tolist() for batch in ready] == whole[done:]


class Curious(Noisy):
    def __getitem__(self, index):
        info = get_worker_info()
        return [self.epoch, info is None or info.dataset is self, getattr(self, "started", None)]


def start(worker):
    get_worker_info().dataset.started = worker
    np.random.rand()


@pytest.mark.costly
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_know_the_dataset_and_the_epoch(persistent):
    options = {
        "num_workers": 2,
        "persistent_workers": persistent,
        "worker_init_fn": start,
        "collate_fn": list,
    }
    loader = shard(Curious("", size=4), Sharding(), batch_size=1, **options)
    pids = []
    for epoch in (1, 2, 3):
        loader.set_epoch(epoch)
        if not persistent:
            loader.dataset.set_epoch(epoch)
        iterator = iter(loader)
        assert list(itertools.chain(*iterator)) == [
            [epoch, True, worker] for worker in (0, 1, 0, 1)
        ]
        if persistent:
            pids.append({child.pid for child in multiprocessing.active_children()})
    assert all(pid == pids[0] for pid in pids)


def test_persistent_workers_end_with_their_loader():
    loader = shard(
        Noisy("all", size=4),
        Sharding(),
        batch_size=1,
        num_workers=1,
        persistent_workers=True,
    )
    others = set(multiprocessing.active_children())
    list(loader)
    (worker,) = set(multiprocessing.active_children()) - others
    del loader
    worker.join(60)
    assert not worker.is_alive(), "nothing but the loader holds them, not even in a circle"


@pytest.mark.slow
def test_workers_that_are_spawned():
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "worker_init_fn": start}
    loader = shard(Noisy("all", size=6), Sharding(seed=SEED), batch_size=2, **options)
    assert samples(loader) == [expected_of(index, "all") for index in range(6)]


def test_a_loader_inside_a_dataset():
    """The outer sample is still the one being loaded when the inner loader is done with its own."""

    class Outer(Noisy):
        def __getitem__(self, index):
            first = draw("own")
            inner = [
                batch.tolist() for batch in make_dataloader(Noisy("all", size=4), batch_size=2)
            ]
            return [index, draw("own") == first, inner[0][0][1], *draw("all")]

    loader = shard(Outer("", size=3), Sharding(seed=SEED), batch_size=1, collate_fn=list)
    found = list(itertools.chain(*loader))
    assert [sample[1] for sample in found] == [True] * 3
    assert len({sample[2] for sample in found}) == 1
    assert [[sample[0], *sample[3:]] for sample in found] == [
        expected_of(index, "all") for index in range(3)
    ]


# -------------------------------------------------------------------------------------- sample_seed


def test_sample_seed_outside_of_a_loader_follows_torchs_stream():
    torch.manual_seed(1)
    first = [sample_seed(), sample_seed(3)]
    torch.manual_seed(1)
    assert [sample_seed(), sample_seed(3)] == first
    assert len(set(first)) == 2
    plain = DataLoader(Noisy("own"), batch_size=4)
    assert len({sample[1] for sample in samples(plain)}) == SIZE


# ---------------------------------------------------------------------- how randomness is found out


@pytest.fixture(params=[True, False], ids=["memory", "states"])
def _looks(request, monkeypatch):
    """Look at the generators' memory, or read their states as where that shows nothing."""
    views = random_streams._memory_of_process(np.random.get_bit_generator())
    monkeypatch.setattr(
        random_streams,
        "_memory_of_process",
        lambda bits: views if request.param else (),
    )
    assert views, "else the fast way was never tried"


@pytest.mark.usefixtures("_looks")
@pytest.mark.parametrize("kind", ["all", "torch and own", "nothing"])
def test_late_draws_are_found_either_way(kind):
    before = states()
    found = samples(shard(Noisy(kind, first=8), Sharding(seed=SEED), batch_size=2))
    assert states() == before
    assert found == [expected_of(index, kind) if index >= 8 else [index] for index in range(SIZE)]


@pytest.mark.usefixtures("_looks")
@pytest.mark.parametrize(
    "draw_one",
    [
        random.random,
        lambda: random.gauss(0, 1),
        random.seed,
        np.random.rand,
        np.random.randn,
        lambda: np.random.permutation(3),
        lambda: torch.randn(1),
    ],
)
def test_every_draw_shows(draw_one):
    for _ in range(2):  # the second normal number is one that was kept
        before = ddpkit.augmentation._STREAMS.state()
        assert random_streams.look_at_random_streams() == before[0]
        draw_one()
        assert random_streams.look_at_random_streams() != before[0]
        ddpkit.augmentation._STREAMS.restore(before)
        assert random_streams.look_at_random_streams() == before[0]
        draw_one()


def test_another_bit_generator_in_numpys_place_is_refused():
    held = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(4))
    try:
        with pytest.raises(
            TypeError,
            match=r"PCG64 is in the place of numpy's global "
            r"generator.*sample_seed\(\)",
        ):
            list(shard(Noisy("numpy"), Sharding(seed=SEED), batch_size=2))
    finally:
        np.random.set_bit_generator(held)


class RunsDry:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return next(iter([])) if index == 3 else index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stop_iteration_of_the_dataset_is_no_end_of_the_epoch(num_workers):
    loader = shard(RunsDry(), Sharding(), batch_size=2, num_workers=num_workers)
    with pytest.raises(
        DataError,
        match=r"RunsDry raised StopIteration for the samples \[2, "
        r"3\]: to a loader",
    ):
        list(loader)
