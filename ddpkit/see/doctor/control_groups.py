"""Limits of the control groups that this process is in, which a container or Slurm has set.

Both versions are read. A limit of any group above holds, too. In a container the path of
``/proc/self/cgroup`` may not be below the mount: then the mount itself is the group.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html and
https://docs.kernel.org/admin-guide/cgroup-v1/ .
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpkit.see.doctor.machine import Machine

MOUNT = "sys/fs/cgroup"
NO_LIMIT_BYTES = 1 << 60  # version 1 writes a number near 2^63 where there is none


@dataclass(frozen=True)
class Limit:
    """A limit, and the file that has it.

    Example:
        >>> Limit(2.0, "/sys/fs/cgroup/cpu.max").value
        2.0
    """

    value: float
    file: str


def cpu_limit(machine: Machine) -> Limit | None:
    """Return how many cores this process may keep busy; None without a limit."""
    found = []
    for folder in _folders(machine, "cpu"):
        newer = machine.read_if_there(f"{folder}/cpu.max").split()
        if len(newer) == 2 and newer[0] != "max":  # noqa: PLR2004 -- a quota and a period
            found.append(Limit(int(newer[0]) / int(newer[1]), f"/{folder}/cpu.max"))
        quota = machine.read_if_there(f"{folder}/cpu.cfs_quota_us").strip()
        period = machine.read_if_there(f"{folder}/cpu.cfs_period_us").strip()
        if quota and period and int(quota) > 0:
            found.append(Limit(int(quota) / int(period), f"/{folder}/cpu.cfs_quota_us"))
    return min(found, key=lambda limit: limit.value, default=None)


def memory_left(machine: Machine) -> Limit | None:
    """Return how many bytes are left below the limit of memory; None without a limit."""
    found = []
    for folder in _folders(machine, "memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = machine.read_if_there(f"{folder}/{limit_name}").strip()
            if limit.isdecimal() and int(limit) < NO_LIMIT_BYTES:
                used = int(machine.read(f"{folder}/{usage_name}")) - _file_cache(machine, folder)
                found.append(Limit(int(limit) - max(0, used), f"/{folder}/{limit_name}"))
    return min(found, key=lambda limit: limit.value, default=None)


def processes_left(machine: Machine) -> Limit | None:
    """Return how many processes and threads may still be started; None without a limit."""
    found = []
    for folder in _folders(machine, "pids"):
        limit = machine.read_if_there(f"{folder}/pids.max").strip()
        if limit.isdecimal():
            now = int(machine.read(f"{folder}/pids.current"))
            found.append(Limit(int(limit) - now, f"/{folder}/pids.max"))
    return min(found, key=lambda limit: limit.value, default=None)


def memory_kills(machine: Machine) -> int:
    """Return how many processes of this group were killed as its memory was full."""
    folder = next(_folders(machine, "memory"))
    for file in ("memory.events", "memory.oom_control"):
        for line in machine.read_if_there(f"{folder}/{file}").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def throttled_share(machine: Machine) -> float:
    """Return the share of periods in which this group waited, its quota of cores used up."""
    for folder in _folders(machine, "cpu"):
        values = _pairs(machine.read_if_there(f"{folder}/cpu.stat"))
        if values.get("nr_periods"):
            return values.get("nr_throttled", 0) / values["nr_periods"]
    return 0.0


def _file_cache(machine: Machine, folder: str) -> int:
    """Return bytes of files in memory, which the kernel drops before it kills anything."""
    values = _pairs(machine.read_if_there(f"{folder}/memory.stat"))
    return values.get("inactive_file", 0) + values.get("active_file", 0)


def _pairs(text: str) -> dict[str, int]:
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdecimal():
            found[name] = int(value)
    return found


def _folders(machine: Machine, controller: str) -> Iterator[str]:
    """Yield the folders of this process's group and of those above it, for a controller."""
    for line in machine.read_if_there("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount in (
            [f"{MOUNT}/{controllers}", f"{MOUNT}/{controller}"] if controllers else [MOUNT]
        ):
            if machine.root.joinpath(mount).is_dir():
                yield from _and_above(mount, path)
                break
    yield MOUNT


def _and_above(mount: str, path: str) -> Iterator[str]:
    inside = PurePosixPath(path.lstrip("/"))
    for folder in (inside, *inside.parents):
        yield str(PurePosixPath(mount, folder))
