"""How busy the machine is, and with what."""

from __future__ import annotations

import time
from dataclasses import dataclass

SECONDS = 0.5
MOST_NAMED = 3
WORTH_NAMING = 0.1  # cores


@dataclass(frozen=True)
class Load:
    """What was measured.

    Attributes:
        cores: of the machine.
        busy_cores: with other processes than those that were left out.
        busiest: name, process id and cores of those that take most.
        stolen: share of the time in which a virtual machine did not run.
        seconds: how long it was measured.

    Example:
        >>> Load(8, 0.5).busiest
        ()
    """

    cores: int
    busy_cores: float
    busiest: tuple[tuple[str, int, float], ...] = ()
    stolen: float = 0.0
    seconds: float = SECONDS


def measure_load(left_out: set[int]) -> Load:
    """Measure what other processes take of the cores.

    Args:
        left_out: process ids.
    """
    import psutil

    began = time.monotonic()
    times = psutil.cpu_times()
    before = _seconds_by_process()
    time.sleep(SECONDS)
    after = _seconds_by_process()
    now = psutil.cpu_times()
    seconds = time.monotonic() - began
    used = {}
    for pid, (name, taken) in after.items():
        _, taken_before = before.get(pid, (name, 0.0))
        used[pid] = (name, taken - taken_before)
    own = sum(taken for pid, (_, taken) in used.items() if pid in left_out)
    idle = now.idle - times.idle + getattr(now, "iowait", 0.0) - getattr(times, "iowait", 0.0)
    stolen = getattr(now, "steal", 0.0) - getattr(times, "steal", 0.0)
    cores = psutil.cpu_count() or 1
    others = [
        (name, pid, taken / seconds) for pid, (name, taken) in used.items() if pid not in left_out
    ]
    busiest = sorted(others, key=lambda process: -process[2])[:MOST_NAMED]
    return Load(
        cores,
        max(0.0, cores - (idle + stolen + own) / seconds),
        tuple(process for process in busiest if process[2] > WORTH_NAMING),
        stolen / (seconds * cores),
        SECONDS,
    )


def _seconds_by_process() -> dict[int, tuple[str, float]]:
    """Return name and processor seconds of each process that can be seen."""
    import psutil

    found = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None:
            found[process.pid] = (str(process.info["name"]), times.user + times.system)
    return found
