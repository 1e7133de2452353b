"""Threads in lockstep: the order, what each takes away, and what happens when they part or one fails."""

from __future__ import annotations

import threading
import time

import pytest

from ddpkit.errors import ParityError
from ddpkit.lockstep import AbandonedError, Lockstep, standing_in


def run(lockstep, work):
    """Run ``work(rank)`` in a thread per rank; return what each returned or raised."""
    results = {}

    def one(rank):
        try:
            lockstep.wait(rank)
            results[rank] = work(rank)
            lockstep.pass_on(rank)
        except Exception as error:  # noqa: BLE001 -- looked at by the test
            lockstep.give_up()
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(lockstep.size)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "somebody waits for ever"
    return [results[rank] for rank in range(lockstep.size)]


def test_ranks_run_in_order_and_meet():
    seen, turns = [], []
    lockstep = Lockstep(3, turns.append)

    def work(rank):
        seen.append(("first", rank))
        time.sleep(0.01)
        taken = lockstep.meet(rank, "there", rank, lambda values: [10 * value + sum(values) for value in values])
        seen.append(("second", rank))
        return taken

    assert run(lockstep, work) == [3, 13, 23]
    assert seen == [(half, rank) for half in ("first", "second") for rank in range(3)]
    assert turns == [0, 1, 2] * 2


def test_ranks_that_are_at_different_places_are_told_apart():
    lockstep = Lockstep(3)
    outcomes = run(lockstep, lambda rank: lockstep.meet(rank, "here" if rank else "there", None, list))
    assert [type(one) for one in outcomes] == [AbandonedError, AbandonedError, ParityError]
    assert "rank 0 at there, rank 1 at here, rank 2 at here" in str(outcomes[2])


def test_nobody_waits_for_a_rank_that_fails():
    lockstep = Lockstep(3)

    def work(rank):
        if rank == 1:
            raise KeyError(rank)
        return lockstep.meet(rank, "there", None, list)

    assert [type(one) for one in run(lockstep, work)] == [AbandonedError, KeyError, AbandonedError]


def test_a_meeting_knows_that_it_is_one():
    lockstep = Lockstep(1)
    assert lockstep.meet(0, "there", 0, lambda _: [lockstep.is_joining])
    assert not lockstep.is_joining
    with pytest.raises(KeyError):
        lockstep.meet(0, "there", 0, lambda _: {}["nothing"])
    assert not lockstep.is_joining


def test_a_stand_in_goes_again_also_after_an_error():
    class Owner:
        def method(self):
            return "its own"

    owner = Owner()
    with pytest.raises(KeyError), standing_in(owner, "method", lambda: {}["stand-in"]):
        owner.method()
    assert owner.method() == "its own"
    assert vars(owner) == {}
    owner.method = before = lambda: "given"
    with standing_in(owner, "method", lambda: "stand-in"):
        pass
    assert owner.method is before
