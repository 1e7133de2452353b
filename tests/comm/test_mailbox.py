"""Values and errors over a store: two objects in one process stand for two ranks."""

from __future__ import annotations

import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, TCPStore

from ddpkit.base import FailureReport, Reason
from ddpkit.comm import mailbox
from ddpkit.comm.mailbox import Mailbox, Outcome, call_site, outside_frame, place, raise_as_reader
from ddpkit.errors import MainProcessError, RankFailedError
from tests.launching import wait_until

SITE = "train.py:12 in prepare #0a1b"


class Spied:
    """A store that remembers which keys there are."""

    def __init__(self, store):
        self.store = store
        self.keys = set()

    def set(self, key, value):
        self.keys.add(key)
        self.store.set(key, value)

    def add(self, key, amount):
        self.keys.add(key)
        return self.store.add(key, amount)

    def delete_key(self, key):
        self.keys.discard(key)
        return self.store.delete_key(key)

    def __getattr__(self, name):
        return getattr(self.store, name)


@pytest.fixture(params=["hash", "tcp"])
def boxes(request):
    """Two ends of one store; ``boxes[0].store.keys`` is what is in it."""
    if request.param == "hash":
        stores = [HashStore()] * 2
    else:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores = [
            server,
            TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False),
        ]
    spied = [Spied(store) for store in stores]
    spied[1].keys = spied[0].keys
    return [Mailbox(FailureReport(store, rank, 2)) for rank, store in enumerate(spied)]


def post(box, outcome, site=SITE, readers=1):
    box.post(site, box.next_count(site), outcome, readers)


def read(box, site=SITE, poster=0, readers=1):
    return box.read(site, box.next_count(site), poster=poster, readers=readers)


VALUES = [None, 3, {"a": [1.5, "text"]}, b"", "x" * 1000, list(range(100))]


def test_values_arrive_in_order_and_leave_nothing_behind(boxes):
    main, other = boxes
    for value in VALUES:
        post(main, Outcome(value))
    assert [read(other).value for _ in VALUES] == VALUES
    assert main.store.keys == set()


def test_sites_do_not_mix(boxes):
    main, other = boxes
    for number in range(2):
        post(main, Outcome(f"a{number}"), "a")
        post(main, Outcome(f"b{number}"), "b")
    assert [read(other, "b").value, read(other, "a").value] == ["b0", "a0"]
    assert [read(other, "a").value, read(other, "b").value] == ["a1", "b1"]


def test_a_reader_waits_as_long_as_the_work_takes(boxes):
    main, other = boxes
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read, other)
        time.sleep(0.15)
        assert not waiting.done()
        post(main, Outcome("late"))
        assert waiting.result(60).value == "late"


def test_the_last_of_several_readers_tidies_up():
    store = Spied(HashStore())
    main, *others = [Mailbox(FailureReport(store, rank, 4)) for rank in range(4)]
    post(main, Outcome(5), readers=3)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda box: read(box, readers=3).value, others))
    assert results == [5, 5, 5]
    assert store.keys == set()


def test_large_values_go_in_pieces(boxes, monkeypatch):
    monkeypatch.setattr(mailbox, "PIECE_BYTES", 1000)
    main, other = boxes
    value = list(range(5000))
    post(main, Outcome(value))
    assert len(main.store.keys) > 10
    assert read(other).value == value
    assert main.store.keys == set()


