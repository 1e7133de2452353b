"""The pool of ranks that tests run on: a run that went wrong leaves nothing to the next one."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import RankPool, RankPoolError


def sum_of_ranks():
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return total.item()


def end_the_process():
    os._exit(3)


class Misled(RankPool):
    """Tells every rank something wrong: one fails before torch has counted the group, the other
    after it.
    """

    wrong = True

    def _environment(self, rank, world_size):
        found = super()._environment(rank, world_size)
        return found | ({"MASTER_PORT": "none"}, {"RANK": "7"})[rank] if self.wrong else found


@pytest.mark.slow
def test_a_failed_start_of_a_group_does_not_poison_the_runs_after_it():
    with Misled() as pool:
        outcomes = pool.outcomes(sum_of_ranks)
        assert not any(outcome.ok for outcome in outcomes)
        pool.wrong = False
        assert pool.run(sum_of_ranks) == [3.0, 3.0]
        assert pool.run(sum_of_ranks, world_size=3) == [6.0, 6.0, 6.0]


class SlowStart(RankPool):
    """Ranks that take very long to start."""

    def _start(self, world_size):
        super()._start(world_size)
        self.clock.now += 1000.0


@pytest.mark.slow
def test_the_cold_start_of_ranks_does_not_count_against_the_first_run(monkeypatch):
    with SlowStart(timeout=100.0) as pool:
        pool.clock = SimpleNamespace(now=time.monotonic())
        monkeypatch.setattr(
            "tests.rank_pool.time",
            SimpleNamespace(monotonic=lambda: pool.clock.now),
        )
        assert pool.run(os.getenv, "RANK", world_size=2, init=False) == ["0", "1"]


def test_a_process_that_does_not_start_is_told(monkeypatch):
    # it takes other arguments: a TypeError ends it
    monkeypatch.setattr("tests.rank_pool._serve", end_the_process)
    with RankPool() as pool, pytest.raises(RankPoolError, match="did not start: exit code 1"):
        pool.run(sum_of_ranks)


def environment_and_draw(name):
    return os.environ.get(name), np.random.random()  # noqa: NPY002 -- the state that all of a process share


@pytest.mark.slow
def test_ranks_that_start_again_have_the_environment_of_now_and_draws_of_their_own(monkeypatch):
    with RankPool() as pool:
        pool.run(os.getenv, "RANK", init=False)
        pool.close()
        monkeypatch.setenv("DDPKIT_TEST_OF_THE_POOL", "now")
        (first, one), (second, other) = pool.run(
            environment_and_draw,
            "DDPKIT_TEST_OF_THE_POOL",
            init=False,
        )
    assert first == second == "now"
    assert one != other


def seed_in_the_environment():
    return os.environ.get("DDPKIT_GLOBAL_SEED")


@pytest.mark.slow
def test_ranks_do_not_keep_the_seed_of_the_test_in_which_they_start(monkeypatch):
    monkeypatch.setenv("DDPKIT_GLOBAL_SEED", "4")
    with RankPool() as pool:
        assert pool.run(seed_in_the_environment, init=False) == [None, None]
