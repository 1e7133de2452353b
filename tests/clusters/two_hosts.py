"""Two hosts on one machine, and what can happen to the cable between them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.launching import BIN, Run

from .harness import clean_environment, running
from .machines import CABLE, OWNER, Machine, cut, may_have_namespaces, mend, new_machines, sweep
from .packages import CannotSetUpError, need

__all__ = ["TwoHosts", "two_hosts"]

NAMES = ("host1", "host2")
PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
LOSS_TABLE = "lossy"
TUN_LINK = Path(__file__).with_name("tun_link.py")


@dataclass(frozen=True)
class TwoHosts:
    """Both hosts; the first is the one whose address the others are told."""

    machines: Sequence[Machine]
    folder: Path

    @property
    def head(self) -> Machine:
        return self.machines[0]

    @contextlib.contextmanager
    def torchrun(
        self,
        folder: Path,
        *words: str,
        options: Sequence[str] = (),
        warm: bool = True,
        **environment: str,
    ) -> Iterator[list[Run]]:
        """Run torchrun on both hosts, the same but for what ``{rank}`` stands for in its
        options.

        With ``warm``, torchrun and its ranks are forked from a process that has imported torch:
        for what they do when they are there. What asks who runs there, or ends with its parent, is
        started cold.
        """
        starts = []
        for rank, machine in enumerate(self.machines):
            own = [option.format(rank=rank) for option in options]
            command = [str(BIN / "torchrun"), "--nnodes=2", *own, *words]
            starts.append((machine, command))
        with running(
            machine.start(command, folder, {**clean_environment(), **environment}, warm=warm)
            for machine, command in starts
        ) as runs:
            yield runs

    def cut(self) -> None:
        """Cut the cable."""
        cut(self.machines)

    def mend(self) -> None:
        """Bring the cable back."""
        mend(self.machines)

    @contextlib.contextmanager
    def slow(self, megabits: float) -> Iterator[None]:
        """Limit the rate, of each direction."""
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
            for machine in self.machines:
                machine.run("tc", "qdisc", "replace", "dev", CABLE, "root", *limit)
                stack.callback(machine.run, "tc", "qdisc", "delete", "dev", CABLE, "root")
            yield

    @contextlib.contextmanager
    def lossy(self, percent: int) -> Iterator[None]:
        """Lose so many of a hundred packets at random, at most 99, in each direction."""
        with contextlib.ExitStack() as stack:
            for machine in self.machines:
                machine.run("nft", f"add table ip {LOSS_TABLE}")
                stack.callback(machine.run, "nft", f"delete table ip {LOSS_TABLE}")
                machine.run(
                    "nft",
                    f"add chain ip {LOSS_TABLE} in {{ type filter hook input priority 0; }}",
                )
                machine.run(
                    "nft",
                    f"add rule ip {LOSS_TABLE} in iif {CABLE} numgen random mod 100 < {percent} "
                    "drop",
                )
            yield

    @contextlib.contextmanager
    def far_apart(
        self,
        delay_ms: float,
        loss_percent: float = 0.0,
        megabits: float = 0.0,
    ) -> Iterator[None]:
        """Put a cable in user space in place of the real one: it delays, loses and limits; 0
        megabits is no limit.
        """
        ends = [word for one in self.machines for word in (str(one.sleeper.pid), one.address)]
        numbers = [str(number) for number in (delay_ms, loss_percent, megabits)]
        link = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", sys.executable, str(TUN_LINK), *ends, *numbers],
            env={**os.environ, OWNER: self.head.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            if link.stdout.readline() != "up\n":
                raise CannotSetUpError("there are no TUN devices here")
            self._give_way(CABLE)
            yield
        finally:
            link.kill()
            link.communicate()
            self._take_back(CABLE)

    def _give_way(self, cable: str) -> None:
        for machine in self.machines:
            machine.run("ip", "address", "flush", "dev", cable)

    def _take_back(self, cable: str) -> None:
        for machine in self.machines:
            machine.run("ip", "address", "replace", f"{machine.address}/24", "dev", cable)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Make two hosts; at the end nothing of them is left.

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
    with new_machines(NAMES, folder) as machines:
        yield TwoHosts(machines, folder)
