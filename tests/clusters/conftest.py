"""Clusters for the tests: each is set up once, when a test first wants it, and taken down at the
end.

Where a cluster cannot be set up its tests skip, and the end of the run says so. With
DDPKIT_REQUIRE_CLUSTERS=1 they fail instead.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import pytest

from .harness import kill
from .mpi import have_mpich, have_openmpi
from .packages import CannotSetUpError
from .slurm_cluster import slurm_cluster
from .two_hosts import two_hosts

REQUIRE = "DDPKIT_REQUIRE_CLUSTERS"
NOT_SET_UP = pytest.StashKey[dict[str, str]]()

T = TypeVar("T")


class Clusters:
    """What has been set up so far, or why it could not be."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.config.stash.setdefault(NOT_SET_UP, {})
        self.ready: dict[str, object] = {}

    def get(self, name: str, make: Callable[[], T]) -> T:
        """Return a cluster, or skip; what cannot be made is tried once and not again for every
        test.
        """
        reasons = self.config.stash[NOT_SET_UP]
        if name not in self.ready and name not in reasons:
            try:
                self.ready[name] = make()
            except CannotSetUpError as error:
                reasons[name] = str(error)
        if name in reasons:
            _give_up(f"{name} cannot be set up here: {reasons[name]}")
        return self.ready[name]


def _give_up(reason: str) -> NoReturn:
    if os.environ.get(REQUIRE, "") not in {"", "0"}:
        pytest.fail(
            f"{reason}\n({REQUIRE} is set, so this is a failure and no skip.)",
            pytrace=False,
        )
    pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Treat what only one test needs, such as a TUN device, as a cluster that cannot be set up."""
    try:
        return (yield)
    except CannotSetUpError as error:
        item.config.stash.setdefault(NOT_SET_UP, {})[item.name] = str(error)
        _give_up(str(error))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
    config: pytest.Config,
) -> None:
    for name, reason in config.stash.get(NOT_SET_UP, {}).items():
        terminalreporter.section(f"NOT TESTED on a real cluster: {name}", red=True, bold=True)
        terminalreporter.line(
            f"{reason.strip()}\nAs root on Debian the tests set it up themselves; {REQUIRE}=1 "
            "fails."
        )


@pytest.fixture(scope="session")
def clusters(request: pytest.FixtureRequest) -> Iterator[tuple[Clusters, contextlib.ExitStack]]:
    with contextlib.ExitStack() as stack:
        yield Clusters(request.config), stack


@pytest.fixture
def slurm(clusters):
    """A Slurm of two nodes. Each job is cleared away by the ``with`` that submitted it."""
    made, stack = clusters
    return made.get("Slurm", lambda: stack.enter_context(slurm_cluster()))


@pytest.fixture
def hosts(clusters, tmp_path_factory):
    """Two hosts with a whole cable; what a test leaves running there is killed."""
    made, stack = clusters
    both = made.get(
        "a network of two hosts",
        lambda: stack.enter_context(two_hosts(tmp_path_factory.mktemp("two_hosts"))),
    )
    both.mend()
    yield both
    both.mend()
    for machine in both.machines:
        kill(machine.processes)


@pytest.fixture
def openmpi_here(clusters):
    clusters[0].get("Open MPI", have_openmpi)


@pytest.fixture
def mpich_here(clusters):
    clusters[0].get("MPICH", have_mpich)
