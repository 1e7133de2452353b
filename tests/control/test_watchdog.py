"""The watchdog and its heartbeat, with a simulated clock and a store in memory: who is named, and
who ends.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from ddpkit.base import (
    PROCESS,
    FailureReport,
    Position,
    RankStatus,
    Reason,
    beat_key,
    state_and_start,
    this_place,
)
from ddpkit.control.heartbeat import BEAT_SECONDS, FIRST_BEATS, SEARCH_SECONDS, SILENT_SECONDS
from ddpkit.control.watchdog import GRACE_SECONDS, LOOK_SECONDS, Watchdog
from ddpkit.training import Progress
from ddpkit.types import Stage
from tests.launching import wait_until


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Asked:
    """Passes on to a store, and counts what it is asked; fails on what it is told to."""

    def __init__(self, store):
        self.store = store
        self.counts = Counter()
        self.fails = {}

    def __getattr__(self, name):
        def ask(*arguments):
            self.counts[name] += 1
            if name in self.fails:
                raise self.fails[name]
            return getattr(self.store, name)(*arguments)

        return ask


class Here(Position):
    """A place in a run that the test moves."""

    waiting = True

    def is_waiting(self):
        return self.waiting


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in ("heartbeat", "watchdog"):
        monkeypatch.setattr(f"ddpkit.control.{module}.time", clock)
    monkeypatch.setattr("ddpkit.base.failure_report.POSITION", Position(session=1))
    return clock


@pytest.fixture
def store():
    return HashStore()


def position(*, inside=True, session=1):
    progress = Progress()
    progress.epoch = 1
    progress.stage_batches = SimpleNamespace(stage=Stage.TRAIN)
    return Here(progress=progress if inside else None, session=session if inside else 0)


class Watched(Watchdog):
    """One rank of some, whose end is only noted."""

    def __init__(self, store, rank=0, world_size=2, near=None, where=None, **options):
        near = range(world_size) if near is None else near
        where = position() if where is None else where
        super().__init__(FailureReport(store, rank, world_size), near, position=where, **options)
        self.ended = []
        self.hang_warning = 30.0
        self.hang_timeout = 1800.0

    def _end(self, text):
        self.ended.append(text)

    def beat(self):
        self.heartbeat.beat(self.report.store)

    def step(self):
        self.position.progress.step += 1
        self.look()


def pass_time(clock, seconds, *watches, beating=()):
    """Let the clock run, a pulse and four looks a second."""
    for quarter in range(int(seconds / LOOK_SECONDS)):
        clock.now += LOOK_SECONDS
        for one in beating:
            if quarter % 4 == 3:
                one.beat()
        for one in watches:
            one.look()


@pytest.fixture
def ended_process():
    """A process that has been, and the moment of its start."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = state_and_start(process.pid)[1]
    process.kill()
    process.communicate()
    return process.pid, started


def ended(rank, host, process, *, machine=None, **more):
    """What a rank has told last whose process has ended since."""
    machine = "/".join(this_place()) if machine is None else machine
    return RankStatus(rank, host, process[0], started=process[1], beats=9, machine=machine, **more)


def warnings_in(caplog, words):
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


# ------------------------------------------------------------------------------------------ silence


def test_a_rank_is_silent_after_four_seconds_without_a_new_pulse(clock, store):
    one = Watched(store, 0)
    other = Watched(store, 1)
    one.is_in_trouble = lambda: True
    other.beat()
    one.beat()
    for _ in range(int(SILENT_SECONDS)):
        clock.now += 1
        one.beat()
        assert one.heartbeat.silent() == {}
    clock.now += 1
    one.beat()
    assert one.heartbeat.silent() == {1: SILENT_SECONDS + 1}
    other.beat()
    one.beat()
    assert one.heartbeat.silent() == {}, "it is heard again"


def test_a_rank_that_has_never_told_anything_is_not_silent(clock, store):
    one = Watched(store, 0, 3)
    pass_time(clock, 60, beating=[one])
    assert one.heartbeat.silent() == {}


