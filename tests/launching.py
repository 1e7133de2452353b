"""Starts the real thing, as a user does, and sees to it that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.warm_starts import MARKER, WarmProcess

BIN = Path(sys.executable).parent
POLL_SECONDS = 0.05
# Tests wait for events. On a loaded machine an event may take so many times longer than on an idle
# one before it is given up. How many seconds a fault really takes is measured in the table of
# faults (`make faults`).
PATIENCE = 5.0

# What a launcher or a test of this process must not hand down to the processes that are started
# here.
NOT_HANDED_DOWN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
)


# One node alone need not tell others that it is alive: torchrun leaves the thread for it running
# when a signal ends it, and aborts, with code -6, if that is in a call of the store then.
ALIVE_ONCE_A_DAY = "--rdzv-conf=keep_alive_interval=86400"


def torchrun(processes: int, *words: str) -> list[str]:
    return [
        str(BIN / "torchrun"),
        "--standalone",
        ALIVE_ONCE_A_DAY,
        f"--nproc_per_node={processes}",
        *words,
    ]


def python(*words: str) -> list[str]:
    return [sys.executable, *words]


def free_port() -> int:
    """Find a port that nobody listens at, below those that the system gives to whoever asks for
    any.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("", port))
            return port


def soon(began: float, seconds: float) -> bool:
    """Say whether no more time has gone by than an event may take that takes so many seconds on an
    idle machine.
    """
    return time.monotonic() - began < seconds * PATIENCE


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Say whether a condition came true in the time that it may take where it takes so long on an
    idle machine.
    """
    end = time.monotonic() + seconds * PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _whole(file: int) -> bytes:
    parts = []
    while part := os.read(file, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def environments() -> Iterator[tuple[int, bytes]]:
    """Read the environment of each process; of one that was started a moment ago it is empty.

    A test that waits does so twenty times a second, beside others: this is on the way of all.
    """
    for folder in os.scandir("/proc"):
        if not folder.name.isdigit():
            continue
        try:
            file = os.open(f"{folder.path}/environ", os.O_RDONLY)
        except OSError:  # it has ended meanwhile
            continue
        try:
            yield int(folder.name), _whole(file)
        except OSError:
            continue
        finally:
            os.close(file)


CPP_LINE = re.compile(
    r"(frame #\d+: |\[[WE]\d+ .*\.cpp:\d+\]|Exception raised from "
    r".*\.[ch]pp:\d+ )"
)


@dataclass
class Run:
    """A command and all processes that come from it, known by a marker in their environment.

    With ``warm``, a Python command is forked from a process that has imported torch, and so are
    torchrun's ranks: a test of what the processes do then takes a second, and not ten. They run in
    the namespaces of a process, if its id is given.
    """

    command: Sequence[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    name: str = "run"
    warm: bool = False
    namespaces_of: int | None = None

    def __post_init__(self) -> None:
        self.marker = uuid.uuid4().hex
        inherited = {
            name: value for name, value in os.environ.items() if name not in NOT_HANDED_DOWN
        }
        environment = {**inherited, "OMP_NUM_THREADS": "1", **self.environment, MARKER: self.marker}
        self.paths = [self.folder / f"{self.name}.stdout", self.folder / f"{self.name}.stderr"]
        with self.paths[0].open("wb") as out, self.paths[1].open("wb") as err:
            options = {"cwd": self.folder, "env": environment, "stdout": out, "stderr": err}
            if self.warm:
                self.process = WarmProcess(
                    self.command, namespaces_of=self.namespaces_of, **options
                )
            else:
                self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, **options)
        self.started = time.monotonic()
        self.seconds = 0.0

    @property
    def out(self) -> str:
        # torch 2.8 prints a line of each group of gloo
        lines = self.paths[0].read_text().splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))

    @property
    def err(self) -> str:
        return self.paths[1].read_text()

    @property
    def code(self) -> int:
        return self.process.returncode

    def alive(self) -> list[int]:
        wanted = f"{MARKER}={self.marker}".encode()  # no other text has so long a number
        marked = {pid for pid, environment in environments() if wanted in environment}
        if self.process.poll() is None:
            # its environment cannot be read yet in the first moment after its start
            marked.add(self.process.pid)
        return sorted(marked)

    @property
    def lines(self) -> list[str]:
        """What it told, without the lines in which threads of torch tell where in C++ a connection
        ended.
        """
        return [line for line in self.err.splitlines() if line.strip() and not CPP_LINE.match(line)]

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.lines[-lines:])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def _is_gone(self) -> bool:
        # others are looked for once the first has ended: to look takes a tenth of a core
        return self.process.poll() is not None and not self.alive()

    def wait(self, seconds: float = 60.0) -> Run:
        """Wait until no process is left; kill what is left after so many seconds (of an idle
        machine) and fail.
        """
        gone = wait_until(self._is_gone, seconds)
        self.seconds = time.monotonic() - self.started
        left = self.alive()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert gone, f"still there after {self.seconds:.0f} s: {left}\n{self.out}\n{self.err}"
        return self


def start_by_hand(
    command: Sequence[str],
    folder: Path,
    processes: int,
    *,
    warm: bool = False,
    **environment: str,
) -> list[Run]:
    """Start ranks with the plain variables and no launcher."""
    port = str(free_port())
    common = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        **environment,
    }
    return [
        Run(
            command,
            folder,
            {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            f"rank{rank}",
            warm=warm,
        )
        for rank in range(processes)
    ]
