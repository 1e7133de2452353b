"""How a run goes on: the samples of a step on another number of processes, and the place in an
epoch.
"""

from __future__ import annotations

import re

import pytest
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ddpkit.base import dump_plain_yaml, load_plain_yaml
from ddpkit.data import Division
from ddpkit.dataloader import LoopedLoader, Sharding, deal_batches, reshard, shard
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.run.brain_file import read_brain_file
from ddpkit.run.data_order import order_of
from ddpkit.run.option_changes import TELLING, changed_options
from ddpkit.run.step_plan import StepPlan
from ddpkit.run_opts import OPTION_BY_NAME, RunOptions
from ddpkit.training import BatchSizes

FOUR = StepPlan(world_size=4, grad_accumulation_factor=2, per_step=64, per_process=8)


@pytest.mark.parametrize("world_size", [4, None])
def test_as_many_processes_change_nothing(world_size):
    assert StepPlan(world_size, 2, 64, 8).on(4) == {}
    assert StepPlan(4, None, 64, 8).on(2) == {}, "a checkpoint that does not tell"


def test_more_processes_take_as_many_and_smaller_batches():
    assert FOUR.on(8) == {"global_batch_size": 64, "grad_accumulation_factor": 2}


def test_fewer_processes_take_more_batches_none_of_them_larger():
    assert FOUR.on(2) == {
        "global_batch_size": 64,
        "micro_batch_size": 8,
        "grad_accumulation_factor": 1,
    }
    assert FOUR.on(2, keeps_batches=True) == {
        "global_batch_size": 64,
        "grad_accumulation_factor": 2,
    }


def test_whole_batches_are_dealt_out_to_whom_they_can_be():
    dealt = StepPlan(world_size=4, grad_accumulation_factor=1)
    assert dealt.on(2) == {"grad_accumulation_factor": 2}
    assert dealt.on(1) == {"grad_accumulation_factor": 4}
    for world_size in (3, 8):
        with pytest.raises(ConfigError, match="processes cannot divide"):
            dealt.on(world_size)


def test_what_is_written_can_be_read():
    assert StepPlan.read(vars(FOUR)) == FOUR
    assert StepPlan.read({}) == StepPlan(None, None)
    assert StepPlan.read({"world_size": True, "per_step": -1, "per_process": "8"}) == StepPlan(
        None,
        None,
    )


def test_that_of_a_run():
    sizes = BatchSizes(Division(0, 2), (2, 3), 2, 10, None, None)
    planned = shard(range(10), Sharding(), batch_size=2)
    assert StepPlan.of(sizes, planned) == StepPlan(2, 2, 10, 3)
    assert StepPlan.of(sizes, LoopedLoader(planned, 3)) == StepPlan(2, 2, 10, 3)
    for whole in (
        shard(range(4), Sharding(), batch_sampler=[[0, 1], [2, 3]]),
        deal_batches([[1]], Sharding()),
    ):
        assert StepPlan.of(sizes, whole) == StepPlan(2, 2)


@pytest.mark.parametrize(("step", "expected"), [(0, 0), (4, 8), (10, 20), (3, 8)])
def test_the_place_is_counted_in_steps_of_the_optimizer(step, expected):
    """3 of 2 stands at the end of an epoch, after a short window."""
    now = StepPlan(2, 4, 64, 8)
    assert now.batches_done(FOUR, step, 32 * step) == (expected, None)


def test_the_place_stays_where_nothing_has_changed():
    assert FOUR.batches_done(FOUR, 5, 100) == (5, None)
    assert FOUR.batches_done(StepPlan(None, None), 5, 100) == (5, None)
    assert StepPlan(None, None).batches_done(FOUR, 5, 100)[0] == 3


def test_another_batch_goes_on_after_the_samples_that_were_done():
    step, words = StepPlan(4, 2, 100, 13).batches_done(FOUR, 10, 320)
    assert step == 6
    assert "64 samples per optimizer step, now there are 100" in words
    assert "after 300 of the 320 samples" in words