def test_the_first_rank_that_still_tells_leads(clock, store):
    ranks = [Watched(store, rank, 3) for rank in range(3)]
    for one in ranks:
        one.is_in_trouble = lambda: True
    for one in ranks * 2:
        one.beat()
    assert [one.heartbeat.is_lowest_alive() for one in ranks] == [True, False, False]
    pass_time(clock, 6, beating=ranks[1:])
    assert [one.heartbeat.is_lowest_alive() for one in ranks[1:]] == [True, False]
    pass_time(clock, 6, beating=ranks[2:])
    assert ranks[2].heartbeat.is_lowest_alive()


def search(clock, seconds, *ranks, near=()):
    """Have the first rank look for those that are silent, while others go on telling."""
    ranks[0].heartbeat.is_searching = True
    for _ in range(int(seconds / 0.25)):
        for one in (ranks[0], *near):
            one.beat()
        clock.now += 0.25


def elsewhere(*ranks):
    """Have ranks say that they are on another machine, where nobody can look for their
    processes.
    """
    for one in ranks:
        one.heartbeat.machine = "another"


@pytest.mark.parametrize("near", [range(2), range(1)], ids=["neighbour", "far"])
def test_who_lost_a_connection_learns_of_a_rank_that_is_silent(clock, store, near):
    one = Watched(store, 0, near=near)
    other = Watched(store, 1)
    elsewhere(other)
    other.beat()
    began = clock.now
    clock.sleep = lambda seconds: (setattr(clock, "now", clock.now + seconds), one.beat())
    reason = one.await_reason()
    assert (reason.rank, reason.pid, reason.is_final) == (1, os.getpid(), True)
    assert reason.text.startswith(
        "disappeared in TRAIN of epoch 1 at step 0: it sent no heartbeat for 2 s"
    )
    assert clock.now - began < 2.5
    assert not one.heartbeat.is_searching


def test_ranks_of_a_machine_that_is_gone_are_all_named_and_nobody_else(clock, store):
    ranks = [Watched(store, rank, 5, near=[rank]) for rank in range(5)]
    elsewhere(*ranks[1:])
    for one in ranks:
        one.beat()
    ranks[4].report.depart()
    search(clock, SEARCH_SECONDS, *ranks, near=ranks[1:2])
    assert ranks[1].report.first_failure() is None, "too early"
    search(clock, 0.5, *ranks, near=ranks[1:2])
    reason = ranks[1].report.first_failure()
    assert reason.rank == 2
    assert "(nor did rank 3)" in reason.text
    assert "rank 4" not in reason.text, "it has departed"
    assert ranks[0].report.departed() == [2, 4], "nobody waits for one that is gone"


def test_a_rank_that_keeps_the_interpreter_lock_is_not_taken_for_the_lost_one(clock, store):
    """Its process is seen to run; that of rank 2, on another machine, is not."""
    ranks = [Watched(store, rank, 3, near=[0, 1]) for rank in range(3)]
    elsewhere(ranks[2])
    for one in ranks:
        one.beat()
    search(clock, SEARCH_SECONDS + 0.5, ranks[0])
    assert ranks[1].report.first_failure().rank == 2
    assert ranks[0].report.departed() == [2]


def test_only_the_first_rank_that_has_lost_a_connection_looks_for_others(clock, store):
    ranks = [Watched(store, rank) for rank in range(2)]
    looked = []
    clock.sleep = lambda seconds: (setattr(clock, "now", clock.now + 1), looked.append(searching()))

    def searching():
        return [one.heartbeat.is_searching for one in ranks]

    assert [one.await_reason() for one in ranks] == [None, None], (
        "nobody is accused whom nobody has missed"
    )
    assert looked[0] == [True, False]
    assert looked[-1] == [False, False]
    known = ranks[0].await_reason(1)
    assert known.rank == 1
    assert "it closed its connections and left no reason" in known.text
    assert ranks[1].report.first_failure() is None, "it may still tell why itself"


def test_nobody_is_accused_who_still_tells(clock, store):
    one = Watched(store, 0)
    other = Watched(store, 1)
    search(clock, 2 * SEARCH_SECONDS, one, near=[other])
    assert one.report.first_failure() is None


# ------------------------------------------------------------------------------------ the heartbeat


def test_the_first_pulses_come_quicker(clock, store):
    pauses = []

    class Over:
        def is_set(self):
            return False

        def wait(self, pause):
            pauses.append(pause)
            clock.now += pause
            return len(pauses) > FIRST_BEATS + 4

    Watched(store).heartbeat.beat_until(Over())
    assert pauses == [0.0] + [BEAT_SECONDS / FIRST_BEATS] * FIRST_BEATS + [BEAT_SECONDS] * 4
    assert sum(pauses[: FIRST_BEATS + 1]) == pytest.approx(BEAT_SECONDS)
    assert RankStatus.read(store.get(beat_key(0))).beats == FIRST_BEATS + 4


