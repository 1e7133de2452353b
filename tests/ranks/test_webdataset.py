"""Pipelines of the real webdataset on real ranks: divided by their node splitter, or told what to
pass.
"""

from __future__ import annotations

import io
import itertools
import random
import tarfile
from collections import Counter

import pytest
import torch

from ddpkit.errors import RankFailedError
from tests.ecosystem import each_once, epochs, rows, run_through_and_killed
from tests.ranks.test_likeness import Seen
from tests.recipes import make

wds = pytest.importorskip(
    "webdataset",
    reason="webdataset is in the dev extra: pip install -e '.[dev]'",
)

SHARDS = 4
EACH = 6


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Four files of six samples each."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for number in range(shard * EACH, (shard + 1) * EACH):
                text = str(number).encode()
                entry = tarfile.TarInfo(f"{number:04}.txt")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text))
    return str(folder / "{0..3}.tar")


def to_batch(sample):
    return torch.tensor([float(sample[0])])


def pipeline(urls, nodesplitter=wds.split_by_node):
    pipe = wds.WebDataset(urls, shardshuffle=False, nodesplitter=nodesplitter)
    return pipe.decode().to_tuple("txt").map(to_batch)


def train(urls, num_workers):
    brain = make(Seen, net=torch.nn.Linear(1, 1).double())
    brain.fit(
        [1, 2],
        pipeline(urls),
        train_loader_kwargs={"batch_size": 2, "num_workers": num_workers},
    )
    return brain.seen


@pytest.mark.corner
@pytest.mark.parametrize(
    ("world", "num_workers"),
    [(1, 0), (2, 2), (3, 0), pytest.param(2, 0, marks=pytest.mark.slow)],
)
def test_a_pipeline_is_divided_by_its_node_splitter(ranks, shards, world, num_workers):
    parts = ranks.run(train, shards, num_workers, world_size=world)
    assert Counter(itertools.chain.from_iterable(parts)) == dict.fromkeys(range(SHARDS * EACH), 2)
    if world == 2:
        assert all(len(part) == SHARDS * EACH for part in parts), "half of the shards each"


def train_without(urls):
    data = pipeline(urls, nodesplitter=wds.shardlists.single_node_only)
    for whole in (data, wds.WebLoader(data, batch_size=2)):
        with pytest.raises(ValueError, match="you need to add an explicit nodesplitter"):
            make(Seen).fit([1], whole)


@pytest.mark.costly
def test_a_pipeline_without_a_node_splitter_is_told_what_to_pass(ranks, shards):
    ranks.run(train_without, shards, world_size=2)


def train_on_one_shard(urls):
    with pytest.raises((ValueError, RankFailedError)) as caught:
        make(Seen).fit(
            [1],
            pipeline(urls.replace("{0..3}", "0")),
            train_loader_kwargs={"batch_size": 2},
        )
    return str(caught.value)


@pytest.mark.costly
def test_fewer_shards_than_processes_are_told(ranks, shards):
    assert all(
        "fewer shards than workers" in text
        for text in ranks.run(train_on_one_shard, shards, world_size=2)
    )


def evaluate(urls, shard_evaluation):
    brain = make(Seen, net=torch.nn.Linear(1, 1).double(), shard_evaluation=shard_evaluation)
    loss = brain.evaluate(pipeline(urls), test_loader_kwargs={"batch_size": 2})
    return loss, brain.seen


@pytest.mark.costly
@pytest.mark.parametrize("shard_evaluation", [False, True])
def test_a_pipeline_is_evaluated_divided(ranks, shards, shard_evaluation):
    torch.manual_seed(0)
    (first, seen), (second, others) = ranks.run(evaluate, shards, shard_evaluation, world_size=2)
    assert first == second
    assert sorted(seen + others) == list(range(SHARDS * EACH))


def numbered(urls, num_workers, shuffles):
    """Rows with a number; shuffled with Python's own stream, which follows from seed and epoch
    while it is read.
    """
    table = rows(SHARDS * EACH)
    found = (
        wds.WebDataset(urls, shardshuffle=False, nodesplitter=wds.split_by_node)
        .decode()
        .to_tuple("txt")
    )
    found = found.shuffle(5, initial=5, rng=random) if shuffles else found
    return found.map(lambda sample: table[int(sample[0])]), {
        "batch_size": 2,
        "num_workers": num_workers,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "num_workers", "shuffles"),
    [(1, 0, True), (2, 0, False), (2, 2, True)],
)
def test_a_pipeline_goes_on_inside_an_epoch(ranks, shards, tmp_path, world, num_workers, shuffles):
    found = run_through_and_killed(
        ranks,
        tmp_path,
        world,
        numbered,
        shards,
        num_workers,
        shuffles,
        dies_at=(2, 5),
    )
    assert each_once(found[2], SHARDS * EACH)
    if shuffles:
        first, second, _ = epochs(found[2])
        assert first != second, "each epoch has an order of its own"
