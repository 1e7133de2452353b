"""The numbers of before: every loss and every weight of small trainings, fresh and resumed, on 1, 2
and 3 ranks.
"""

from __future__ import annotations

import itertools
import json

import pytest

from tests.golden.cases import CASES, WORLD_SIZES
from tests.golden.record import (
    KEPT,
    TRACES,
    fresh_trace,
    machine,
    resume_kept,
    traces_of,
    traces_of_kept,
)

GOLDEN = json.loads(TRACES.read_text())
TRACES_OF = GOLDEN["traces"]
EXACT = GOLDEN["machine"] == machine()
BEFORE = ": a checkpoint of before"

# What a resumed run has in common with the run that was never stopped.
OF_THE_END = ("steps", "weights", "optimizers", "rates", "average")
# What is compared to rounding where the kernels are others: how far apart, as a share of the case's
# `rounding`.
NUMBERS = {"last_losses": 1, "test_loss": 1, "norm": 0.1}
# Trained in each `make test`, once and on two ranks.
QUICK = ("zero1", "local-sgd", "two-optimizers", "schedule-and-lr-scaling")

# On three ranks in `make check`: where numbers of samples, shards or orders of additions are odd.
ON_THREE = ("global-batch", "stream", "zero1", "fsdp", "virtual-ranks")
# On one process in `make check`: where a step is another one there. What the other options change
# is seen on two.
ON_ONE = (
    "plain",
    "norm-dropout-clipping",
    "float64-accumulation",
    "sum-and-count",
    "stream",
    "one-process",
    "virtual-ranks",
    "evaluated-average",
    "skipped-steps",
    "auto-micro-batch",
)


def compare(name, found, expected):
    """Compare the runs of a case with those that were written down."""
    assert found.keys() == expected.keys()
    for part, ranks in found.items():
        compare_ranks(name, part, ranks, expected[part])


def compare_ranks(name, part, ranks, expected):
    for rank, (own, before) in enumerate(zip(ranks, expected, strict=True)):
        where = f"{name}, {part}, rank {rank}: "
        assert own.keys() == before.keys(), where
        assert (own["steps"], own["losses"]) == (before["steps"], before["losses"]), where
        if EXACT:
            assert own == before, where + difference(own, before)
        else:
            compare_to_rounding(own, before, CASES[name].rounding, where)


def compare_to_rounding(own, before, rounding, where):
    for fact, share in NUMBERS.items():
        if fact in before:
            assert own[fact] == pytest.approx(before[fact], rel=share * rounding), where + fact


def difference(own, before):
    """Say what differs; of losses the first one."""
    losses = zip(own.get("every_loss", ()), before.get("every_loss", ()), strict=True)
    for number, (loss, loss_before) in enumerate(losses, 1):
        if loss != loss_before:
            return f"loss {number} of {own['losses']} was {loss_before}, and is {loss}"
    different = [key for key in own if own[key] != before[key]]
    return ", ".join(f"{key} was {before[key]}, and is {own[key]}" for key in different)


def is_in_every_check(name, world_size):
    return world_size == 2 or name in (ON_ONE if world_size == 1 else ON_THREE)


def runs():
    """Return each case on each number of ranks: the slow ones, and those for a release, marked."""
    found = []
    for name, world_size in itertools.product(CASES, WORLD_SIZES):
        marks = [] if name == "plain" and world_size == 1 else [pytest.mark.slow]
        if not is_in_every_check(name, world_size):
            marks.append(pytest.mark.exhaustive)
        found.append(pytest.param(name, world_size, marks=marks))
    return found


@pytest.mark.in_each_check(10)
@pytest.mark.parametrize(("name", "world_size"), runs())
def test_every_number_is_that_of_before(ranks, name, world_size):
    found = traces_of(ranks, name, world_size)
    resumed_on = list(found) if CASES[name].any_ranks else ["fresh", f"resumed on {world_size}"]
    for part in [part for part in resumed_on if part.startswith("resumed")]:
        for fresh, resumed in zip(found["fresh"], found[part], strict=False):
            for fact in OF_THE_END:
                assert resumed[fact] == fresh[fact], f"{part}: the {fact} of the uninterrupted run"
    compare(name, found, TRACES_OF[f"{name} on {world_size}"])


@pytest.mark.parametrize("name", QUICK)
def test_a_run_on_two_ranks_has_the_numbers_of_before(ranks, name):
    expected = TRACES_OF[f"{name} on 2"]["fresh"]
    compare_ranks(name, "fresh", fresh_trace(ranks, name, 2), expected)


@pytest.mark.in_each_check(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_a_checkpoint_of_before_is_resumed_as_it_was(ranks, name):
    compare(name, traces_of_kept(ranks, name), TRACES_OF[name + BEFORE])


def test_a_checkpoint_of_divided_optimizers_is_resumed_as_it_was(ranks):
    expected = TRACES_OF["zero1" + BEFORE]["resumed on 2"]
    compare_ranks("zero1", "resumed on 2", resume_kept(ranks, "zero1", 2), expected)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.any_ranks])
def test_the_bits_written_down_are_those_of_any_number_of_ranks(name):
    runs = [TRACES_OF[f"{name} on {number}"]["fresh"][0] for number in WORLD_SIZES]
    assert all(run[fact] == runs[0][fact] for run in runs for fact in OF_THE_END)