@pytest.mark.parametrize("world_size", [2, 9])
def test_a_beat_asks_the_store_three_times_however_many_neighbours_there_are(
    clock,
    store,
    world_size,
):
    ranks = [Watched(store, rank, world_size) for rank in range(world_size)]
    for one in ranks * 2:
        one.beat()
    asked = Asked(store)
    ranks[0].heartbeat.beat(asked)
    assert asked.counts == {"set": 1, "check": 2}


class Boom(Exception):
    pass


@pytest.mark.parametrize("error", [Boom("boom"), RuntimeError("boom"), KeyError("boom")])
def test_an_error_of_its_own_neither_ends_the_pulse_nor_is_taken_for_the_store_s(
    clock,
    store,
    caplog,
    error,
):
    """Nor for the death of this rank, by the others."""
    one = Watched(store, 0)
    other = Watched(store, 1)

    def fail(*_arguments, **_options):
        error.args = (f"boom at {clock.now}",)
        raise error

    one.heartbeat._learn_failure = fail
    over = SimpleNamespace(is_set=lambda: False, wait=lambda _: clock.now > 1060)

    def wait(pause):
        clock.now += pause
        other.beat()
        other.look()
        one.look()
        return clock.now > 1060

    over.wait = wait
    one.heartbeat.beat_until(over)
    assert one.heartbeat.store_lost is None
    assert one.heartbeat.beats > 60
    assert one.ended == other.ended == []
    assert other.heartbeat.silent() == {}
    assert other.heartbeat.latest[0].pid == os.getpid()
    assert len(warnings_in(caplog, "exchanging heartbeats failed")) == 1


def test_numbers_of_any_kind_are_told(clock, store):
    np = pytest.importorskip("numpy")
    one = Watched(store)
    one.position.progress.epoch = np.int64(3)
    one.beat()
    assert json.loads(store.get(beat_key(0)))["epoch"] == 3


