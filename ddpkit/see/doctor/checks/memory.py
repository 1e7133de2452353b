"""Memory that is free, of the machine and below the limits of a container, and swap."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ddpkit.see.amounts import GB, counted, in_bytes
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.control_groups import memory_kills, memory_left
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding

FOR_MODEL_AND_DATA = GB  # of each process
MUCH_SWAP = 0.5 * GB


def look(site: Site) -> Iterator[Finding]:
    """Compare what is free with what the processes take before they hold any model."""
    yield _free(site)
    kills = memory_kills(site.machine)
    if kills:
        yield Finding(
            "killed for memory",
            LOOK,
            f"{counted(kills, 'process')} since this container or job began",
            "none",
            "oom_kill of its control group",
            cost="a process that is killed ends the run; a loader's worker, too",
            advice="Ask for more memory, or run fewer loader workers.",
        )
    yield _swap(site)


def _free(site: Site) -> Finding:
    free = memory_info(site)["MemAvailable"]
    measured = f"{in_bytes(free)} are free"
    limit = memory_left(site.machine)
    if limit is not None and limit.value < free:
        free = int(limit.value)
        measured = f"{in_bytes(free)} are free, by {limit.file}"
    own = own_bytes(site)
    processes = site.run.processes_here
    least = processes * own
    wanted = processes * (own + FOR_MODEL_AND_DATA)
    return Finding(
        "memory",
        PROBLEM if free < least else LOOK if free < wanted else OK,
        measured,
        f"at least {in_bytes(wanted)}",
        f"{counted(processes, 'process')} of {in_bytes(own)} (as this one, with torch loaded), and "
        f"{in_bytes(FOR_MODEL_AND_DATA)} for model and data of each",
        cost="a process is killed, and its run ends",
        advice="Ask for more memory (docker --memory, Slurm --mem), or start fewer processes.",
        details={"free": free, "wanted": wanted},
    )


def _swap(site: Site) -> Finding:
    info = memory_info(site)
    used = info.get("SwapTotal", 0) - info.get("SwapFree", 0)
    return Finding(
        "swap",
        LOOK if used > MUCH_SWAP else OK,
        f"{in_bytes(used)} in use",
        f"at most {in_bytes(MUCH_SWAP)}",
        "memory on a disk is a thousand times slower",
        cost="steps take from time to time many times longer, on this host, and all ranks wait",
        advice="Find what takes the memory (ps aux --sort=-rss | head), end it, then swapoff -a.",
        details={"used": used},
    )


def memory_info(site: Site) -> dict[str, int]:
    """Return the entries of ``/proc/meminfo``, in bytes."""
    found = {}
    for line in site.machine.read("proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if words := value.split():
            found[name] = 1024 * int(words[0])  # kB, says the kernel, and means KiB
    return found


def own_bytes(site: Site) -> int:
    """Return the memory that this process has for itself, with torch loaded."""
    pages = site.machine.read("proc/self/statm").split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")  # less what is shared
