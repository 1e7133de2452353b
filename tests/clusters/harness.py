"""Commands on real clusters, seen from outside: what runs, on which rank, how long it takes to go,
what it said.

Every process of a command is known by a marker in its environment, wherever a launcher has put it:
a process that lost its parent, or that Slurm's daemon started, is found as well. "Gone" means that
no ``/proc/*/environ`` has the marker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.launching import MARKER, NOT_HANDED_DOWN, Run, environments, wait_until

__all__ = [
    "MARKER",
    "Found",
    "Run",
    "clean_environment",
    "find",
    "kill",
    "rank_of",
    "run_on",
    "running",
    "seconds_until",
    "tail",
]

TAIL_LINES = 40

# By any of these a launcher tells a process its rank.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
OTHER_LAUNCHERS = ("SLURM_", "SBATCH_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Found:
    """A process and its environment, as read from ``/proc``."""

    pid: int
    environment: dict[str, str]
    command: list[str]

    @property
    def is_python(self) -> bool:
        return bool(self.command) and "python" in Path(self.command[0]).name

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def find(name: str, value: str) -> list[Found]:
    """Return the living processes whose environment holds ``name=value``."""
    wanted = f"{name}={value}".encode()
    found = []
    for pid, environment in environments():
        texts = environment.split(b"\0")
        if wanted in texts:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                pairs = (
                    text.decode(errors="replace").split("=", 1) for text in texts if b"=" in text
                )
                found.append(Found(pid, dict(pairs), command.split("\0")[:-1]))
    return sorted(found, key=lambda one: one.pid)


def kill(processes: Callable[[], Sequence[Found]], seconds: float = 10.0) -> None:
    """Kill whatever is found until nothing is: a process may start others while it is being
    killed.
    """

    def gone() -> bool:
        left = processes()
        for process in left:
            process.signal(signal.SIGKILL)
        return not left

    assert wait_until(gone, seconds), f"cannot be killed: {processes()}"


def rank_of(processes: Sequence[Found], script: str) -> dict[int, Found]:
    """Return the processes that run a script, by rank: not the launchers that name it, nor loader
    workers.
    """
    ranks: dict[int, Found] = {}
    for process in processes:
        name = next((name for name in RANK_VARIABLES if name in process.environment), None)
        # with which torchrun starts Python
        words = [word for word in process.command[1:] if word != "-u"]
        if name and process.is_python and words and Path(words[0]).name == script:
            ranks.setdefault(int(process.environment[name]), process)
    return ranks


def seconds_until(
    condition: Callable[[], object],
    at_most: float,
    what: str,
    more: Callable[[], str] = str,
) -> float:
    """Wait for a condition and return how long that took; fail, with what ``more`` says, if it
    takes too long.
    """
    start = time.monotonic()
    assert wait_until(condition, at_most), f"not within {at_most} s: {what}\n{more()}"
    return time.monotonic() - start


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """Return the end of an output, or say that there is none."""
    if not path.exists():
        return f"{path.name}: not written"
    return f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what a launcher of this process may have put
    there.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in NOT_HANDED_DOWN and not name.startswith(OTHER_LAUNCHERS)
    }
    return {**kept, "OMP_NUM_THREADS": "1", **more}


@contextlib.contextmanager
def run_on(
    starts: Sequence[tuple[Sequence[str], str]],
    folder: Path,
    **environment: str,
) -> Iterator[list[Run]]:
    """Start commands that belong together and have their own names; kill what is left of them at
    the end.
    """
    starting = (Run(command, folder, environment, name=name) for command, name in starts)
    with running(starting) as runs:
        yield runs


@contextlib.contextmanager
def running(starting: Iterable[Run]) -> Iterator[list[Run]]:
    """Start commands one after the other; kill what is left of them at the end."""
    runs: list[Run] = []
    try:
        for run in starting:
            runs.append(run)  # noqa: PERF402 -- the next may fail
        yield runs
    finally:
        for run in runs:
            kill(lambda run=run: find(MARKER, run.marker))
            run.process.wait(10)
