"""A process that fails because another one has: how long it stays, so that torchrun sees whose fault it was."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from ddpkit.base.process_probe import state_and_start
from ddpkit.comm import process_group
from ddpkit.comm.process_group import SEEN_SECONDS, _let_launcher_see
from ddpkit.control.rank_status import Whereabouts, host_name


@pytest.fixture
def long(monkeypatch):
    """Have the longest wait be one that a test notices."""
    monkeypatch.setattr(process_group, "LAST_WORDS_SECONDS", 20.0)
    return 20.0


def sibling(pid):
    """As if the launcher had started it."""
    return Whereabouts(1, host_name(), pid, started=state_and_start(pid)[1], parent=os.getppid())


def seconds_for(other):
    began = time.monotonic()
    _let_launcher_see(other)
    return time.monotonic() - began


def test_it_does_not_stay_once_the_launcher_knows_that_the_other_process_has_ended(long):
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    known = sibling(other.pid)
    other.communicate()
    assert seconds_for(known) < SEEN_SECONDS


def test_it_stays_a_moment_while_the_launcher_has_not_asked_for_the_exit_code(long):
    other = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert SEEN_SECONDS <= seconds_for(sibling(other.pid)) < long / 2
    other.wait()


def test_it_stays_until_the_other_process_has_ended(long):
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    began = time.monotonic()
    stays = subprocess.Popen([sys.executable, "-c", f"import time, os; time.sleep(1); os.kill({other.pid}, 9)"])
    assert seconds_for(sibling(other.pid)) < long / 2
    assert time.monotonic() - began >= 1
    assert [stays.wait(), other.wait()] == [0, -9]
    other.stdin.close()


def test_one_that_does_not_end_is_not_awaited_for_ever(monkeypatch):
    monkeypatch.setattr(process_group, "LAST_WORDS_SECONDS", 0.2)
    assert seconds_for(sibling(os.getpid())) >= 0.2


@pytest.mark.parametrize("is_known", [True, False])
def test_one_that_is_not_known_or_not_the_launchers_is_given_a_while(monkeypatch, is_known):
    """Such as that of ``torchrun --no-python wrapper.sh``: the launcher sees the end of the wrapper alone."""
    monkeypatch.setattr(process_group, "LAST_WORDS_SECONDS", 0.4)
    other = subprocess.Popen([sys.executable, "-c", ""])
    other.wait()
    assert seconds_for(Whereabouts(1, host_name(), other.pid, parent=os.getpid()) if is_known else None) >= 0.4
