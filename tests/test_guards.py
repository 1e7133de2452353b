"""The guards of conftest.py see what they are there to see, and put it back."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

import pytest
import torch

from tests import guards
from tests.guards import Picture


def _set_variable():
    os.environ["DDPKIT_LEFT_BEHIND"] = "1"


def _change_variable():
    os.environ["HOME"] = "/elsewhere"


def _add_handler():
    logging.getLogger().addHandler(logging.NullHandler())


def _set_level():
    logging.getLogger().setLevel(1)


def _set_hook():
    sys.excepthook = lambda *_: None


def _set_signal_handler():
    signal.signal(signal.SIGUSR1, lambda *_: None)


def _change_directory():
    os.chdir("/")


def _set_dtype():
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize(
    ("leak", "says"),
    [
        (_set_variable, "environment variables: DDPKIT_LEFT_BEHIND: 'unset' -> '1'"),
        (_change_variable, "environment variables: HOME: "),
        (_add_handler, "root log handlers: "),
        (_set_level, "root log level: "),
        (_set_hook, "sys.excepthook: "),
        (_set_signal_handler, "signal handlers: SIGUSR1: "),
        (_change_directory, "working directory: "),
        (_set_dtype, "torch state: default dtype: torch.float32 -> torch.float64"),
    ],
)
def test_a_leak_is_named_and_put_back(leak, says, monkeypatch):
    # where torch's is in place, any may follow
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    picture = Picture()
    leak()
    leaks = picture.leaks()
    assert len(leaks) == 1
    assert leaks[0].startswith(says)
    assert picture.leaks() == []


def test_an_open_process_group_is_named_and_closed(tmp_path):
    picture = Picture()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert picture.leaks() == ["process group: False -> True"]
    assert not torch.distributed.is_initialized()


def test_a_thread_that_goes_on_is_named(monkeypatch):
    monkeypatch.setattr(guards, "THREAD_GRACE_SECONDS", 0.05)
    picture = Picture()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="goes-on")
    thread.start()
    try:
        assert picture.leaks() == ["thread still running: goes-on"]
    finally:
        end.set()
        thread.join()
    assert picture.leaks() == []


def test_no_change_is_no_leak():
    assert Picture().leaks() == []
