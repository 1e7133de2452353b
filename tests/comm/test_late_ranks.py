"""A rank that comes late to a barrier is waited for, past the limit of collectives, and is
named.
"""

from __future__ import annotations

import functools
import logging
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddpkit import distributed as ddp
from ddpkit.base import POSITION, RankStatus, beat_key, temporarily
from ddpkit.comm import get_runtime, late_ranks
from ddpkit.errors import RankFailedError, RankMismatchError
from tests.needs import needs_torch

LIMIT = 0.3  # seconds, of each collective
CALLS = {
    "ddp_barrier": ddp.ddp_barrier,
    "ddp_broadcast": lambda: ddp.ddp_broadcast("from rank 0"),
    "gather_objects": lambda: ddp.gather_objects(dist.get_rank),
}


class Said(logging.Handler):
    """Keeps what is said of late ranks."""

    def __enter__(self):
        self.words = []
        self.emit = lambda record: self.words.append(record.getMessage())
        late_ranks.logger.addHandler(self)
        return self.words

    def __exit__(self, *_):
        late_ranks.logger.removeHandler(self)


def main_prepares(call, said_after):
    """Rank 0 works alone, for longer than a collective may take; it tells where it is, as its
    watchdog does.
    """
    get_runtime().timeout = timedelta(seconds=LIMIT)
    ddp.control_group()
    with Said() as words, temporarily(late_ranks, FIRST_WARNING_SECONDS=said_after):
        if ddp.if_main_process():
            time.sleep(LIMIT)
            status = POSITION.own_status(0, 5.0, look=True)
            get_runtime().store.set(beat_key(0), status.to_json())
            time.sleep(2 * LIMIT)
        found = CALLS[call]()
    return found, words


@needs_torch("2.13", "gloo waits as long as its group says, whatever a collective asks for")
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", [*CALLS])
def test_the_main_process_may_come_later_than_the_limit(ranks, call, world_size):
    outcomes = ranks.run(main_prepares, call, 2 * LIMIT, world_size=world_size)
    expected = {"ddp_barrier": None, "ddp_broadcast": "from rank 0"}
    assert all(found == expected.get(call, list(range(world_size))) for found, _ in outcomes), (
        outcomes
    )
    assert outcomes[0][1] == []
    [(_, [words, *_])] = outcomes[1:2]
    assert "rank 1 has waited" in words
    assert f"in {call}, at test_late_ranks.py:" in words
    assert "rank 0 (" in words
    assert "in main_prepares" in words
    assert "run_on_main(func)" in words


def a_lower_rank_waits_too():
    """Rank 0 has said that it waits, and comes late."""
    ddp.control_group()
    with Said() as words, temporarily(late_ranks, FIRST_WARNING_SECONDS=0.1):
        if ddp.if_main_process():
            status = RankStatus(0, "node", 100, beats=1, waits=True)
            get_runtime().store.set(beat_key(0), status.to_json())
            time.sleep(0.3)
        ddp.ddp_barrier()
    return words


def test_of_several_ranks_that_wait_the_first_says_who_is_late(ranks):
    assert ranks.run(a_lower_rank_waits_too) == [[], []]


def departs():
    with temporarily(late_ranks, DEPARTED_SECONDS=0.2):
        return waits_for_departed()


def waits_for_departed():
    ddp.control_group()
    if ddp.if_main_process():
        get_runtime().report.depart()
        get_runtime().store.wait(["has seen"], timedelta(seconds=20))
        return None
    try:
        ddp.ddp_barrier()
    except RankFailedError as error:
        get_runtime().store.set("has seen", "")
        return str(error)
    return None


def test_a_rank_that_has_ended_is_not_waited_for(ranks):
    said = ranks.run(departs)[1]
    assert "rank 1 waits in ddp_barrier, at test_late_ranks.py:" in said
    assert "for rank 0, which has come to its end without making this call" in said


def differ():
    call = (
        ddp.ddp_barrier if ddp.if_main_process() else functools.partial(ddp.sum_over_ranks, [1.0])
    )
    with pytest.raises(RankMismatchError, match="to another collective"):
        call()
    return True


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_another_call_is_still_told_at_once(ranks, world_size):
    assert all(ranks.run(differ, world_size=world_size))


def test_sums_are_right_where_nobody_is_late(ranks):
    assert ranks.run(sums) == [3.0, 3.0]


def sums():
    return float(ddp.ddp_all_reduce(torch.tensor(1.0 + dist.get_rank())))
