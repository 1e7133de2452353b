"""Schedules on real ranks: one trace on any number of processes, and after a kill."""

from __future__ import annotations

import math

import pytest

from tests.contract.test_schedules import CYCLE, KINDS, brain_with, fit, train
from tests.recipes import assert_same, points, weights

RUN = {"global_batch_size": 6, "micro_batch_size": 3}


def traced(folder, kind, dies_at=None, options=None):
    scheduler_class, own = KINDS[kind]
    brain = train(folder, scheduler_class, dies_at, **own, **(options or {}))
    return None if brain is None else (brain.known, brain.rates, weights(brain))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one cycle", pytest.param("plateau", marks=pytest.mark.slow)])
def test_a_schedule_is_the_same_on_any_number_of_processes(ranks, kind, tmp_path):
    [(known, rates, _)] = ranks.run(traced, tmp_path / "1", kind, None, RUN, world_size=1)
    assert known == (4, 12)  # 22 samples
    assert len(rates) == 12
    for world in (2, 3):
        for found in ranks.run(traced, tmp_path / str(world), kind, None, RUN, world_size=world):
            assert found[:2] == (known, pytest.approx(rates, rel=0, abs=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "plateau",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("one cycle", ("every epoch"))),
    ],
)
def test_a_run_that_is_killed_on_two_processes_resumes_its_schedule(ranks, kind, tmp_path):
    expected = ranks.run(traced, tmp_path / "whole", kind, world_size=2)
    assert expected[0][0] == (3, 9)
    assert ranks.run(traced, tmp_path / "killed", kind, (2, 2), world_size=2) == [None, None]
    for found, whole in zip(
        ranks.run(traced, tmp_path / "killed", kind, world_size=2),
        expected,
        strict=True,
    ):
        assert found[0] == whole[0]
        assert found[1] == whole[1][-len(found[1]) :]
        assert_same(found[2], whole[2])


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_run_that_goes_on_with_another_number_of_processes_keeps_its_schedule(
    ranks,
    before,
    after,
    tmp_path,
):
    """Its steps have as many samples as before, so there are as many of them."""
    expected = ranks.run(traced, tmp_path / "whole", "one cycle", world_size=before)[0]
    assert (
        ranks.run(traced, tmp_path / "killed", "one cycle", (2, 3), world_size=before)
        == [None] * before
    )
    for found in ranks.run(traced, tmp_path / "killed", "one cycle", world_size=after):
        assert found[0] == expected[0]
        assert found[1] == expected[1][-len(found[1]) :]


def count(number):
    brain = brain_with(CYCLE, grad_accumulation_factor=2)
    fit(brain, range(1, 4), points(number))
    return brain.known, brain.optimizer_step


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 33, pytest.param(22, marks=pytest.mark.slow)])
def test_the_number_of_steps_follows_the_number_of_processes(ranks, number):
    for world in (1, 2, 3):
        steps = math.ceil(math.ceil(number / (4 * world)) / 2)
        for found in ranks.run(count, number, world_size=world):
            assert found == ((steps, 3 * steps), 3 * steps)
