"""What a process that fails leaves behind."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ddpkit.base import FailureReport, Position, Reason
from ddpkit.control import failure
from ddpkit.errors import MainProcessError, RankFailedError
from tests.launching import soon

LOST = RuntimeError(
    "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
)


@pytest.fixture(autouse=True)
def _as_if_nothing_had_failed(monkeypatch):
    for name in ("report", "failed", "left"):
        monkeypatch.setattr(failure.PROCESS, name, None)
    position = Position()
    for module in ("control.failure", "base.failure_reason", "base.failure_report"):
        monkeypatch.setattr(f"ddpkit.{module}.POSITION", position)


@pytest.fixture
def report(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", "3")
    return path


class Report(FailureReport):
    """Tells of exceptions that end a rank."""

    def fail(self, error):
        self.tell(Reason.of(self.rank, error, is_final=True))


@pytest.fixture
def words():
    store = dist.HashStore()
    return [Report(store, rank, 3) for rank in range(3)]


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_the_report_is_what_torchrun_reads(report):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    before = int(time.time())
    failure.record_for_launcher(raised(ValueError("two\nlines")))
    found = ProcessFailure(local_rank=3, pid=1, exitcode=1, error_file=str(report))
    assert before <= found.timestamp <= time.time()
    assert found.message["message"] == "ValueError: two\nlines"
    stack = found.message["extraInfo"]["py_callstack"].splitlines()
    assert all(line.startswith("[rank3]: ") for line in stack)
    assert stack[0] == "[rank3]: Traceback (most recent call last):"
    assert stack[-4:-2] == ["[rank3]: ValueError: two", "[rank3]: lines"]
    assert re.fullmatch(
        r"\[rank3\]: rank 3 \(.*\) failed first, at test_failure.py:\d+ in raised: "
        r"ValueError: two",
        stack[-2],
    )
    assert [path.name for path in report.parent.iterdir()] == ["error.json"]


def test_a_later_failure_replaces_an_earlier_one(report):
    failure.record_for_launcher(ValueError("caught by the recipe"))
    failure.record_for_launcher(TypeError("the end"))
    assert json.loads(report.read_text())["message"]["message"] == "TypeError: the end"


@pytest.mark.parametrize("error", [MainProcessError("rank 0 failed"), LOST], ids=["main", "lost"])
def test_what_is_second_hand_is_dated_later(report, error):
    before = time.time()
    failure.record_for_launcher(error)
    assert int(json.loads(report.read_text())["message"]["extraInfo"]["timestamp"]) > before


def test_a_report_that_cannot_be_written_hides_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "such" / "error.json"))
    failure.record_for_launcher(ValueError("the reason"))
    assert not list(tmp_path.iterdir())


def test_the_first_failure_counts_and_is_told_to_the_others(words):
    assert words[0].first_failure() is None
    words[1].fail(KeyError("first"))
    words[2].fail(ValueError("second"))
    found = [one.first_failure() for one in words]
    assert found[1] is None
    assert (
        (found[0].rank, found[0].text)
        == (found[2].rank, found[2].text)
        == (1, ("KeyError: 'first'"))
    )


def test_a_very_long_reason_is_cut(words):
    words[1].fail(ValueError("x" * 10**6))
    assert len(words[0].first_failure().text) < 5000


def test_departures(words):
    words[0].await_departures(0.05)
    words[2].depart()
    assert [one.departed() for one in words] == [[2], [2], []]
    for one in words[:2]:
        one.depart()
    started = time.monotonic()
    words[0].await_departures(10.0)
    assert soon(started, 5)


class GoneStore:
    """A store whose host has died; counts how often it is asked."""

    asked = 0

    def __getattr__(self, name):
        GoneStore.asked += 1
        raise dist.DistNetworkError("Broken pipe")


def test_a_store_that_is_gone_is_asked_once():
    words = Report(GoneStore(), 0, 2)
    assert words.first_failure() is None
    assert words.store_is_lost
    asked = GoneStore.asked
    words.depart()
    assert GoneStore.asked == asked
    words.fail(ValueError())
    words.await_departures(1.0)
    assert words.departed() == []


def test_a_lost_connection_is_explained(words):
    failure.PROCESS.report = words[0]
    unknown = failure.explained(LOST)
    assert isinstance(unknown, RankFailedError)
    assert "no rank has left a reason" in str(unknown)
    assert unknown.__cause__ is LOST
    words[1].depart()
    assert "rank 1 came to the end of its script" in str(failure.explained(LOST))
    words[2].fail(ValueError("boom"))
    assert re.fullmatch(
        r"rank 2 \(.*, pid \d+\) failed first: ValueError: boom",
        str(failure.explained(LOST)),
    )
    for own in (
        ValueError("own"),
        RuntimeError("shapes"),
        MainProcessError("Connection closed by peer"),
        KeyError(),
    ):
        assert failure.explained(own) is own


def test_the_notice_passes_an_exception_on(report, words):
    failure.PROCESS.report = words[0]
    words[2].fail(ValueError("boom"))
    own = ValueError("own")
    with pytest.raises(ValueError, match="own") as caught, failure.failure_notice():
        raise own
    assert caught.value is own
    with (
        pytest.raises(RankFailedError, match=r"rank 2 \(.*\) failed first: ValueError: boom"),
        failure.failure_notice(),
    ):
        raise LOST
    assert not report.exists(), "the script may catch it"


@pytest.mark.parametrize("own", [ValueError("own"), LOST], ids=["its own", "another rank's"])
def test_a_child_says_once_what_passes_through_two_notices(own, words, monkeypatch, caplog):
    monkeypatch.setattr("multiprocessing.parent_process", object)
    failure.PROCESS.report = words[0]
    words[2].fail(ValueError("boom"))
    with (
        pytest.raises((ValueError, RankFailedError)),
        failure.failure_notice(),
        failure.failure_notice(),
    ):
        raise own
    assert len(caplog.records) == 1


def call_hook(error, monkeypatch, words=None):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *arguments: seen.append(arguments))
    failure.watch_uncaught(words)
    failure.watch_uncaught(words)  # a second time changes nothing
    sys.excepthook(type(error), error, error.__traceback__)
    assert len(seen) == 1
    assert failure.PROCESS.failed is not None
    return seen[0]


def test_the_hook_tells_everybody_and_calls_the_one_before(report, words, monkeypatch):
    error = raised(ValueError("boom"))
    kind, shown, trace = call_hook(error, monkeypatch, words[1])
    assert (kind, shown, trace) == (ValueError, error, error.__traceback__)
    told = words[0].first_failure()
    assert (told.rank, told.text, told.is_final) == (1, "ValueError: boom", True)
    assert "ValueError: boom" in report.read_text()
    assert not failure.is_second_hand(failure.PROCESS.failed)


def test_the_hook_shows_second_hand_errors_without_a_traceback(report, words, monkeypatch):
    words[2].fail(ValueError("boom"))
    kind, shown, trace = call_hook(raised(LOST), monkeypatch, words[0])
    assert (kind, trace) == (RankFailedError, None)
    assert re.fullmatch(r"rank 2 \(.*, pid \d+\) failed first: ValueError: boom", str(shown))
    assert failure.is_second_hand(failure.PROCESS.failed)
    assert words[1].first_failure().rank == 2
    stack = json.loads(report.read_text())["message"]["extraInfo"]["py_callstack"]
    assert stack == f"[rank3]: ddpkit.errors.RankFailedError: {shown}"


def test_the_hook_shows_ctrl_c_on_one_line(words, monkeypatch):
    kind, shown, trace = call_hook(raised(KeyboardInterrupt()), monkeypatch, words[0])
    assert (kind, trace) == (KeyboardInterrupt, None)
    assert str(shown).startswith("at test_failure.py:")
    assert str(shown).endswith(" in raised")


def test_the_hook_of_a_forked_child_tells_nobody(words, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", lambda *arguments: None)
    failure.watch_uncaught(words[0])
    # as if this process were a child of the one that set it
    sys.excepthook.process = os.getpid() + 1
    sys.excepthook(ValueError, ValueError("in a child"), None)
    assert words[1].first_failure() is None
    assert failure.PROCESS.failed is None
    failure.watch_uncaught(words[0])  # the child is a rank itself
    sys.excepthook(ValueError, ValueError("in a rank"), None)
    assert words[1].first_failure().text == "ValueError: in a rank"


def test_an_exception_is_logged_once_though_another_hook_stands_between(report, words, monkeypatch):
    """As torch's, which comes with the process group."""
    seen = []
    logged = []
    monkeypatch.setattr(failure.PROCESS, "log", logged.append)
    monkeypatch.setattr(sys, "excepthook", lambda *arguments: seen.append(arguments))
    failure.watch_uncaught()
    below = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", functools.partial(below))
    failure.watch_uncaught(words[1])
    error = raised(ValueError("boom"))
    sys.excepthook(ValueError, error, error.__traceback__)
    assert logged == [error]
    assert seen == [(ValueError, error, error.__traceback__)]
    assert words[0].first_failure().text == "ValueError: boom"