@pytest.mark.parametrize(
    ("before", "now", "step", "expected", "said"),
    [
        (
            StepPlan(1, 2),
            StepPlan(1, 4),
            6,
            6,
            "2 batches per optimizer step, now there are 4: the epoch goes on after 6",
        ),
        (StepPlan(1, 4), StepPlan(1, 2), 4, 4, "after 4 of the 4 batches that were done."),
        (
            StepPlan(2, 3),
            StepPlan(4, 1),
            3,
            1,
            (
                r"after 4 of the 6 batches that were done \(2 of "
                r"them are done again\)"
            ),
        ),
    ],
)
def test_dealt_batches_go_on_at_the_same_batch(before, now, step, expected, said):
    """Whole batches have a place of their own: another number of them per step skips none and
    repeats no round.
    """
    found, words = now.batches_done(before, step, 10 * step)
    assert found == expected
    assert re.search(said, words)
    (change,) = now.changes(before)
    batches = (one.world_size * one.grad_accumulation_factor for one in (now, before))
    assert change == "{} batches per optimizer step, before {}".format(*batches)


@pytest.mark.parametrize(("step", "expected"), [(0, 0), (6, 12), (5, 10)])
def test_dealt_batches_on_another_number_of_ranks_keep_their_exact_place(step, expected):
    before = StepPlan(4, 1)
    now = StepPlan(2, before.on(2)["grad_accumulation_factor"])
    assert now.batches_done(before, step, 10) == (expected, None)
    assert now.changes(before) == []
    # the last round of an epoch may be short, and the last step too
    assert before.batches_done(now, 2 * step - 1 if step else 0, 10) == (step, None)


def test_what_changes_in_a_step():
    assert FOUR.changes(FOUR) == FOUR.changes(StepPlan(None, None)) == []
    assert StepPlan(2, 2, 48, 12).changes(FOUR) == ["48 samples per optimizer step, before 64"]


# ---------------------------------------------------------------------------- the order of the data


class Own(Sampler):
    """Another length in every epoch, and it tells by drawing."""

    def __iter__(self):
        raise AssertionError("nothing is drawn")

    def __len__(self):
        raise AssertionError("nothing is drawn")


class Lines(IterableDataset):
    def __iter__(self):
        return iter(range(7))

    def __len__(self):
        raise AssertionError("a length that may be one rank's")


class Items(Dataset):
    def __len__(self):
        return 11


def batches(number=5):
    return [[index] for index in range(number)]


