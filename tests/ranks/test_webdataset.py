"""Pipelines of the real webdataset on real ranks: divided by their shards, or told what to pass."""

from __future__ import annotations

import io
import itertools
import random
import tarfile
from collections import Counter

import pytest
import torch

from ddpkit.dataloader import make_dataloader
from ddpkit.logger import get_logger
from tests.contract.recipes import make
from tests.ecosystem import each_once, epochs, rows, run_through_and_killed
from tests.ranks.test_likeness import Seen

wds = pytest.importorskip("webdataset", reason="webdataset is in the dev extra: pip install -e .[dev]")

SHARDS, EACH = 4, 6


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


def pipeline(urls, **options):
    return wds.WebDataset(urls, shardshuffle=False, **options).decode().to_tuple("txt").map(to_batch)


def train(urls, num_workers, options):
    brain = make(Seen, net=torch.nn.Linear(1, 1).double())
    kwargs = {"batch_size": 2, "num_workers": num_workers}
    brain.fit([1, 2], pipeline(urls, **options), train_loader_kwargs=kwargs)
    return brain.seen


@pytest.mark.parametrize("options", [{}, {"nodesplitter": wds.split_by_node}], ids=["as it is", "split by node"])
@pytest.mark.parametrize(("world", "num_workers"), [(1, 0), (2, 0), (2, 2), (3, 0)])
def test_a_pipeline_with_or_without_a_node_splitter_is_divided(ranks, shards, world, num_workers, options):
    parts = ranks.run(train, shards, num_workers, options, world_size=world)
    assert Counter(itertools.chain.from_iterable(parts)) == dict.fromkeys(range(SHARDS * EACH), 2)
    if world == 2:
        assert all(len(part) == SHARDS * EACH for part in parts), "half of the shards each"


def test_a_pipeline_of_fewer_shards_than_processes_is_dealt_out_by_counting(ranks, shards):
    parts = ranks.run(train, shards, 2, {}, world_size=3)
    assert Counter(itertools.chain.from_iterable(parts)) == dict.fromkeys(range(SHARDS * EACH), 2)


def evaluate(urls, shard_evaluation):
    brain = make(Seen, net=torch.nn.Linear(1, 1).double(), shard_evaluation=shard_evaluation)
    loss = brain.evaluate(pipeline(urls), test_loader_kwargs={"batch_size": 2})
    return loss, brain.seen


@pytest.mark.parametrize("shard_evaluation", [False, True])
def test_a_pipeline_is_evaluated_whole_or_divided(ranks, shards, shard_evaluation):
    torch.manual_seed(0)
    (first, seen), (second, others) = ranks.run(evaluate, shards, shard_evaluation, world_size=2)
    assert first == second
    if shard_evaluation:
        assert sorted(seen + others) == list(range(SHARDS * EACH))
    else:
        assert seen == others == list(range(SHARDS * EACH))


def train_on_a_loader(urls):
    loader = wds.WebLoader(pipeline(urls), batch_size=2)
    with pytest.raises(ValueError, match="you need to add an explicit nodesplitter"):
        make(Seen).fit([1], loader)


def test_a_web_loader_without_a_node_splitter_is_told_what_to_pass(ranks, shards):
    ranks.run(train_on_a_loader, shards, world_size=2)


def test_a_shuffle_that_is_seeded_by_the_clock_is_told(shards, caplog):
    """What is left of an epoch after a resume would be another order."""
    for shuffled in ({}, {"seed": 3}, {"rng": random}):
        get_logger("ddpkit.data.streams")._said.clear()
        caplog.clear()
        make_dataloader(pipeline(shards).shuffle(5, **shuffled))
        assert ("shuffle() takes its seed from the clock" in caplog.text) == (not shuffled)


def numbered(urls, num_workers, shuffles):
    """Rows with a number; shuffled with Python's own stream, which follows from seed and epoch while it is read."""
    table = rows(SHARDS * EACH)
    found = wds.WebDataset(urls, shardshuffle=False).decode().to_tuple("txt")
    found = found.shuffle(5, initial=5, rng=random) if shuffles else found
    return found.map(lambda sample: table[int(sample[0])]), {"batch_size": 2, "num_workers": num_workers}


@pytest.mark.slow
@pytest.mark.parametrize(("world", "num_workers", "shuffles"), [(1, 0, True), (2, 0, False), (2, 2, True)])
def test_a_pipeline_goes_on_inside_an_epoch(ranks, shards, tmp_path, world, num_workers, shuffles):
    found = run_through_and_killed(ranks, tmp_path, world, numbered, shards, num_workers, shuffles, dies_at=(2, 5))
    assert each_once(found[2], SHARDS * EACH)
    if shuffles:
        first, second, _ = epochs(found[2])
        assert first != second, "each epoch has an order of its own"
