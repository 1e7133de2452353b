"""What batch sizes come to, in one line, and which of them contradict each other."""

from __future__ import annotations

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from ddpkit.data import Division
from ddpkit.dataloader import LoopedLoader, Sharding, shard
from ddpkit.errors import ConfigError, DataError
from ddpkit.run_opts import RunOptions
from ddpkit.training.step_sizes import BatchSizes, batch_sizes, micro_batches
from ddpkit.training.too_little_data import check_train_data


def asked(options, world_size):
    return micro_batches(
        options.grad_accumulation_factor,
        options.micro_batch_size,
        options.global_batch_size,
        world_size,
    )


@pytest.mark.parametrize(
    ("given", "world_size", "expected"),
    [
        ({}, 2, 1),
        ({"grad_accumulation_factor": 3}, 2, 3),
        ({"global_batch_size": 64}, 2, 1),
        ({"global_batch_size": 64, "grad_accumulation_factor": 4}, 2, 4),
        ({"global_batch_size": 64, "micro_batch_size": 8}, 1, 8),
        ({"global_batch_size": 64, "micro_batch_size": 8}, 4, 2),
        ({"global_batch_size": 65, "micro_batch_size": 8}, 4, 3),
        ({"global_batch_size": 3, "micro_batch_size": 8}, 4, 1),
        ({"global_batch_size": 64, "micro_batch_size": 8, "grad_accumulation_factor": 2}, 4, 2),
    ],
)
def test_the_accumulation_follows(given, world_size, expected):
    assert asked(RunOptions(**given), world_size) == expected


def test_sizes_that_contradict_each_other():
    with pytest.raises(
        ConfigError,
        match=r"^micro_batch_size=8 divides a global batch, .* Give "
        r"global_batch_size",
    ):
        asked(RunOptions(micro_batch_size=8), 2)
    options = RunOptions(global_batch_size=64, micro_batch_size=8, grad_accumulation_factor=3)
    with pytest.raises(
        ConfigError,
        match=r"^grad_accumulation_factor=3 contradicts .* needs 4 "
        r"batches per step on 2",
    ):
        asked(options, 2)


def said(loader, length, factor=1, world_size=2):
    return str(batch_sizes(loader, length, factor, Division(0, world_size)))


def test_what_is_said_at_the_start():
    for rank in (0, 1):
        loader = shard(range(101), Sharding(rank, 2), batch_size=8)
        assert said(loader, len(loader), factor=2) == (
            "2 processes x batch 8 x accumulation 2 = 32 samples per optimizer step; 4 steps, 101 "
            "samples per epoch"
        )
        loader = shard(range(101), Sharding(rank, 2, global_batch_size=30, micro_batches=4))
        assert said(loader, len(loader), factor=4) == (
            "2 processes x batch 3 to 4 x accumulation 4 = 30 samples per optimizer step; "
            "4 steps, 101 samples per epoch"
        )
    loader = shard(range(101), Sharding(), batch_size=8, drop_last=True)
    assert said(loader, len(loader), world_size=1).startswith(
        "1 process x batch 8 x accumulation 1 = 8 samples"
    )
    assert said(loader, len(loader), world_size=1).endswith("12 steps, 96 samples per epoch")


def test_what_is_said_where_less_is_known():
    loader = shard(range(10), Sharding(0, 2), batch_sampler=[[0, 1, 2], [3], [4, 5, 6], [7, 8, 9]])
    assert said(loader, len(loader)) == (
        "2 processes x batches of changing size x accumulation 1; 2 steps, 10 samples per epoch"
    )
    batches = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    loader = shard(range(10), Sharding(0, 2), batch_sampler=batches)
    assert said(loader, len(loader)) == (
        "2 processes x batch 3 x accumulation 1 = 6 samples per optimizer step; 2 steps, 10 "
        "samples per epoch"
    )
    looped = LoopedLoader(shard(range(10), Sharding(0, 2), batch_size=2), 7)
    assert said(looped, 7).endswith("= 4 samples per optimizer step; 7 steps per epoch")

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    line = said(DataLoader(Stream(), batch_size=4), None)
    assert line == (
        "2 processes x batch 4 x accumulation 1 = 8 samples per optimizer step; an unknown number "
        "of steps per epoch"
    )
    assert said([1, 2], 2) == (
        "2 processes x batches of changing size x accumulation 1; 2 steps per epoch"
    )


def test_what_keeps_the_training_of_one_process():
    words = "64 samples; one process has 32: --global_batch_size=32 trains as one process does"
    loader = shard(range(100), Sharding(0, 2), batch_size=16)
    for one in (loader, LoopedLoader(loader, 4)):
        assert batch_sizes(one, 4, 2, Division(0, 2)).advice() == words
    alone = shard(range(100), Sharding(), batch_size=16)
    assert batch_sizes(alone, 7, 2, Division()).advice() == ""
    dealt = shard(
        range(10),
        Sharding(0, 2),
        batch_sampler=BatchSampler(SequentialSampler(range(10)), 3, False),
    )
    sizes = batch_sizes(dealt, 2, 1, Division(0, 2))
    assert sizes.advice() == "", "there global_batch_size is refused"


def test_a_stream_that_is_divided_unevenly_is_described_alike_on_every_rank():
    """Learning rates are scaled by this number: it must not be the rank's own."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(9))

    for rank in (0, 1):
        sharding = Sharding(rank, 2, global_batch_size=3)
        sizes = batch_sizes(shard(Stream(), sharding), None, 2, sharding.division)
        assert (sizes.per_process, sizes.per_step) == ((1, 2), 6)


def test_batches_that_the_dataset_makes_are_no_samples():
    loader = shard([1, 2, 3], Sharding(0, 2), batch_size=None)
    assert said(loader, len(loader)) == (
        "2 processes x batches of changing size x accumulation 1; 2 steps per epoch"
    )


def test_data_that_cannot_feed_the_ranks(caplog):
    check_train_data(shard(range(4), Sharding(0, 4)), 1)
    check_train_data([1], None)
    assert not caplog.messages
    check_train_data(shard(range(3), Sharding(0, 4)), 1)
    (message,) = caplog.messages
    assert message.startswith(
        "The training set has 3 sample(s) for 4 ranks: a rank without a sample repeats one"
    )
    with pytest.raises(
        DataError,
        match=r"yields no batch.* does not fill one global batch and "
        r"drop_last=True leaves",
    ):
        check_train_data(shard(range(5), Sharding(0, 2), batch_size=4, drop_last=True), 0)


def test_virtual_ranks_are_named():
    sizes = BatchSizes(Division(0, 3, virtual_ranks=6), (2, 2), 1, 12, 5, 53, 2)
    assert str(sizes).startswith(
        "6 virtual ranks on 3 processes x batch 2 x accumulation 1 = 12 samples"
    )
    assert not sizes.advice(), "no other number of processes trains otherwise"


def test_a_division_says_which_shards_are_of_this_rank():
    assert [list(Division(rank, 3).mine) for rank in range(3)] == [[0], [1], [2]]
    assert [list(Division(rank, 2, 6).mine) for rank in range(2)] == [[0, 1, 2], [3, 4, 5]]
    # as many as there are processes are fixed, too
    assert Division(0, 2, 2).is_fixed
    assert not Division(0, 2).is_fixed
    assert (Division(0, 2, 2).given, Division(0, 2).given) == ("virtual_ranks=2", "")
