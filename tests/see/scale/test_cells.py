"""Which sizes are measured for what is typed."""

from __future__ import annotations

import pytest

from ddpkit.errors import ConfigError
from ddpkit.see.scale.cells import Cell, cells_of, sizes_of, ways_of
from ddpkit.see.scale.rounds import batch_options
from tests.see.scale.results import result


def names(nproc, ways=None):
    return [(cell.way, cell.size) for cell in cells_of(sizes_of(nproc), ways_of(ways))]


def test_one_process_is_measured_once_and_alone_whatever_the_ways():
    assert names("2,1") == [("", 1), ("", 2)]
    assert names("1,2,4", "single,ddp,fsdp") == [("single", 1)] + [
        (way, size) for size in (2, 4) for way in ("ddp", "fsdp")
    ]
    assert names("2,4", "zero1") == [("zero1", 2), ("zero1", 4)]


def test_nn_data_parallel_is_one_process_with_several_gpus():
    cell = Cell("dp", 4)
    assert cell.processes == 1
    assert cell.run_options == {"strategy": "auto", "data_parallel_backend": True}


@pytest.mark.parametrize(
    ("nproc", "ways", "words"),
    [
        ("1,two", None, "--nproc='1,two': give numbers of processes with commas between them"),
        ("0,1", None, "--nproc='0,1'"),
        ("", None, "--nproc=''"),
        (
            "1,2",
            "ddp,horovod",
            "'horovod' is no way to run. Give some of single, dp, ddp, fsdp, zero1.",
        ),
        ("1,2", "single", "--ways=single is one process, and --nproc=1,2 asks for more."),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(nproc, ways, words):
    with pytest.raises(ConfigError, match=words):
        names(nproc, ways)


TWO = Cell("", 2)


def test_a_recipe_keeps_its_own_batches_where_no_scaling_is_asked_for():
    assert batch_options(None, result(1), TWO) == {}
    assert batch_options(None, result(1, global_batch_size=48), TWO) == {}


def test_strong_scaling_keeps_the_samples_of_a_step():
    assert batch_options("strong", result(1), TWO) == {"global_batch_size": 48}
    assert batch_options("strong", result(1, global_batch_size=48), TWO) == {}


def test_weak_scaling_keeps_the_samples_of_a_process():
    assert batch_options("weak", result(1), TWO) == {}
    assert batch_options("weak", result(1, global_batch_size=48), TWO) == {"global_batch_size": 96}
    assert batch_options(
        "weak",
        result(2, per_process=24.0, global_batch_size=48),
        Cell("", 6),
    ) == {"global_batch_size": 144}


def test_weak_scaling_of_one_process_with_several_gpus_gives_it_a_larger_batch():
    assert batch_options("weak", result(1), Cell("dp", 4)) == {"global_batch_size": 192}


def test_the_smallest_size_keeps_the_batch_of_the_recipe():
    assert batch_options("strong", result(1), Cell("", 1)) == {}


def test_batches_that_the_recipe_makes_itself_cannot_be_set():
    with pytest.raises(
        ConfigError,
        match="--strong sets the samples of a step, and this recipe's batch sampler",
    ):
        batch_options("strong", result(1, can_fix_step=False, samples_per_step=None), TWO)
