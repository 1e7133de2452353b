"""Sets and streams of the real Hugging Face datasets on real ranks: the same answer, and a resume
inside an epoch.
"""

from __future__ import annotations

import logging
import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.cells import some_of
from tests.ecosystem import (
    OFFLINE,
    assert_same_training,
    columns,
    each_once,
    epochs,
    needs,
    run_through_and_killed,
    train,
)
from tests.rank_pool import RankPool, RankPoolError

pytestmark = needs("datasets")
STEP = {"global_batch_size": 4}


@pytest.fixture(scope="module")
def own_ranks():
    """Ranks that end with this module, and with them what it has imported."""
    with RankPool(timeout=300) as pool:
        yield pool


def table():
    from datasets import Dataset

    return Dataset.from_dict(columns())


def noisy(rows):
    """Draw from all three streams, as augmentations do."""
    noise = random.random() + np.random.rand() + torch.rand(len(rows["id"]), 3)  # noqa: NPY002 -- as users do
    return {"id": rows["id"], "x": torch.tensor(rows["x"]) + noise, "y": torch.tensor(rows["y"])}


def as_set(num_workers, augment):
    data = table().with_transform(noisy) if augment else table().with_format("torch")
    return data, {"shuffle": True, "num_workers": num_workers}


def as_stream(shards, num_workers=0, buffer=0, seed=3):
    data = table().to_iterable_dataset(num_shards=shards).with_format("torch")
    return data.shuffle(seed, buffer_size=buffer) if buffer else data, {"num_workers": num_workers}


def double(row):
    return {"x": [2 * number for number in row["x"]]}


def as_pipeline(seed=3):
    """Map, filter and interleave, with a shuffle buffer in the middle."""
    from datasets import interleave_datasets

    halves = [table().select(part).to_iterable_dataset() for part in (range(13), range(13, 26))]
    shuffled = halves[0].shuffle(seed=seed, buffer_size=4).map(double)
    return interleave_datasets(
        [shuffled, halves[1]],
        stopping_strategy="all_exhausted",
    ).with_format("torch"), {}


def split_by_node():
    from datasets.distributed import split_dataset_by_node

    stream, _ = as_stream(4)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return split_dataset_by_node(stream, rank=rank, world_size=world), {"batch_size": 2}


