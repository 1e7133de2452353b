"""Fixtures and guards that every test has."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import warm_starts
from tests.guards import Picture

# A folder whose tests all carry the mark of its name.
MARKED_FOLDERS = ("faults", "launch", "gpu")


def pytest_collection_modifyitems(items):
    for item in items:
        for folder in MARKED_FOLDERS:
            if folder in Path(item.path).relative_to(item.config.rootpath).parts:
                item.add_marker(folder)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


def pytest_sessionfinish():
    warm_starts.close()


def pytest_configure() -> None:
    """Hear SIGINT, and so let what is started hear it: a background command of a shell begins with it ignored."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _leaves_no_trace():
    """Fail a test that leaves the process changed, and put the process back for the next one."""
    picture = Picture()
    yield
    leaks = picture.leaks()
    if leaks:
        pytest.fail("this test leaves behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(scope="session")
def ranks():
    """Real ranks, started once: ``ranks.run(fn, *args, world_size=2)`` returns what each rank returned."""
    from ddpkit.testing import RankPool

    pool = RankPool()
    yield pool
    pool.close()
