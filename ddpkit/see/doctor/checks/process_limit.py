"""How many processes and threads may be started: each rank has dozens, each loader worker some."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from ddpkit.see.amounts import counted
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.control_groups import Limit, processes_left
from ddpkit.see.doctor.finding import OK, PROBLEM, Finding

OF_A_RANK = 64  # threads of torch, gloo, NCCL, the watchdog
OF_A_WORKER = 8


def look(site: Site) -> Iterator[Finding]:
    """Compare ``pids.max`` and ``ulimit -u`` with what the ranks of this host take."""
    ranks = site.run.processes_here
    workers = ranks * (site.run.workers or 0)
    wanted = ranks * OF_A_RANK + workers * OF_A_WORKER
    limits = [processes_left(site.machine)]
    of_user = site.machine.limit(resource.RLIMIT_NPROC)
    if of_user >= 0 and not site.machine.is_root():  # root is not limited by it
        limits.append(Limit(of_user, "ulimit -u"))
    found = min(
        (limit for limit in limits if limit),
        key=lambda limit: limit.value,
        default=None,
    )
    yield Finding(
        "process limit",
        OK if found is None or found.value >= wanted else PROBLEM,
        "no limit" if found is None else f"{found.value:.0f} may be started ({found.file})",
        f"at least {wanted} processes and threads",
        f"{OF_A_RANK} for each of {counted(ranks, 'process')}, {OF_A_WORKER} for each of "
        f"{counted(workers, 'loader worker')}",
        cost='"can\'t start new thread" or "Resource temporarily unavailable", at some moment',
        advice="docker --pids-limit=-1; Kubernetes: podPidsLimit; ulimit -u unlimited",
    )