KINDS = {
    "plan": (
        lambda one: shard(Items(), one, batch_size=2),
        {"order": "as it stands", "drop_last": False, "samples": 11},
    ),
    "shuffled": (
        lambda one: shard(Items(), one, batch_size=2, shuffle=True, drop_last=True),
        {"order": "shuffled", "drop_last": True, "samples": 11},
    ),
    "ready-made": (
        lambda one: reshard(DataLoader(Items(), batch_size=2, shuffle=True), one),
        {"order": "shuffled", "drop_last": False, "samples": 11},
    ),
    "global": (
        lambda one: shard(
            Items(),
            Sharding(one.rank, one.world_size, global_batch_size=7, micro_batches=2),
            shuffle=True,
        ),
        {"order": "shuffled", "drop_last": False, "samples": 11},
    ),
    "sampler": (
        lambda one: shard(Items(), one, sampler=range(3), batch_size=2),
        {"order": "by range", "drop_last": False, "samples": 11},
    ),
    "own sampler": (
        lambda one: shard(Items(), one, sampler=Own(), batch_size=2),
        {"order": "by Own", "drop_last": False, "samples": 11},
    ),
    "batches": (
        lambda one: shard(Items(), one, batch_sampler=batches()),
        {"order": "by list", "drop_last": False, "samples": 11},
    ),
    "batch sampler": (
        lambda one: shard(
            Items(),
            one,
            batch_sampler=BatchSampler(RandomSampler(range(9)), 3, drop_last=False),
        ),
        {
            "order": "by BatchSampler of RandomSampler",
            "drop_last": False,
            "samples": 11,
        },
    ),
    "stream": (lambda one: shard(Lines(), one, batch_size=2), {"order": "of Lines"}),
    "loader of one's own": (lambda one: deal_batches([[1]], one), {"order": "of list"}),
    "divided": (
        lambda one: shard(
            Items(),
            one,
            sampler=DistributedSampler(Items(), one.world_size, one.rank),
        ),
        {"order": "of Items"},
    ),
    "looped": (
        lambda one: LoopedLoader(shard(Items(), one, batch_size=2), 4),
        {"order": "as it stands", "drop_last": False, "samples": 11, "nominal epoch": 4},
    ),
    "looped stream": (
        lambda one: LoopedLoader(shard(Lines(), one, batch_size=2), 4),
        {"order": "of Lines", "nominal epoch": 4},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_described_alike_on_every_rank_of_any_number(kind):
    make, expected = KINDS[kind]
    for world_size in (1, 2, 3):
        for rank in range(world_size):
            assert order_of(make(Sharding(rank, world_size))) == expected


def test_a_stream_that_divides_itself_may_have_lengths_of_its_own():
    class Part(Lines):
        is_sharded = True

    assert order_of(shard(Part(), Sharding(1, 2), batch_size=2)) == {"order": "of Part"}
    mine = SequentialSampler(range(4))
    mine.is_sharded = True
    assert order_of(shard(Items(), Sharding(1, 2), sampler=mine)) == {"order": "of Items"}


def test_other_data_in_the_middle_of_an_epoch():
    sizes = BatchSizes(Division(), (2, 2), 1, 2, None, None)

    def pace(number, **options):
        found = StepPlan.of(sizes, shard(range(number), Sharding(), batch_size=2, **options))
        return StepPlan.read(load_plain_yaml(dump_plain_yaml(vars(found))))

    before = pace(40, shuffle=True)
    assert pace(40, shuffle=True).other_data(before) is None
    words = pace(100).other_data(before)
    assert "order as it stands, before shuffled; samples 100, before 40" in words
    assert "drop_last True, before False" in pace(40, shuffle=True, drop_last=True).other_data(
        before
    )
    assert pace(100).other_data(StepPlan(1, 1, 2, 2)) is None, "a checkpoint that does not tell"
    assert pace(100).other_data(StepPlan.read({"data": [3]})) is None
    by_list = StepPlan.of(sizes, shard(range(40), Sharding(), batch_sampler=batches()))
    assert "order by list, before shuffled" in by_list.other_data(before)


def test_options_that_bear_on_the_numbers():
    now = RunOptions(precision="bf16", max_grad_norm=1.0)
    assert changed_options({name: OPTION_BY_NAME[name].default for name in TELLING}, now) == [
        "precision='bf16', before 'fp32'",
        "max_grad_norm=1.0, before 5.0",
    ]
    assert changed_options({"precision": "bf16", "unknown": 3}, now) == []
    assert changed_options({"sync_batchnorm": True}, {"sync_batchnorm": None}) == []
    assert changed_options({}, {"sync_batchnorm": False}) == ["sync_batchnorm=False, before None"]
    assert "global_batch_size" not in TELLING


def test_the_file_of_the_brain(tmp_path):
    assert read_brain_file(tmp_path) == {}
    (tmp_path / "brain.ckpt").write_text("step: 3\nworld_size: 2\n")
    assert read_brain_file(tmp_path)["step"] == 3
    (tmp_path / "brain.ckpt").write_text("- 1\n")
    assert read_brain_file(tmp_path) == {}
    (tmp_path / "brain.ckpt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(
        CheckpointError,
        match=r"brain\.ckpt: .* The checkpoint is damaged; "
        r"delete it or",
    ):
        read_brain_file(tmp_path)
