"""The parent of the ranks, with children that cost nothing: shells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ddpkit.control.watchdog import HOLD_SECONDS
from ddpkit.launch import process_monitor
from ddpkit.launch.process_monitor import Ending, Supervisor, cores, end_with_parent, rank_environment
from tests.launching import soon, wait_until


@pytest.fixture
def start():
    """Start shells; at the end none may be left."""
    started = []

    def shell(*scripts):
        started.extend(subprocess.Popen(["bash", "-c", script], start_new_session=True) for script in scripts)
        return [(process.pid, process.poll) for process in started]

    yield shell
    left = [process.pid for process in started if process.poll() is None]
    for process in started:
        process.kill()
        process.wait()
    assert not left


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def send_when_ready(number, *ready):
    """Send this process a signal as soon as the children are ready and somebody here listens to it."""
    before = signal.getsignal(number)

    def send():
        if wait_until(lambda: all(path.exists() for path in ready) and signal.getsignal(number) is not before, 10):
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_all_end_well(start):
    assert Supervisor(start("exit 0", "sleep 0.1")).run() is None


def test_one_fails_and_the_others_are_ended(start):
    began = time.monotonic()
    failure = Supervisor(start("sleep 60", "exit 7", "sleep 60")).run()
    assert (failure.rank, failure.code, failure.words) == (1, 7, "ended with exit code 7")
    assert soon(began, 3)


def test_f1_a_killed_rank_is_named(start):
    failure = Supervisor(start("sleep 60", "kill -9 $$")).run()
    assert (failure.rank, failure.code, failure.words) == (1, 137, "was killed by SIGKILL")


def test_who_ignores_sigterm_is_killed(start, monkeypatch):
    monkeypatch.setattr(process_monitor, "KILL_SECONDS", 0.5)
    began = time.monotonic()
    failure = Supervisor(start("trap '' TERM; while true; do sleep 0.1; done", "sleep 0.3; exit 1")).run()
    assert failure.rank == 1
    assert time.monotonic() - began > 0.5
    assert soon(began, 4)


def test_a_save_has_the_time_that_the_watch_gives_it():
    assert process_monitor.KILL_SECONDS > HOLD_SECONDS


@pytest.mark.parametrize("fails", [False, True])
def test_who_is_deaf_is_killed_when_the_parent_is_told_twice(start, monkeypatch, tmp_path, fails):
    """Also while the others are given time because one has failed."""
    monkeypatch.setattr(process_monitor, "REPEAT_SECONDS", 1.0)
    monkeypatch.setattr(process_monitor, "AGAIN_SECONDS", 0.3)
    first, second = tmp_path / "first", tmp_path / "second"
    deaf = f"trap '' TERM INT; touch {first}; while [ ! -e {second} ]; do sleep 0.05; done; sleep 60"
    children = start(deaf, f"while [ ! -e {first} ]; do sleep 0.05; done; {'exit 3' if fails else 'sleep 60'}")
    began = time.monotonic()
    threads = [send_when_ready(signal.SIGINT, first)]

    def again():
        threads[0].join()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)  # the echo of the first
        time.sleep(0.2)
        second.touch()
        alive.append(children[0][1]() is None)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    alive = []
    threads.append(threading.Thread(target=again))
    threads[1].start()
    failure = Supervisor(children).run()
    for thread in threads:
        thread.join()
    assert alive == [True], "one signal and its echo are not enough"
    assert failure.rank == 1
    assert time.monotonic() - began > 1.0
    assert soon(began, 8)


def test_the_workers_of_a_killed_rank_go_too(start, tmp_path):
    pid = tmp_path / "pid"
    Supervisor(start(f"sleep 77 & echo $! > {pid}; kill -9 $$")).run()
    worker = int(pid.read_text())
    assert wait_until(lambda: is_gone(worker), 3)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_a_signal_is_passed_on_once_to_each(start, tmp_path, name):
    """And it is no failure that a rank ends by it: the other has time to save."""
    end = 128 + getattr(signal, name)
    scripts = [
        f"trap 'echo got >> {tmp_path}/{rank}; sleep {0.4 * rank}; exit {end}' {name[3:]}; "
        f"touch {tmp_path}/ready{rank}; while true; do sleep 0.05; done"
        for rank in range(2)
    ]
    children = start(*scripts)
    before = signal.getsignal(getattr(signal, name))
    thread = send_when_ready(getattr(signal, name), tmp_path / "ready0", tmp_path / "ready1")
    supervisor = Supervisor(children)
    failure = supervisor.run()
    thread.join()
    assert signal.getsignal(getattr(signal, name)) is before
    assert (failure.rank, failure.code) == (0, end)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["got\n", "got\n"]
    assert supervisor.forwarded == [getattr(signal, name)]


def test_who_does_not_end_after_a_signal_is_ended_at_last(start, monkeypatch, tmp_path):
    monkeypatch.setattr(process_monitor, "STOP_SECONDS", 0.3)
    deaf = f"trap '' TERM; touch {tmp_path}/ready; while true; do sleep 0.05; done"
    children = start(deaf, "sleep 60")
    supervisor = Supervisor(children)
    thread = send_when_ready(signal.SIGTERM, tmp_path / "ready")
    assert supervisor.run().code == 128 + signal.SIGTERM
    thread.join()


def test_who_does_not_end_although_all_is_done_is_killed(start, monkeypatch):
    monkeypatch.setattr(process_monitor, "LINGER_SECONDS", 0.3)
    began = time.monotonic()
    assert Supervisor(start("exit 0", "sleep 60"), lambda: True).run().code == 137
    assert soon(began, 3)


def test_an_ignored_signal_stays_ignored(start):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        children = start("sleep 0.3")
        thread = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGHUP))
        thread.start()
        supervisor = Supervisor(children)
        assert supervisor.run() is None
        thread.join()
        assert supervisor.forwarded == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_of_two_that_end_at_once_the_killed_one_counts():
    codes = {0: 1, 1: -9}
    supervisor = Supervisor([(2**22 + rank, lambda rank=rank: codes[rank]) for rank in range(2)])
    assert supervisor.run() == Ending(1, 2**22 + 1, 137)


def test_f2_a_child_ends_with_its_parent(tmp_path):
    child = """
import os, sys, time
from pathlib import Path
from ddpkit.launch.process_monitor import end_with_parent
end_with_parent(int(sys.argv[1]))
Path("ready").write_text(str(os.getpid()))
time.sleep(60)
"""
    parent = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, str(os.getpid())])"
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path)
    ready = tmp_path / "ready"
    assert wait_until(lambda: ready.exists() and ready.read_text(), 20)
    process.kill()
    process.wait()
    pid = int(ready.read_text())
    assert wait_until(lambda: is_gone(pid), 3)


def test_f2_a_child_whose_parent_has_ended_already_ends():
    if sys.platform != "linux":
        end_with_parent(1)
        return
    code = "from ddpkit.launch.process_monitor import end_with_parent; end_with_parent(1); print('still there')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=500)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_the_variables_of_a_rank(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(process_monitor, "cores", lambda: 8)
    assert rank_environment(1, 3, 5)["OMP_NUM_THREADS"] == "2"
    assert rank_environment(1, 99, 5)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in rank_environment(1, 3, 5)


def test_cores_are_those_that_may_be_used():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
