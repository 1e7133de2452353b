"""How a run goes on: the samples of a step on another number of processes, and the place in an epoch."""

from __future__ import annotations

import pytest

from ddpkit.batch_sizes import BatchSizes
from ddpkit.dataloader import LoopedLoader, Sharding, deal_batches, shard
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.options import OPTION_BY_NAME
from ddpkit.resuming import TELLING, Pace, changed_options, read_brain_file
from ddpkit.run_opts import RunOptions

FOUR = Pace(world_size=4, factor=2, per_step=64, per_process=8)


@pytest.mark.parametrize("world_size", [4, None])
def test_as_many_processes_change_nothing(world_size):
    assert Pace(world_size, 2, 64, 8).on(4) == {}
    assert Pace(4, None, 64, 8).on(2) == {}, "a checkpoint that does not tell"


def test_more_processes_take_as_many_and_smaller_batches():
    assert FOUR.on(8) == {"global_batch_size": 64, "grad_accumulation_factor": 2}


def test_fewer_processes_take_more_batches_none_of_them_larger():
    assert FOUR.on(2) == {"global_batch_size": 64, "micro_batch_size": 8, "grad_accumulation_factor": 1}
    assert FOUR.on(2, is_looped=True) == {"global_batch_size": 64, "grad_accumulation_factor": 2}


def test_whole_batches_are_dealt_out_to_whom_they_can_be():
    dealt = Pace(world_size=4, factor=1)
    assert dealt.on(2) == {"grad_accumulation_factor": 2}
    assert dealt.on(1) == {"grad_accumulation_factor": 4}
    for world_size in (3, 8):
        with pytest.raises(ConfigError, match="cannot divide those evenly"):
            dealt.on(world_size)


def test_what_is_written_can_be_read():
    assert Pace.read(FOUR.state_dict()) == FOUR
    assert Pace.read({}) == Pace(None, None)
    assert Pace.read({"world_size": True, "per_step": -1, "per_process": "8"}) == Pace(None, None)


def test_that_of_a_run():
    sizes = BatchSizes(2, (2, 3), 2, 10, None, None)
    planned = shard(range(10), Sharding(), batch_size=2)
    assert Pace.of(sizes, planned) == Pace(2, 2, 10, 3)
    assert Pace.of(sizes, LoopedLoader(planned, 3)) == Pace(2, 2, 10, 3)
    for whole in (shard(range(4), Sharding(), batch_sampler=[[0, 1], [2, 3]]), deal_batches([[1]], Sharding())):
        assert Pace.of(sizes, whole) == Pace(2, 2)


@pytest.mark.parametrize(("step", "expected"), [(0, 0), (4, 8), (10, 20), (3, 8)])
def test_the_place_is_counted_in_steps_of_the_optimizer(step, expected):
    """3 of 2 stands at the end of an epoch, after a short window."""
    now = Pace(2, 4, 64, 8)
    assert now.place(FOUR, step, 32 * step) == (expected, None)


def test_the_place_stays_where_nothing_has_changed():
    assert FOUR.place(FOUR, 5, 100) == (5, None)
    assert FOUR.place(Pace(None, None), 5, 100) == (5, None)
    assert Pace(None, None).place(FOUR, 5, 100)[0] == 3


def test_another_batch_goes_on_after_the_samples_that_were_done():
    step, words = Pace(4, 2, 100, 13).place(FOUR, 10, 320)
    assert step == 6
    assert "64 samples per optimizer step, and now there are 100" in words
    assert "after 300 of the 320 samples" in words


def test_options_that_bear_on_the_numbers():
    now = RunOptions(precision="bf16", max_grad_norm=1.0)
    assert changed_options({name: OPTION_BY_NAME[name].default for name in TELLING}, now) == [
        "precision='bf16', before 'fp32'",
        "max_grad_norm=1.0, before 5.0",
    ]
    assert changed_options({"precision": "bf16", "unknown": 3}, now) == []
    assert "global_batch_size" not in TELLING


def test_the_file_of_the_brain(tmp_path):
    assert read_brain_file(tmp_path) == {}
    (tmp_path / "brain.ckpt").write_text("step: 3\nworld_size: 2\n")
    assert read_brain_file(tmp_path)["step"] == 3
    (tmp_path / "brain.ckpt").write_text("- 1\n")
    assert read_brain_file(tmp_path) == {}
    (tmp_path / "brain.ckpt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"brain\.ckpt"):
        read_brain_file(tmp_path)