def test_more_than_the_stores_own_limit():
    """Nine megabytes in one piece would break the connection."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    main = Mailbox(FailureReport(client, 0, 2))
    other = Mailbox(FailureReport(server, 1, 2))
    value = bytes(9 << 20)
    post(main, Outcome(value))
    assert read(other).value == value


def test_what_nobody_will_read_is_not_posted_or_is_forgotten(boxes):
    main, other = boxes
    post(main, Outcome(1), readers=0)
    assert main.store.keys == set()
    post(main, Outcome(2), "main alone")
    post(main, Outcome(3), "both")
    assert read(other, "both").value == 3
    # a collective: the others are past these calls, but not past those that it makes itself
    with main.forgetting():
        post(main, Outcome(4), "in it")
        assert any("main alone" in key for key in main.store.keys)
    assert not any("main alone" in key for key in main.store.keys)
    assert read(other, "in it").value == 4
    with main.forgetting():
        pass
    assert main.store.keys == set()


# ----------------------------------------------------------------------------------------- failures


def test_a_failure_arrives_with_its_traceback(boxes):
    def broken():
        raise KeyError("lost")

    main, other = boxes
    try:
        broken()
    except KeyError as error:
        post(main, Outcome(reason=Reason.of(0, error, is_final=False)))
    reason = read(other).reason
    assert reason.text == "KeyError: 'lost'"
    with pytest.raises(MainProcessError) as raised:
        raise_as_reader(reason, SITE, 0)
    text = str(raised.value)
    assert text.startswith(
        "rank 0 failed in the call at train.py:12 in prepare: KeyError: 'lost'\n"
    )
    assert "--- traceback of rank 0 ---\nTraceback (most recent call last):" in text
    assert "in broken" in text
    assert "#0a1b" not in text
    with pytest.raises(RankFailedError, match=r"^rank 2 failed in the call at") as raised:
        raise_as_reader(reason, SITE, 2)
    assert not isinstance(raised.value, MainProcessError)


class Unpicklable:
    def __reduce__(self):
        raise ZeroDivisionError("its own code may raise anything")


def unreadable():
    raise ModuleNotFoundError("not on this rank")


class Unreadable:
    def __reduce__(self):
        return (unreadable, ())


@pytest.mark.parametrize("value", [lambda: 1, threading.Lock(), Unpicklable(), (x for x in ())])
def test_a_value_that_cannot_be_pickled_becomes_none(boxes, caplog, value):
    main, other = boxes
    with caplog.at_level(logging.WARNING):
        post(main, Outcome(value))
    assert read(other) == Outcome()
    assert (
        f"train.py:12 in prepare: the value of this main-only call, a {type(value).__name__}, "
        "cannot"
    ) in caplog.text


def test_a_value_that_cannot_be_read_becomes_none(boxes, caplog):
    main, other = boxes
    post(main, Outcome(Unreadable()))
    with caplog.at_level(logging.WARNING):
        assert read(other) == Outcome()
    assert (
        "cannot be read on rank 1 (ModuleNotFoundError: not on this rank), which gets None"
        in caplog.text
    )
    assert main.store.keys == set()


def test_a_poster_that_has_left(boxes):
    main, other = boxes
    post(main, Outcome("before it left"))
    main.report.depart()
    assert read(other).value == "before it left"
    with pytest.raises(
        RankFailedError,
        match=r"rank 1 waits at train.py:12 in prepare for rank "
        r"0, which has come",
    ):
        read(other)


def test_a_poster_that_left_because_of_a_failure(boxes):
    main, other = boxes
    main.report.tell(Reason.of(0, ValueError("boom"), is_final=True))
    main.report.depart()
    with pytest.raises(
        RankFailedError,
        match=r"^rank 0 \(.*\) failed first: ValueError: "
        r"boom\n\(rank 1 was waiting",
    ):
        read(other)


def test_a_poster_that_was_killed_is_named_as_that(boxes):
    other = boxes[1]
    other.report.tell(Reason(0, "disappeared: it was killed.", "node7", 5, is_final=True))
    other.report.depart(0)
    with pytest.raises(
        RankFailedError,
        match=r"^rank 0 \(node7, pid 5\) disappeared: it was killed.\n\(rank 1 "
        r"was wai",
    ):
        read(other)


def test_the_heartbeat_is_asked_for_a_silent_poster_after_some_seconds(boxes, monkeypatch):
    monkeypatch.setattr(mailbox, "TROUBLE_SECONDS", 0.05)
    main, other = boxes
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read, other)
        assert wait_until(lambda: other.report.awaited == 0, 5)
        post(main, Outcome("late"))
        assert waiting.result(60).value == "late"
    assert other.report.awaited is None


def test_a_lost_store():
    class Lost:
        def check(self, keys):
            raise RuntimeError("Connection reset by peer")

    words = (
        r"connection to another rank or to the store was lost(?s:.*) waiting at train.py:12 in "
        r"prepare for rank 0"
    )
    with pytest.raises(RankFailedError, match=words) as caught:
        read(Mailbox(FailureReport(Lost(), 1, 2)))
    assert str(caught.value.__cause__) == "Connection reset by peer"


def test_long_waits_are_told(boxes, caplog, monkeypatch):
    monkeypatch.setattr(mailbox, "FIRST_WARNING_SECONDS", 0.05)
    monkeypatch.setattr(mailbox, "WARNING_INTERVAL_SECONDS", 600.0)
    main, other = boxes
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read, other)
        assert wait_until(lambda: caplog.records, 10)
        time.sleep(0.2)
        post(main, Outcome())
        waiting.result(60)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1, "now and then, not at every look"
    assert re.match(
        r"rank 1 has waited \d+ s at train.py:12 in prepare for rank 0\. If that is "
        r"not",
        told[0],
    )


# --------------------------------------------------------------------------------------- call sites


def site():
    return call_site(outside_frame())


def helper():
    return site()


def test_call_sites():
    """The same path is the same site; another line, or another way to the same line, is another."""
    again = [helper() for _ in range(3)]
    assert len(set(again)) == 1
    one, other = [helper() for _ in range(2)]
    assert one == other != again[0]
    elsewhere = helper()
    assert elsewhere not in (*again, one)
    assert place(elsewhere).startswith("test_mailbox.py:")
    assert place(elsewhere).endswith(" in helper")
    assert "#" not in place(elsewhere)
    assert call_site(None).startswith("?")


def test_a_call_site_ends_at_the_script():
    """What runs the script, such as a debugger on one rank, is not part of the path."""
    code = compile("found = site()", "recipe.py", "exec")
    namespaces = [{"site": site}, {"site": site}]
    exec(code, namespaces[0])

    def debugger():
        exec(code, namespaces[1])

    debugger()
    assert namespaces[0]["found"] == namespaces[1]["found"]
    assert place(namespaces[0]["found"]) == "recipe.py:1 in <module>"