@pytest.mark.parametrize(
    ("num_workers", "augment"),
    [pytest.param(0, False, marks=pytest.mark.exhaustive), (2, True)],
)
def test_a_set_gives_the_same_training_on_two_ranks_and_goes_on_inside_an_epoch(
    own_ranks,
    tmp_path,
    num_workers,
    augment,
):
    alone, two = (
        run_through_and_killed(
            own_ranks,
            tmp_path / str(world),
            world,
            as_set,
            num_workers,
            augment,
            **STEP,
        )
        for world in (1, 2)
    )
    assert each_once(alone[2])
    assert_same_training(two, alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize("buffer", some_of([0, 5], [5]))
def test_a_stream_of_one_shard_is_dealt_out(own_ranks, tmp_path, buffer):
    alone, two = (
        run_through_and_killed(
            own_ranks,
            tmp_path / str(world),
            world,
            as_stream,
            1,
            0,
            buffer,
            **STEP,
        )
        for world in (1, 2)
    )
    assert each_once(alone[2])
    assert_same_training(two, alone)


@pytest.mark.parametrize(
    ("shards", "num_workers", "buffer"),
    [
        pytest.param(4, 0, 0, marks=pytest.mark.exhaustive),
        pytest.param(4, 0, 5, marks=pytest.mark.exhaustive),
        (4, 2, 5),
        (3, 2, 0),
    ],
)
def test_a_stream_of_several_shards_divides_itself_and_goes_on_inside_an_epoch(
    own_ranks,
    tmp_path,
    shards,
    num_workers,
    buffer,
):
    """Three shards are too few for two ranks with two workers each: they are dealt out."""
    _, _, steps = run_through_and_killed(
        own_ranks,
        tmp_path,
        2,
        as_stream,
        shards,
        num_workers,
        buffer,
        **STEP,
    )
    assert each_once(steps)
    if buffer:
        first, second, _ = epochs(steps)
        assert first != second, "set_epoch is called"


@pytest.mark.parametrize(
    ("shards", "num_workers", "buffer"),
    [
        pytest.param(6, 2, 5, marks=pytest.mark.exhaustive),
        pytest.param(1, 0, 5, marks=pytest.mark.exhaustive),
        (6, 0, 0),
    ],
)
def test_a_stream_has_the_same_bits_with_virtual_ranks(
    own_ranks,
    tmp_path,
    shards,
    num_workers,
    buffer,
):
    """Each of the six virtual ranks has a shard, whichever process reads it."""
    given = {"virtual_ranks": 6, "global_batch_size": 12, "dies_at": (2, 2)}
    alone, *more = (
        run_through_and_killed(
            own_ranks,
            tmp_path / str(world),
            world,
            as_stream,
            shards,
            num_workers,
            buffer,
            **given,
        )
        for world in (1, 2, 3)
    )
    assert each_once(alone[2])
    if not buffer:
        assert epochs(alone[2])[0][0] == [0, 1, 5, 6, 10, 11, 14, 15, 18, 19, 22, 23], (
            "two of each shard"
        )
    for found in more:
        assert found[1:] == alone[1:], "losses, and samples of each step"
        assert all(torch.equal(found[0][name], value) for name, value in alone[0].items())


@pytest.mark.exhaustive
def test_a_stream_that_was_split_by_node_is_left_as_it_is(own_ranks, tmp_path):
    _, _, steps = run_through_and_killed(own_ranks, tmp_path, 2, split_by_node)
    assert each_once(steps)


def test_a_buffer_inside_of_a_pipeline_is_found(own_ranks, tmp_path):
    run_through_and_killed(own_ranks, tmp_path, 1, as_pipeline, **STEP)


def test_a_shuffle_without_a_seed_is_refused_on_several_ranks(own_ranks, tmp_path):
    with pytest.raises(RankPoolError) as caught:
        own_ranks.run(
            train,
            str(tmp_path),
            as_stream,
            (4, 0, 5, None),
            None,
            {},
            world_size=2,
            env=OFFLINE,
        )
    for outcome in caught.value.outcomes:
        assert outcome.error_type == "RankMismatchError"
        assert (
            "shuffle of IterableDataset (without a seed each process shuffles differently: give "
            "one)"
        ) in outcome.error


def resumed_with_another_shuffle(folder):
    """Return what is said when a run goes on whose shuffle has no seed."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("ddpkit")
    logger.addHandler(handler)
    try:
        for dies_at in ((2, 6), None):
            train(folder, as_stream, (1, 0, 5, None), dies_at, STEP)
    finally:
        logger.removeHandler(handler)
    return [line for line in said if "The data has changed since" in line]


def test_a_resume_with_another_shuffle_is_told(own_ranks, tmp_path):
    ((told,),) = own_ranks.run(
        resumed_with_another_shuffle,
        str(tmp_path),
        world_size=1,
        env=OFFLINE,
    )
    assert "shuffle (give it a seed)" in told


def empty_for_one_rank():
    # datasets 5.2 filters what it has formatted
    warnings.filterwarnings("ignore", "To copy construct from a tensor")
    stream, kwargs = as_stream(2)
    return stream.filter(first_half), kwargs


def first_half(row):
    return row["id"] < 13


def test_a_rank_whose_shard_is_empty_ends_all_ranks(own_ranks, tmp_path):
    with pytest.raises(RankPoolError) as caught:
        own_ranks.run(
            train,
            str(tmp_path),
            empty_for_one_rank,
            (),
            None,
            {},
            world_size=2,
            env=OFFLINE,
        )
    for outcome in caught.value.outcomes:
        assert outcome.error_type == "DataError"
        assert "gives a first batch to 1 of 2 rank(s) only" in outcome.error
