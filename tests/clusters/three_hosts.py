"""Three hosts on one machine, each with a cable of its own to each other one: a single pair can be
slow.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.launching import Run, wait_until

from .harness import clean_environment, find, kill, running
from .machines import OWNER, Machine, may_have_namespaces, owner_mark, sweep
from .packages import CannotSetUpError, need
from .two_hosts import PROGRAMS

__all__ = ["ThreeHosts", "three_hosts"]

NAMES = ("alpha", "beta", "gamma")
NETWORK = "10.78.0"
PORT = 29510


def cable_to(name: str) -> str:
    """Return the name of the interface that leads to a host."""
    return f"to-{name}"


@dataclass(frozen=True)
class ThreeHosts:
    """The hosts, by name."""

    machines: dict[str, Machine]

    @contextlib.contextmanager
    def slow(self, one: str, other: str, megabits: float) -> Iterator[None]:
        """Limit the rate of one cable, in each direction."""
        limit = [
            "tbf",
            "rate",
            f"{round(megabits * 1000)}kbit",
            "burst",
            "64kb",
            "latency",
            "400ms",
        ]
        with contextlib.ExitStack() as stack:
            for here, there in ((one, other), (other, one)):
                machine = self.machines[here]
                cable = cable_to(there)
                machine.run("tc", "qdisc", "replace", "dev", cable, "root", *limit)
                stack.callback(machine.run, "tc", "qdisc", "delete", "dev", cable, "root")
            yield

    @contextlib.contextmanager
    def python(self, folder: Path, *words: str) -> Iterator[list[Run]]:
        """Run Python on each host, as one rank of three."""
        first = next(iter(self.machines))
        common = {
            **clean_environment(),
            "WORLD_SIZE": str(len(self.machines)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": first,
            "MASTER_PORT": str(PORT),
        }
        command = [sys.executable, *words]
        with running(
            machine.start(command, folder, {**common, "RANK": str(rank)}, warm=True)
            for rank, machine in enumerate(self.machines.values())
        ) as runs:
            yield runs


def _connect(machines: Sequence[Machine]) -> None:
    """Lay the cables. Each host has one address, on all of its cables, and a route to each other
    one.
    """
    for one, other in itertools.combinations(machines, 2):
        ends = cable_to(other.name), cable_to(one.name)
        netns = str(other.sleeper.pid)
        one.run(
            "ip",
            "link",
            "add",
            ends[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            netns,
        )
        for here, there, cable in ((one, other, ends[0]), (other, one, ends[1])):
            here.run("ip", "address", "add", f"{here.address}/32", "dev", cable)
            here.run("ip", "link", "set", cable, "up")
            here.run("ip", "route", "add", there.address, "dev", cable, "src", here.address)


@contextlib.contextmanager
def three_hosts(folder: Path) -> Iterator[ThreeHosts]:
    """Make three hosts; at the end nothing of them is left.

    Args:
        folder: for their files.

    Raises:
        CannotSetUpError: a program is missing, or this process may not make namespaces.
    """
    need(PROGRAMS)
    if not may_have_namespaces():
        raise CannotSetUpError(
            "this process may not make network namespaces (unshare --net --uts --mount)"
        )
    sweep()
    addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(NAMES, 1)}
    known = "".join(f"{address} {name}\n" for name, address in addresses.items())
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
    (folder / "nsswitch.conf").write_text("hosts: files\npasswd: files\ngroup: files\n")
    mark = owner_mark()
    machines: dict[str, Machine] = {}
    try:
        for name, address in addresses.items():
            machines[name] = Machine(name, address, folder, mark)
        _connect(list(machines.values()))
        yield ThreeHosts(machines)
    finally:
        for machine in machines.values():
            machine.close()
        kill(lambda: find(OWNER, mark))
        assert wait_until(lambda: not find(OWNER, mark), 5)
