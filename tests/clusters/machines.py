"""Several machines on one: each has a network, a host name, an ``/etc/hosts`` of its own, and a
cable to the next.

A machine is a process that sleeps in namespaces of its own. They end with the last process in them
and take their interfaces and mounts along, so there is nothing to remove but processes. Process ids
are those of the real machine.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.launching import Run, wait_until

from .harness import Found, find, kill
from .packages import CannotSetUpError

__all__ = [
    "OWNER",
    "Machine",
    "connect",
    "cut",
    "may_have_namespaces",
    "mend",
    "new_machines",
    "sweep",
]

CABLE = "cable0"
NETWORK = "10.77.0"
# the mark of daemons and sleepers; its value begins with the process that started them
OWNER = "DDPKIT_TEST_CLUSTER"
SET_UP = """
    hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind "$3" /etc/nsswitch.conf &&
    ip link set lo up && echo up && exec sleep infinity
"""
START_SECONDS = 10.0


def may_have_namespaces() -> bool:
    """Say whether this process may make namespaces for networks, host names and mounts."""
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"],
        capture_output=True,
        check=False,
    )
    return tried.returncode == 0


def owner_mark() -> str:
    """Draw a mark for what this process starts."""
    return f"{os.getpid()}.{_started(os.getpid())}.{uuid.uuid4().hex}"


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def sweep() -> None:
    """Kill what a run of the tests has left that was killed itself: whoever started it is no
    more.
    """

    def orphans() -> list[Found]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                for text in folder.joinpath("environ").read_bytes().split(b"\0"):
                    if text.startswith(OWNER.encode() + b"="):
                        pid, started, _ = text.partition(b"=")[2].decode().split(".", 2)
                        if _started(int(pid)) != started:
                            found.append(Found(int(folder.name), {}, []))
        return found

    kill(orphans)


class Machine:
    """One of them.

    Args:
        name: its host name.
        address: its address on the cable.
        files: folder with the ``hosts`` and ``nsswitch.conf`` of all of them.
        mark: the value of OWNER for what runs on it.
    """

    def __init__(self, name: str, address: str, files: Path, mark: str) -> None:
        self.name = name
        self.address = address
        self.mark = mark
        words = ["sh", "-c", SET_UP, "sh", name, str(files / "hosts"), str(files / "nsswitch.conf")]
        self.sleeper = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", *words],
            env={**os.environ, OWNER: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said = self.sleeper.stdout.readline()
        if said != "up\n":
            said += self.sleeper.communicate(timeout=START_SECONDS)[0]
            raise CannotSetUpError(f"a namespace for the host {name} cannot be made: {said}")
        self._network = Path(f"/proc/{self.sleeper.pid}/ns/net").readlink()

    def enter(self, *command: str, folder: Path | None = None) -> list[str]:
        """Return the command line that runs a command here; the process that is started becomes
        that command.
        """
        inside = ["env", "-C", str(folder)] if folder else []
        spaces = ["--target", str(self.sleeper.pid), "--net", "--uts", "--mount"]
        return ["nsenter", *spaces, "--", *inside, *command]

    def start(
        self,
        command: Sequence[str],
        folder: Path,
        environment: dict[str, str],
        *,
        warm: bool,
    ) -> Run:
        """Start a command of Python here; it may be forked from a process that has imported
        torch.
        """
        environment = {**environment, "HOSTNAME": self.name}
        if warm:
            pid = self.sleeper.pid
            return Run(command, folder, environment, self.name, warm=True, namespaces_of=pid)
        return Run(self.enter(*command, folder=folder), folder, environment, self.name)

    def run(self, *command: str) -> str:
        """Run a short command here and return what it printed; it must succeed."""
        done = subprocess.run(
            self.enter(*command),
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
        assert done.returncode == 0, (
            f"{self.name}: {' '.join(command)}: {done.stderr or done.stdout}"
        )
        return done.stdout

    def processes(self) -> list[Found]:
        """Return what runs here, but for the process that holds the machine."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (
                    folder.joinpath("ns", "net").readlink() == self._network
                    and int(folder.name) != self.sleeper.pid
                ):
                    found.append(Found(int(folder.name), {}, []))
        return found

    def close(self) -> None:
        """Kill everything here, and with it the machine."""
        kill(self.processes)
        self.sleeper.kill()
        self.sleeper.communicate()


def connect(one: Machine, other: Machine) -> None:
    """Lay a cable between two machines."""
    one.run(
        "ip",
        "link",
        "add",
        CABLE,
        "type",
        "veth",
        "peer",
        "name",
        CABLE,
        "netns",
        str(other.sleeper.pid),
    )
    for machine in (one, other):
        machine.run("ip", "address", "add", f"{machine.address}/24", "dev", CABLE)
        machine.run("ip", "link", "set", CABLE, "up")


def cut(machines: Sequence[Machine]) -> None:
    """Cut the cable: nothing gets through, and no connection is told that it is over."""
    machines[0].run("ip", "link", "set", CABLE, "down")


def mend(machines: Sequence[Machine]) -> None:
    """Bring the cable back."""
    for machine in machines:
        machine.run("ip", "link", "set", CABLE, "up")


@contextlib.contextmanager
def new_machines(names: Sequence[str], folder: Path) -> Iterator[list[Machine]]:
    """Make two machines with a cable between them; at the end nothing of them is left.

    Raises:
        CannotSetUpError: this process may not make namespaces.
    """
    addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
    known = "".join(f"{address} {name}\n" for name, address in addresses.items())
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
    (folder / "nsswitch.conf").write_text("hosts: files\npasswd: files\ngroup: files\n")
    mark = owner_mark()
    machines: list[Machine] = []
    try:
        for name in names:
            machines.append(Machine(name, addresses[name], folder, mark))  # noqa: PERF401 -- the next may fail
        connect(*machines)
        yield machines
    finally:
        for machine in machines:
            machine.close()
        kill(lambda: find(OWNER, mark))
        assert wait_until(lambda: not find(OWNER, mark), 5)
