"""Processes that nobody is left to work for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ddpkit.base import has_ended, state_and_start
from tests.launching import wait_until

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(),
    reason="there is no /proc to look at",
)


@pytest.fixture
def start():
    started = []

    def start(*command):
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def born(process):
    return state_and_start(process.pid)[1]


def test_a_zombie_has_ended(start):
    process = start("true")
    started = born(process)
    assert wait_until(lambda: has_ended(process.pid, started), 5), (
        "nobody has asked for its exit code yet"
    )


def test_a_process_whose_number_another_has_taken_has_ended():
    _, started = state_and_start(os.getpid())
    assert has_ended(os.getpid(), started - 1)
    assert not has_ended(os.getpid(), started)


def test_of_a_process_whose_start_nobody_knows_nothing_is_said():
    """Without ``/proc``, or with that of another namespace."""
    assert not has_ended(999_999_999, 0)
