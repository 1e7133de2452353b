"""Processes that nobody is left to work for."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpkit.base.process_probe import has_ended, kill_later, state_and_start
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
    kill_later(process.pid, 0.3)
    assert process.wait(25) == -9
    assert time.monotonic() - began > 0.3
    assert soon(began, 5)


def test_the_process_that_asks_keeps_no_file_open(start):
    process, before = start("sleep", "60"), len(list(Path("/proc/self/fd").iterdir()))
    kill_later(process.pid, 30.0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_nothing_happens_to_one_that_ends_by_itself(start):
    process = start("sleep", "0.2")
    kill_later(process.pid, 30.0)
    assert process.wait(25) == 0
    kill_later(process.pid, 0.0)


def test_a_rank_that_has_ended_has_its_parent_killed(start):
    rank = "import os; from ddpkit.base.process_probe import kill_later; kill_later(os.getppid(), 0.5)"
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}]); print('gone', flush=True); "
    process = start(sys.executable, "-c", f"{text}sys.stdin.read()")
    assert process.stdout.readline() == "gone\n"
    assert process.wait(50) == -9


def test_a_zombie_has_ended(start):
    process = start("true")
    started = born(process)
    assert wait_until(lambda: has_ended(process.pid, started), 5), "nobody has asked for its exit code yet"
