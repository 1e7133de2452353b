"""A process that fails because another one has: how long it stays, so that torchrun sees whose
fault it was.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from ddpkit.base import Reason, host_name
from ddpkit.comm import group_end
from ddpkit.comm.group_end import SEEN_SECONDS, _let_launcher_see


@pytest.fixture
def long(monkeypatch):
    """Have the longest wait be one that a test notices."""
    monkeypatch.setattr(group_end, "FINAL_REPORT_SECONDS", 20.0)
    return 20.0


def reason(pid, host=None):
    return Reason(1, "ValueError: boom", host or host_name(), pid)


def seconds_for(other):
    began = time.monotonic()
    _let_launcher_see(other)
    return time.monotonic() - began


def test_it_stays_a_moment_once_the_other_process_has_ended(long):
    other = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
    )
    known = reason(other.pid)
    other.communicate()
    assert SEEN_SECONDS <= seconds_for(known) < long / 2


def test_it_stays_until_the_other_process_has_ended(long):
    other = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
    )
    began = time.monotonic()
    stays = subprocess.Popen(
        [sys.executable, "-c", (f"import time, os; time.sleep(1); os.kill({other.pid}, 9)")]
    )
    assert seconds_for(reason(other.pid)) < long / 2
    assert time.monotonic() - began >= 1
    assert [stays.wait(), other.wait()] == [0, -9]
    other.stdin.close()


def test_one_that_does_not_end_is_not_awaited_for_ever(monkeypatch):
    monkeypatch.setattr(group_end, "FINAL_REPORT_SECONDS", 0.2)
    assert seconds_for(reason(os.getpid())) >= 0.2


@pytest.mark.parametrize("known", [None, reason(1, "another machine")])
def test_one_that_is_not_known_or_elsewhere_is_given_a_while(monkeypatch, known):
    monkeypatch.setattr(group_end, "FINAL_REPORT_SECONDS", 0.4)
    assert seconds_for(known) >= 0.4
