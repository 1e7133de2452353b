"""Which of the ranks that fail together is first, and what is said of the others."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch.distributed as dist

from ddpkit.base import FailureReport, Reason
from ddpkit.control import failure_order
from ddpkit.control.failure_order import FailureOrder
from tests.launching import soon


@pytest.fixture
def store():
    return dist.HashStore()


def raised(error, depth=0):
    try:
        if depth:
            raised(error, depth - 1)
        raise error
    except type(error) as caught:
        return caught


def order(store, rank, error=None, world_size=2, output="terminal"):
    reason = Reason.of(rank, raised(ValueError("boom")) if error is None else error, is_final=True)
    return FailureOrder(
        FailureReport(store, rank, world_size),
        dataclasses.replace(reason, output=output),
    )


def test_the_first_to_come_is_first(store):
    orders = [order(store, rank, world_size=3) for rank in (2, 0, 1)]
    for one in orders:
        one.take_turn(None)
    assert orders[0].first is None
    assert [one.first.rank for one in orders[1:]] == [2, 2]
    assert " failed first" in orders[0].summary()


def test_one_rank_is_first_however_many_come_at_the_same_moment(store):
    orders = [order(store, rank, world_size=8) for rank in range(8)]
    start = threading.Barrier(8)

    def come(one):
        start.wait()
        one.take_turn(None)

    threads = [threading.Thread(target=come, args=(one,)) for one in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = [one for one in orders if one.first is None]
    assert len(first) == 1
    assert {one.first.rank for one in orders if one.first} == {first[0].own.rank}


def test_the_rank_that_failed_first_in_fit_is_let_pass(store):
    early = order(store, 0)
    late = order(store, 1)
    thread = threading.Thread(target=late.take_turn, args=(0,))
    thread.start()
    early.take_turn(None)
    thread.join()
    assert (early.first, late.first.rank) == (None, 0)


def test_a_rank_that_has_caught_its_failure_is_not_waited_for_long(store, monkeypatch):
    monkeypatch.setattr(failure_order, "TURN_SECONDS", 0.05)
    late = order(store, 1)
    late.take_turn(0)
    assert late.first is None


@pytest.mark.parametrize(
    ("theirs", "own", "likeness"),
    [
        (ValueError("boom"), ValueError("boom"), "same"),
        (ValueError("on cuda:0, at 0x7f3a"), ValueError("on cuda:1, at 0x11ff"), "same"),
        (ValueError("index 5"), ValueError("index 6"), "same line"),
        (ValueError("boom"), KeyError("other"), "same line"),
    ],
)
def test_how_a_failure_is_like_the_first(store, theirs, own, likeness):
    first = order(store, 0, raised(theirs))
    other = order(store, 1, raised(own))
    first.take_turn(None)
    other.take_turn(None)
    assert other.compared_with_first() == likeness


def test_another_way_through_the_code_is_another_failure(store):
    first = order(store, 0, raised(ValueError("boom")))
    other = order(store, 1, raised(ValueError("boom"), 2))
    first.take_turn(None)
    other.take_turn(None)
    assert other.compared_with_first() == "other"


def test_beside_a_rank_that_was_lost_a_failure_is_shown_whole(store):
    FailureReport(store, 0, 2).tell(Reason(0, "disappeared: it was killed.", is_final=True))
    other = order(store, 1)
    other.take_turn(None)
    assert other.compared_with_first() == "other"


def together(first, others):
    """Let all end at the same time; return whom the first names, and by whom the others are
    told.
    """
    for one in (first, *others):
        one.take_turn(None)
    told = {}

    def end(one):
        told[one.own.rank] = one.come_after(is_silent=one.is_read_beside_first())

    threads = [threading.Thread(target=end, args=(one,)) for one in others]
    for thread in threads:
        thread.start()
    named = first.await_others()
    first.note_shown(named)
    for thread in threads:
        thread.join()
    return named, told


def test_who_writes_to_the_same_terminal_leaves_it_to_the_first(store):
    orders = [order(store, rank, world_size=4) for rank in range(4)]
    assert together(orders[0], orders[1:]) == ([1, 2, 3], {1: True, 2: True, 3: True})


@pytest.mark.parametrize("outputs", [("here", "there"), ("", "")], ids=["another", "unknown"])
def test_who_writes_elsewhere_tells_it_there(store, outputs):
    first, other = (order(store, rank, output=output) for rank, output in enumerate(outputs))
    assert together(first, [other]) == ([], {1: False})


def test_who_comes_too_late_tells_it_itself(store, monkeypatch):
    monkeypatch.setattr(failure_order, "OTHERS_SECONDS", 0.0)
    first = order(store, 0)
    other = order(store, 1)
    first.take_turn(None)
    first.note_shown(first.await_others())
    other.take_turn(None)
    assert other.come_after(is_silent=True) is False


def test_a_rank_alone_waits_for_nobody(store, monkeypatch):
    monkeypatch.setattr(failure_order, "OTHERS_SECONDS", 60.0)
    alone = order(store, 0, world_size=1)
    alone.take_turn(None)
    assert alone.await_others() == []


class GoneStore:
    def __getattr__(self, name):
        raise dist.DistNetworkError("Broken pipe")


def test_without_the_store_nothing_is_waited_for_and_nobody_is_called_the_first(monkeypatch):
    for name in ("TURN_SECONDS", "KNOWN_SECONDS", "OTHERS_SECONDS"):
        monkeypatch.setattr(failure_order, name, 60.0)
    one = order(GoneStore(), 1)
    began = failure_order.time.monotonic()
    one.take_turn(0)
    assert one.first is None
    assert one.await_others() == []
    one.note_shown([])
    assert " failed first" not in one.summary()
    assert one.summary().endswith("in raised: ValueError: boom")
    assert soon(began, 2)