@pytest.mark.parametrize("operation", ["set", "check"])
def test_a_store_that_is_gone_ends_the_pulse_and_then_the_run(clock, store, operation, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    asked = Asked(store)
    one = Watched(asked, 2, 3, store_place="node7:1234")
    for rank in range(2):
        Watched(store, rank, 3).beat()
    one.beat()
    asked.clone = lambda: asked
    asked.fails = {name: RuntimeError("Broken pipe\nand a stack") for name in (operation, "check")}
    one.heartbeat.beat_until(threading.Event())
    assert one.heartbeat.store_lost == "Broken pipe"
    pass_time(clock, GRACE_SECONDS + 1, one)
    assert (
        "was lost with the store on node7:1234, which it held, or the network to it" in one.ended[0]
    )
    assert "is cut (Broken pipe)." in one.ended[0]
    assert "rank 0 (" in one.ended[0]


def test_a_store_that_is_gone_with_the_launcher_is_no_proof_of_who_was_first(
    clock,
    store,
    monkeypatch,
):
    """The launcher of a node ends as soon as its one rank has."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    one = Watched(store, 1, 2, store_place="node7:1234")
    one.heartbeat.store_lost = "Broken pipe"
    pass_time(clock, GRACE_SECONDS + 1, one)
    assert "rank 0 has ended, or its launcher has: the store on node7:1234" in one.ended[0]


def test_the_process_ends_where_python_starts_no_thread_to_note_it(monkeypatch):
    """As Python 3.12 at the end of a process."""

    def refuse(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    ends = []
    watch = Watchdog(FailureReport(HashStore(), 0, 1), [], position=position())
    monkeypatch.setattr(PROCESS, "note_end", lambda _: None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr("ddpkit.control.watchdog.os._exit", ends.append)
    watch._end("rank 0 stands still")
    assert ends == [1]


def test_a_store_that_is_gone_is_asked_no_more(store, monkeypatch):
    """Each attempt to reach it prints thirty lines of C++ frames."""
    monkeypatch.setattr(PROCESS, "failed", None)
    asked = Asked(store)
    one = Watched(asked, near=[])
    one.beat()
    asked.clone = lambda: asked
    asked.fails = {"check": RuntimeError("Broken pipe")}
    before = asked.counts["check"]
    one.heartbeat.beat_until(threading.Event())
    assert one.heartbeat.store_lost == "Broken pipe"
    assert asked.counts["check"] == before + 1


def test_the_reason_waits_for_a_call_of_the_store_that_is_under_way(store, monkeypatch):
    """What torch writes of a lost connection stands above it; afterwards the store is not asked
    again.
    """
    monkeypatch.setattr("ddpkit.control.heartbeat.QUIET_SECONDS", 30.0)
    monkeypatch.setattr(PROCESS, "failed", None)
    begun = threading.Event()
    answer = threading.Event()
    told = []
    one = Watched(store)

    def beat(_):
        begun.set()
        answer.wait(30)
        told.append("what torch writes")

    one.heartbeat.beat = beat
    over = threading.Event()
    thread = threading.Thread(target=one.heartbeat.beat_until, args=(over,))
    thread.start()
    assert begun.wait(30)
    monkeypatch.setattr(PROCESS, "failed", ValueError("boom"))
    threading.Timer(0.1, answer.set).start()
    one.heartbeat.await_silence()
    told.append("the reason")
    over.set()
    thread.join(30)
    assert told == ["what torch writes", "the reason"]


def test_a_store_that_was_closed_because_all_is_over_is_not_lost(clock, store):
    one = Watched(store)
    over = threading.Event()

    def clone():
        over.set()
        raise RuntimeError("closed")

    one.heartbeat.report.store = SimpleNamespace(clone=clone)
    one.heartbeat.beat_until(over)
    assert one.heartbeat.store_lost is None


def test_a_store_that_does_not_answer_ends_the_run_after_the_time_for_that(clock, store, capfd):
    one = Watched(store, store_place="node7:1234")
    one.hang_timeout = 20.0
    for _ in range(20):
        clock.now += 1
        one.step()
    assert one.ended == []
    clock.now += 1
    one.step()
    assert "no answer for 21 s from the store on node7:1234" in one.ended[0]
    assert "rank 0: where all threads are:" in capfd.readouterr().err


def test_who_waits_for_the_main_process_ends_too_if_the_store_does_not_answer(clock, store):
    one = Watched(store)
    one.position.unlimited_calls = 1
    one.hang_timeout = 20.0
    pass_time(clock, 19, one)
    assert one.ended == []
    pass_time(clock, 2, one)
    assert "no answer for 20 s from the store on" in one.ended[0]


@pytest.mark.parametrize(
    ("warning", "timeout", "seconds"),
    [(30, 1800, 15), (30, 10, 4), (0, 20, 10), (30, 0, 15)],
)
def test_the_roll_is_called_in_time(clock, store, warning, timeout, seconds):
    one = Watched(store)
    one.hang_warning = float(warning)
    one.hang_timeout = float(timeout)
    clock.now += seconds - 0.5
    assert not one.is_in_trouble()
    clock.now += 0.5
    assert one.is_in_trouble()


# -------------------------------------------------------------------------- launcher and neighbours


def test_without_its_launcher_the_process_ends(clock, store):
    one = Watched(store, parent=os.getppid())
    pass_time(clock, 3, one)
    assert one.ended == []
    one.parent = 1 if os.getppid() != 1 else 2
    one.look()
    assert "is gone: the process ends" in one.ended[0]


def test_a_process_that_no_launcher_has_started_outlives_any(clock, store):
    one = Watched(store, parent=None)
    pass_time(clock, 3, one)
    assert one.ended == []


def test_a_neighbour_that_was_killed_is_named_and_the_others_end(clock, store, ended_process):
    ranks = [Watched(store, rank, 3) for rank in range(3)]
    for one in ranks:
        one.beat()
    gone = ended(2, "node7", ended_process, stage="TRAIN", session=1)
    store.set(beat_key(2), gone.to_json())
    ranks[0].position.progress.step = 12
    pass_time(clock, GRACE_SECONDS + 1.5, *ranks[:2], beating=ranks[:2])
    for one in ranks[:2]:
        assert (
            f"rank 2 (node7, pid {ended_process[0]}) disappeared in TRAIN of epoch 1 at step 12"
        ) in one.ended[0]
        assert one.ended[0].startswith(f"rank {one.rank} ends: ")
        assert "it was killed, or has crashed" in one.ended[0]


def test_a_neighbour_that_has_left_is_not_missed(clock, store, ended_process):
    one = Watched(store)
    Watched(store, 1).beat()
    one.beat()
    store.set(beat_key(1), ended(1, "a", ended_process).to_json())
    FailureReport(store, 1, 2).depart()
    pass_time(clock, 10, one, beating=[one])
    assert one.ended == []
    assert one.heartbeat.failure is None


def test_who_is_killed_after_another_has_failed_is_noted_as_gone_too(
    clock,
    store,
    ended_process,
):
    """A rank that waits for it outside of fit must not wait for ever, whoever is named as the
    reason.
    """
    ranks = [Watched(store, rank, 3, where=position(inside=False)) for rank in range(2)]
    for one in ranks:
        one.beat()
    store.set(beat_key(1), ended(1, "a", ended_process).to_json())
    FailureReport(store, 2, 3).tell(Reason(2, "Boom: b", trace="T", is_final=True))
    pass_time(clock, 3, ranks[0], beating=[ranks[0]])
    assert ranks[0].report.has_departed(1)
    assert ranks[0].report.first_failure().rank == 2


# ------------------------------------------------------------------------ a silent rank, waited for


def listen(clock, store, beats, limit, seconds=40, step=1.0, met=False):
    """Wait for rank 1, which tells in those seconds; return when it was told as gone, or None."""
    one = Watched(store, near=range(1 + met))
    other = Watched(store, 1)
    began = clock.now
    one.hang_timeout = limit
    one.report.awaited = 1
    if met:  # it is known to be on this machine
        other.beat()
    else:
        other.heartbeat.machine = "another"
    while clock.now - began < seconds:
        if clock.now - began in beats:
            other.beat()
        one.beat()
        if one.report.has_departed(1):
            return clock.now - began
        clock.now += step
    return None


@pytest.mark.parametrize(
    ("beats", "limit", "when"),
    [
        ((0, 1, 2), 10.0, 12.0),
        ((), 10.0, 10.0),  # killed before it told anything
        ((0, 1, 9, 18), 10.0, 28.0),
        (range(100), 10.0, None),
        ((0, 1, 2), 0.0, None),
    ],
)
def test_a_rank_that_is_waited_for_and_tells_nothing_is_gone_after_the_hang_timeout(
    clock,
    store,
    beats,
    limit,
    when,
):
    assert listen(clock, store, beats, limit) == when
    reason = FailureReport(store, 0, 2).first_failure()
    if when is None:
        assert reason is None
    else:
        assert f"it sent no heartbeat for 10 s (--hang_timeout={limit:.0f})" in reason.summary()
        assert reason.is_final


def test_a_process_of_this_machine_that_works_is_not_gone_though_it_tells_nothing(
    clock,
    store,
    monkeypatch,
):
    """One call of its code may keep the interpreter lock for long, and is waited for like any
    other.
    """
    assert listen(clock, store, (0, 1, 2), 10.0, met=True) is None
    monkeypatch.setattr(
        "ddpkit.control.heartbeat.state_and_start",
        lambda pid: ("T", state_and_start(pid)[1]),
    )
    assert listen(clock, store, (0, 1, 2), 10.0, met=True) == 12.0, (
        "one that is stopped is not waited for"
    )


def test_time_in_which_the_store_did_not_answer_is_nobodys_silence(clock, store):
    assert listen(clock, store, (0,), 100.0, seconds=1000, step=200.0) is None


def test_a_rank_of_another_machine_is_no_neighbour_though_its_number_is_near(
    clock,
    store,
    ended_process,
):
    """Its process number means another process here, or none."""
    one = Watched(store)
    Watched(store, 1).beat()
    store.set(beat_key(1), ended(1, "another", ended_process, machine="another").to_json())
    pass_time(clock, 10, one, beating=[one])
    assert one.ended == []
    assert one.heartbeat.failure is None


def test_neighbours_are_met_when_they_come(clock, store):
    one = Watched(store, near=[0, 1])
    pass_time(clock, 3, beating=[one])
    assert one.heartbeat.neighbours == [1]
    assert 1 not in one.heartbeat.latest
    Watched(store, 1).beat()
    one.beat()
    assert one.heartbeat.latest[1].beats == 1


# ----------------------------------------------------------------------------------- standing still


@pytest.mark.costly
def test_a_standstill_is_told_once_and_after_twice_that_time_and_so_on(clock, store, caplog):
    one = Watched(store, 0)
    other = Watched(store, 1)
    told = []
    for _ in range(130):
        pass_time(clock, 1, one, other, beating=[one, other])
        told.append(len(warnings_in(caplog, "Where the ranks are")))
    assert [
        second + 1
        for second, number in enumerate(told)
        if number != (told[second - 1] if second else 0)
    ] == [
        30,
        60,
        120,
    ], "by the rank that leads alone"
    text = caplog.records[-1].getMessage()
    assert "No step for 120 s. After 1800 s the run ends" in text
    assert text.count("in TRAIN of epoch 1 at step 0") == 2
    assert one.ended == other.ended == []


def test_the_next_standstill_is_told_again(clock, store, caplog):
    one = Watched(store)
    for stalls in (1, 2):
        pass_time(clock, 40, one, beating=[one])
        assert len(warnings_in(caplog, "No step for 30 s")) == stalls
        one.step()
        pass_time(clock, 20, one, beating=[one])
        assert len(warnings_in(caplog, "No step for")) == stalls, (
            "steps that take their time are none"
        )
        one.step()


def test_a_silent_rank_is_shown_as_such_and_another_one_tells(clock, store, caplog):
    ranks = [Watched(store, rank, 3, near=[rank]) for rank in range(3)]
    pass_time(clock, 16, *ranks, beating=ranks)
    pass_time(clock, 16, *ranks[1:], beating=ranks[1:])
    [text] = [record.getMessage() for record in caplog.records if "No step" in record.getMessage()]
    assert "rank 0 (" in text.splitlines()[1]
    assert "silent for 1" in text.splitlines()[1]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("warning", [0.0, 30.0])
def test_the_timeout_ends_the_run_and_zero_switches_it_off(clock, store, warning, capfd):
    one = Watched(store)
    never = Watched(HashStore())
    for two in (one, never):
        two.hang_warning = warning
        two.hang_timeout = 45.0 if two is one else 0.0
    pass_time(clock, 44, one, never, beating=[one, never])
    assert one.ended == []
    pass_time(clock, 2, one, beating=[one])
    pass_time(clock, 2000, never, beating=[never])
    assert "rank 0 has made no step for 45 s (--hang_timeout=45). Where it is:\n" in one.ended[0]
    assert one.ended[0].count("--hang_timeout") == 1
    assert never.ended == []
    assert "where all threads are" in capfd.readouterr().err


@pytest.mark.costly
def test_no_warning_if_none_is_asked_for(clock, store, caplog):
    one = Watched(store)
    one.hang_warning = one.hang_timeout = 0.0
    pass_time(clock, 2000, one, beating=[one])
    assert not warnings_in(caplog, "No step")


def test_time_in_which_the_process_was_stopped_does_not_count(clock, store, caplog):
    """By SIGSTOP, as schedulers suspend jobs."""
    one = Watched(store)
    one.hang_timeout = 60.0
    pass_time(clock, 20, one, beating=[one])
    clock.now += 5000
    pass_time(clock, 38, one, beating=[one])
    assert one.ended == []
    pass_time(clock, 4, one, beating=[one])
    assert "has made no step for 6" in one.ended[0]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("how", ["unlimited_calls", "outside"])
def test_the_clock_stands_still_in_work_of_the_main_process_and_outside_of_fit(
    clock,
    store,
    caplog,
    how,
):
    one = Watched(store, where=position(inside=how != "outside"))
    one.position.unlimited_calls = int(how == "unlimited_calls")
    one.position.waiting = False
    pass_time(clock, 2000, one, beating=[one])
    assert one.ended == []
    assert not warnings_in(caplog, "No step")


def test_what_the_watch_cannot_see_is_not_taken_for_a_standstill(clock, store, caplog):
    one = Watched(store)
    one.hang_timeout = 40.0
    ends = []

    def mark():
        raise Boom(f"at {clock.now}")

    one.position.mark = mark

    class Over(threading.Event):
        def wait(self, timeout):
            clock.now += timeout
            one.heartbeat.answered = clock.now
            return clock.now > 1200

    one._over = Over()
    one._look()
    assert one.ended == ends == []
    assert len(warnings_in(caplog, "checking the clock failed")) == 1


# ------------------------------------------------------------------------------- failures of others


@pytest.mark.parametrize(
    ("theirs", "final", "inside", "heard"),
    [
        (1, False, True, True),
        (2, False, True, False),
        (2, True, True, True),
        (1, True, False, False),
    ],
)
def test_a_failure_is_heard_by_those_in_the_same_session_or_by_all_if_it_is_final(
    clock,
    store,
    theirs,
    final,
    inside,
    heard,
):
    one = Watched(store, where=position(inside=inside))
    Watched(store, 1).beat()
    FailureReport(store, 1, 2).tell(
        Reason(1, "Boom: b", "node7", 5, "", "Trace", theirs, is_final=final)
    )
    pass_time(clock, GRACE_SECONDS + 2, one, beating=[one])
    assert bool(one.ended) == heard
    if heard:
        assert "rank 1 (node7, pid 5) failed first: Boom: b" in one.ended[0]


def test_a_failure_that_all_may_catch_ends_only_who_waits_for_others(clock, store):
    one = Watched(store)
    one.position.waiting = False
    FailureReport(store, 1, 2).tell(Reason(1, "Boom: b", trace="T", session=1))
    pass_time(clock, 20, one, beating=[one])
    assert one.ended == []
    one.position.waiting = True
    pass_time(clock, GRACE_SECONDS, one, beating=[one])
    assert one.ended == []
    pass_time(clock, 2 * LOOK_SECONDS, one, beating=[one])
    assert one.ended


def test_the_next_session_has_forgotten_the_failure_of_the_last(clock, store, monkeypatch):
    one = Watched(store)
    one.position.waiting = False
    FailureReport(store, 1, 2).tell(Reason(1, "Boom: b", trace="T", session=1))
    pass_time(clock, 2, one, beating=[one])
    assert one.heartbeat.failure is not None
    one.position.session = 2
    one.position.waiting = True
    monkeypatch.setattr("ddpkit.base.failure_report.POSITION", one.position)
    pass_time(clock, 20, one, beating=[one])
    assert one.heartbeat.failure is None
    assert one.ended == []


def test_the_threads_themselves(caplog):
    """They start, beat, look and end; an error in them is said, and they go on."""
    store = HashStore()
    watch = Watchdog(FailureReport(store, 0, 1), [0], position=position())
    watch.heartbeat._learn_failure = lambda _: json.loads("no json")
    with caplog.at_level(logging.WARNING):
        watch.start()
        # get waits for the first
        assert wait_until(lambda: RankStatus.read(store.get(beat_key(0))).beats > 3, 10)
        watch.stop()
    assert not {"ddpkit-heartbeat", "ddpkit-watch"} & {
        thread.name for thread in threading.enumerate()
    }


def test_a_process_that_has_failed_says_no_more(monkeypatch):
    """Its last lines are its error, and not what torch logs of a store that has gone with another
    process.
    """
    store = HashStore()
    monkeypatch.setattr(PROCESS, "failed", ValueError("boom"))
    watch = Watchdog(FailureReport(store, 0, 1), [0], position=position())
    watch.start()
    try:
        time.sleep(3 * BEAT_SECONDS / FIRST_BEATS)
        assert not store.check([beat_key(0)])
    finally:
        watch.stop()


@pytest.mark.parametrize(
    ("here", "there", "says"),
    [
        # what it told is old
        (("TRAIN", 2, 9), ("TRAIN", 2, 3), "disappeared in TRAIN of epoch 2 at step 9:"),
        (("VALID", 2, 13), ("VALID", 2, 8), "disappeared in VALID of epoch 2 at step 8:"),
        (("VALID", 2, 13), ("TRAIN", 2, 8), "disappeared in TRAIN of epoch 2 at step 8:"),
        (("", 0, 0), ("", 0, 0), "disappeared:"),
    ],
)
def test_where_a_lost_rank_was(clock, store, here, there, says):
    one = Watched(store)
    here, there = (RankStatus(stage=a, epoch=b, step=c, beats=1) for a, b, c in (here, there))
    one.position.own_status = lambda *_, **__: here
    one.heartbeat.latest[1] = there
    assert one.heartbeat.disappearance(1, "was killed").text.startswith(says)
