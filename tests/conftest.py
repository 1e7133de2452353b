"""Fixtures and guards that every test has."""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import os
import re
import signal
import sys
from multiprocessing import forkserver

import pytest
from _pytest.doctest import DoctestModule
from _pytest.mark.structures import ParameterSet

# as `make test` has it, also where pytest is started by hand
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch asks for the name of each address; not every server answers
os.environ.setdefault("RES_OPTIONS", "timeout:1")

from ddpkit.logger import MultiProcessLoggerAdapter
from tests import warm_starts
from tests.guards import Picture

# The mark that all tests of a folder carry.
MARKED_FOLDERS = {"faults": "faults", "clusters": "launch", "gpu": "gpu"}

# Their tests take a minute or two each: they run first, so that none runs alone at the end.
LONGEST = {"test_benchmarks.py"}

# How many parametrizations of a test with the mark may have other values than their first ones, if
# it is to be quick.
QUICK_OF = {"grid": 1, "corner": 0}

# So many combinations of the parameters of a test with one of these marks run in each check, the
# last, which often has most ranks, and the others before a release; the mark `in_each_check` names
# another number.
ONE_OF_MANY = ("slow", "launch", "in_each_check")
MANY_IN_EACH_CHECK = 1

TESTS_BETWEEN_FREEZES = 300
ENDED_TESTS = itertools.count(1)

# What a test says that hung: of RankPool, of tests.launching, of pytest-timeout.
HUNG = re.compile(r"^--- rank \d+: Hang|^still there after \d+ s|^Timeout \(?>", re.MULTILINE)
HUNG_TESTS = pytest.StashKey[list]()
MAX_HUNG = 3


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Look for examples in the docstrings of the package only."""
    return [one for one in (yield) if not isinstance(one, DoctestModule)]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Let no collection of garbage walk what stays to the end: torch's modules, and thousands of
    tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        if "PYTEST_XDIST_WORKER" in os.environ and (torch := sys.modules.get("torch")):
            torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first imports much, which stays, too
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_runtest_logfinish():
    """Let no collection of garbage walk what tests have imported since the last time."""
    number = next(ENDED_TESTS)
    if "PYTEST_XDIST_WORKER" in os.environ and number % TESTS_BETWEEN_FREEZES == 0:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if _is_in_the_midst(item)]
    if left_out:
        items[:] = [item for item in items if not _is_in_the_midst(item)]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        for mark in _marks_of_folders(item.path.parent, item.config.rootpath):
            item.add_marker(mark)
        if any(
            item.get_closest_marker(mark) and _first_values_but(item) > most
            for mark, most in QUICK_OF.items()
        ):
            item.add_marker("slow")
        if item.get_closest_marker("exhaustive"):
            item.add_marker("slow")
    for item in _beyond_each_check(items):
        item.add_marker("exhaustive")


def _beyond_each_check(items):
    """Find the combinations of costly tests that show on more values what others show."""
    combinations = {}
    for item in items:
        is_one_of_many = any(item.get_closest_marker(mark) for mark in ONE_OF_MANY)
        is_shown = is_one_of_many and not item.get_closest_marker("exhaustive")
        if is_shown and hasattr(item, "callspec"):
            test = (item.parent.nodeid, item.originalname)
            combinations.setdefault(test, []).append(item)
    for same in combinations.values():
        mark = same[0].get_closest_marker("in_each_check")
        most = mark.args[0] if mark else MANY_IN_EACH_CHECK
        if len(same) > most:
            last = len(same) - 1
            kept = {last - round(at * last / max(most - 1, 1)) for at in range(most)}
            yield from (item for at, item in enumerate(same) if at not in kept)


@functools.cache
def _marks_of_folders(folder, root):
    return [mark for name, mark in MARKED_FOLDERS.items() if name in folder.relative_to(root).parts]


def _is_in_the_midst(item):
    """Say whether a test with the mark `corner` has two values or more that are not the first.

    What options do together is shown by the trainings that tests/model draws, on other values
    each time; a grid shows the same few each time.
    """
    return item.get_closest_marker("corner") is not None and _first_values_but(item) > 1


def _first_values_but(item):
    """Count the parametrizations of a test that do not have the first of their values."""
    markers = item.iter_markers("parametrize")
    return sum(not _has_first_values(item.callspec.params, *marker.args[:2]) for marker in markers)


def _has_first_values(params, names, values):
    """Say whether parameters are the first of the values that a test is parametrized with.

    By what they are: the numbers that pytest gives them differ between its versions.
    """
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    first = next(iter(values))
    if not isinstance(first, ParameterSet):
        first = ParameterSet(first if len(names) > 1 else (first,), (), None)
    return all(params[name] is value for name, value in zip(names, first.values, strict=True))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Give up where tests hang, which each takes its whole limit: a barrier that is missing would
    stop the suite.
    """
    report = yield
    if report.failed and HUNG.search(str(call.excinfo.value) if call.excinfo else ""):
        hung = item.session.stash[HUNG_TESTS] = [
            *item.session.stash.get(HUNG_TESTS, []),
            item.nodeid,
        ]
        if len(hung) >= MAX_HUNG:
            item.session.shouldfail = f"{len(hung)} tests hung, which is enough: {', '.join(hung)}"
    return report


def pytest_sessionfinish():
    warm_starts.close()
    # A worker of a DataLoader that is not collected yet was forked from this process. It holds the
    # pipe by whose end the fork server is told to end, and that would be waited for in vain.
    gc.collect()
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    # What ranks have needed counts in `time make test` once the process is waited for that they
    # were forked from.
    forkserver._forkserver._stop()


def pytest_configure(config) -> None:
    """Hear SIGINT and SIGHUP, and so let what is started hear them: a background command, or nohup,
    ignores them.

    And let the import of ``ddpkit.speechbrain`` change nothing here: tests of it start processes of
    their own. The process that warm ones are forked from is one for all processes that run tests
    side by side.
    """
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)
    os.environ["DDPKIT_SPEECHBRAIN"] = "0"
    multiprocessing.set_forkserver_preload(warm_starts.PRELOADED)  # whoever starts it first
    if getattr(config.option, "numprocesses", None):
        os.environ[warm_starts.SERVER] = warm_starts.prepare()


@pytest.fixture(autouse=True)
def _leaves_no_trace():
    """Fail a test that leaves the process changed, and put the process back for the next one."""
    picture = Picture()
    _forget_warnings()
    yield
    leaks = picture.leaks()
    if leaks:
        pytest.fail("this test leaves behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _forget_warnings():
    """Let each test hear what is said once per process."""
    for logger in _loggers(len(sys.modules)):
        logger._said.clear()


@functools.lru_cache(maxsize=1)
def _loggers(_number_of_modules):
    """Return the loggers of the package's modules, found anew when modules have been imported."""
    found = [
        getattr(module, "logger", None)
        for name, module in sys.modules.copy().items()
        if name.startswith("ddpkit.")
    ]
    return [logger for logger in found if isinstance(logger, MultiProcessLoggerAdapter)]


@pytest.fixture(scope="session")
def ranks():
    """Real ranks, started once: ``ranks.run(fn, *args, world_size=2)`` returns what each rank
    returned.
    """
    from tests.rank_pool import RankPool

    pool = RankPool(timeout=300)  # for a run that hangs; a loaded machine takes its time
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def s3():
    """A real S3 server, one for all tests that this process runs."""
    from tests.s3_server import s3_server

    with s3_server() as server:
        yield server
