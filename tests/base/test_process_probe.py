"""Processes that nobody is left to work for."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpkit.base.process_probe import LATER_SECONDS, end_after, has_ended, state_and_start
from tests.launching import soon, wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc to look at")


@pytest.fixture
def start():
    started = []

    def start(*command):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def born(process):
    return state_and_start(process.pid)[1]


def test_a_process_that_does_not_end_is_killed_after_a_while(start):
    process, began = start("sleep", "60"), time.monotonic()
    end_after(process.pid, born(process), 0.3)
    assert process.wait(25) == -9
    assert time.monotonic() - began > 0.3
    assert soon(began, 5)


def test_nothing_happens_to_one_that_ends_by_itself_or_is_another_one(start):
    process = start("sleep", "0.2")
    end_after(process.pid, born(process), 30.0)
    assert process.wait(25) == 0
    other = start("sleep", "60")
    end_after(other.pid, born(other) - 1, 0.0)
    assert other.poll() is None


def test_a_rank_that_has_ended_has_its_parent_killed(start):
    rank = "import os; from ddpkit.base.process_probe import kill_later; kill_later(os.getppid(), 0.5)"
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}]); print('gone', flush=True); "
    process = start(sys.executable, "-c", f"{text}sys.stdin.read()")
    assert process.stdout.readline() == "gone\n"
    assert process.wait(50) == -9


def _text(path):
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_a_zombie_has_ended(start):
    process = start("true")
    started = born(process)
    assert wait_until(lambda: has_ended(process.pid, started), 5), "nobody has asked for its exit code yet"


SILENT = """
import ctypes, sys, time
from ddpkit.base.process_probe import Guard

def hold_the_lock():
    while True:
        ctypes.PyDLL(None).sleep(1000)  # a signal ends a sleep

guard = Guard("rank 3 (here)", lambda: float(sys.argv[1]))
for number in range(20):
    guard.hear()
    time.sleep(0.05)
print("silent", flush=True)
if sys.argv[2] == "lock":
    hold_the_lock()
sys.stdin.read()
"""


def guards_of(process):
    wanted = f"end_when_silent({process.pid}, "
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if wanted in _text(path)]


@pytest.mark.slow
def test_a_process_that_keeps_the_interpreter_lock_is_ended_by_its_guard(tmp_path):
    with (tmp_path / "stderr").open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", SILENT, "2", "lock"], stdout=subprocess.PIPE, stderr=file)
    assert process.stdout.readline() == b"silent\n"
    assert process.wait(100) == -9
    process.stdout.close()
    text = (tmp_path / "stderr").read_text()
    assert "in hold_the_lock" in text.partition("rank 3 (here): where all threads are:")[2]
    assert "rank 3 (here) was silent for " in text.splitlines()[-1]
    assert wait_until(lambda: not guards_of(process), 10)


@pytest.mark.slow
def test_a_guard_lets_a_stopped_process_be_and_one_that_has_no_limit(start):
    stopped, free = start(sys.executable, "-c", SILENT, "2", "wait"), start(sys.executable, "-c", SILENT, "0", "wait")
    for process in (stopped, free):
        assert process.stdout.readline() == "silent\n"
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(LATER_SECONDS + 4)
    assert (stopped.poll(), free.poll()) == (None, None)
    assert state_and_start(stopped.pid)[0] == "T"
    stopped.send_signal(signal.SIGCONT)
    assert stopped.wait(100) == -9, "it goes on, and tells nothing"
    free.kill()
    assert wait_until(lambda: not guards_of(free), 10)
