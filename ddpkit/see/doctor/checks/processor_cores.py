"""Cores against processes, and threads against cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddpkit.see.amounts import counted
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.control_groups import cpu_limit, throttled_share
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding
from ddpkit.see.doctor.ranks import answering

THREADS = "OMP_NUM_THREADS"
OFTEN = 0.05  # a share of periods
MOST_SHOWN = 4  # processes, of whose threads a finding tells


@dataclass(frozen=True)
class Share:
    """What the ranks of a host have of its cores.

    Attributes:
        cores: all that the ranks of this host may run on, together.
        usable: as many as may be busy at a time: fewer under a quota.
        limit_from: what sets that number.
        threads: of each of these ranks.

    Ranks: local.

    Example:
        >>> Share(8, 2.0, "/sys/fs/cgroup/cpu.max", [4, 4]).processes
        2
    """

    cores: int
    usable: float
    limit_from: str
    threads: list[int]

    @property
    def processes(self) -> int:
        """How many ranks are on this host."""
        return len(self.threads)


def look(site: Site) -> Iterator[Finding]:
    """Compare what all ranks of a host take with what they have.

    Ranks: collective.
    """
    own = {
        "host": site.machine.name(),
        "cores": sorted(site.machine.affinity()),
        "threads": site.machine.threads(),
    }
    everybody = site.ranks.exchange("cores", own)
    if not site.ranks.is_first_on_host:
        return
    share = _share(site, everybody)
    yield _cores(site, share)
    yield _threads(site, share)
    throttled = throttled_share(site.machine)
    if throttled:
        yield _throttled(throttled)


def _share(site: Site, everybody: list[Any]) -> Share:
    here = [
        value for value in answering(everybody).values() if value["host"] == site.machine.name()
    ]
    cores = len(set().union(*(process["cores"] for process in here)))
    limit = cpu_limit(site.machine)
    if limit is None or limit.value >= cores:
        return Share(
            cores,
            cores,
            "the affinity of the processes",
            [process["threads"] for process in here],
        )
    return Share(
        cores,
        limit.value,
        limit.file,
        [process["threads"] for process in here],
    )


def _cores(site: Site, share: Share) -> Finding:
    workers = (site.run.workers or 0) * share.processes
    wanted = share.processes + workers
    verdict = OK if share.usable >= wanted else LOOK
    if share.usable < share.processes:
        verdict = PROBLEM
    quota = f" of {share.cores}" if share.usable < share.cores else ""
    source = f"one for each of {counted(share.processes, 'process')}"
    if workers:
        source += f" and {counted(workers, 'loader worker')}"
    return Finding(
        "processor cores",
        verdict,
        f"{counted(share.usable, 'core')}{quota} ({share.limit_from})",
        f"at least {wanted}",
        source,
        cost="processes take turns on a core: each step waits for the last of them",
        advice="Ask for more cores (docker --cpus, Slurm --cpus-per-task), or start fewer "
        "processes or loader workers.",
        details={
            "cores": share.cores,
            "usable": share.usable,
            "processes": share.processes,
        },
    )


def _threads(site: Site, share: Share) -> Finding:
    total = sum(share.threads)
    each = max(1, int(share.usable) // share.processes)
    more = ["..."] if share.processes > MOST_SHOWN else []
    shown = " + ".join([*map(str, share.threads[:MOST_SHOWN]), *more])
    given = site.machine.environ.get(THREADS)
    verdict = OK
    cost = ""
    if total > max(share.usable, share.processes):
        verdict = PROBLEM if site.run.device == "cpu" and share.processes > 1 else LOOK
        cost = (
            "threads wait for each other: with several processes on a CPU a step is several times "
            "slower"
        )
    elif site.run.device == "cpu" and total + share.processes <= share.usable:
        verdict = LOOK
        cost = f"{counted(int(share.usable) - total, 'core')} will have nothing to do in a step"
    return Finding(
        "threads",
        verdict,
        f"{shown} in {counted(share.processes, 'process')} ({THREADS}={given})"
        if given
        else f"{shown} in {counted(share.processes, 'process')} ({THREADS} is not set)",
        f"{each} in each process",
        f"{counted(share.usable, 'core')} / {counted(share.processes, 'process')}",
        cost=cost,
        advice=f"export {THREADS}={each} (--nproc of a recipe does so by itself; torchrun sets 1)",
        details={"threads": share.threads},
    )


def _throttled(share: float) -> Finding:
    return Finding(
        "processor quota",
        LOOK if share > OFTEN else OK,
        f"used up in {share:.0%} of its periods",
        f"in at most {OFTEN:.0%}",
        "nr_throttled / nr_periods of cpu.stat, since this container or job began",
        cost="all its threads stand still until the next period, of 0.1 s as a rule",
        advice="Raise the quota, or run fewer threads.",
        details={"share": share},
    )