# --------------------------------------------------------------------- what has been caught is over


def progress(step):
    return SimpleNamespace(
        epoch=1,
        step=step,
        optimizer_step=step,
        stage_batches=SimpleNamespace(stage=SimpleNamespace(name="TRAIN")),
    )


def fail_in_fit(error, step=4):
    with (
        pytest.raises(type(error)),
        failure.POSITION.inside(progress(step)),
        failure.failure_notice(),
    ):
        raise error


def test_the_place_of_a_failure_is_told_of_that_one_alone():
    first = ValueError("first")
    fail_in_fit(first)
    assert Reason.of(0, first, is_final=True).place == "in TRAIN of epoch 1 at step 4"
    assert Reason.of(0, KeyError("later, in the script's own code"), is_final=True).place == ""


def test_the_place_of_a_lost_connection_goes_to_what_is_raised_instead(words):
    failure.watch_uncaught(words[0])
    words[2].fail(ValueError("boom"))
    with (
        pytest.raises(RankFailedError) as caught,
        failure.POSITION.inside(progress(7)),
        failure.failure_notice(),
    ):
        raise LOST
    assert Reason.of(0, caught.value, is_final=True).place == "in TRAIN of epoch 1 at step 7"


def test_what_the_script_may_catch_is_no_report(report):
    fail_in_fit(ValueError("caught by the recipe"))
    assert not report.exists()


@pytest.mark.parametrize("error", [ValueError("in a child"), SystemExit(3)])
def test_a_forked_child_tells_nothing_of_what_ends_it(report, words, error):
    failure.watch_uncaught(words[0])
    words[0].process = os.getpid() + 1  # as if this process were a child of the rank
    fail_in_fit(error)
    assert words[1].first_failure() is None
    assert not report.exists()


def test_a_caught_failure_of_a_nested_call_is_none_of_the_outer_one(words):
    failure.watch_uncaught(words[0])
    with failure.POSITION.inside(progress(1)):
        fail_in_fit(ValueError("nested"))
        with failure.POSITION.inside(progress(1)):
            other = words[1].first_failure()
            assert other is None, "that is the third call"
        assert words[1].first_failure() is None
    failure.POSITION.session = 2
    assert words[1].first_failure().text == "ValueError: nested"
    failure.POSITION.session = 0
    assert words[1].first_failure() is None


def test_a_rank_that_is_gone_is_gone_for_who_waits_for_it(words):
    words[0].tell(Reason(2, "disappeared", is_final=True))
    words[0].depart(2)
    assert words[1].has_departed(2)
    assert words[1].first_failure().text == "disappeared"
    for one in words[:2]:
        one.depart()
    began = time.monotonic()
    words[0].await_departures(10.0)
    assert soon(began, 5)
