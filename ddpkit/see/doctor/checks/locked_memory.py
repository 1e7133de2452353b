"""How much memory a process may lock: InfiniBand registers its buffers, which locks them."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from ddpkit.see.amounts import GB, in_bytes
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.finding import OK, PROBLEM, Finding

ENOUGH = 4 * GB


def look(site: Site) -> Iterator[Finding]:
    """Look at ``ulimit -l``, where there is InfiniBand or RoCE."""
    devices = sorted(path.name for path in site.machine.root.glob("sys/class/infiniband/*"))
    if not devices:
        return
    limit = site.machine.limit(resource.RLIMIT_MEMLOCK)
    yield Finding(
        "locked memory",
        OK if limit < 0 or limit >= ENOUGH else PROBLEM,
        "no limit" if limit < 0 else f"at most {in_bytes(limit)}",
        "no limit",
        f"InfiniBand ({', '.join(devices[:4])}) locks the buffers that NCCL registers "
        "(docs.nvidia.com/deeplearning/nccl, Troubleshooting)",
        cost='NCCL ends with "ibv_reg_mr failed" or "Cannot allocate memory", or takes slow '
        "sockets",
        advice="ulimit -l unlimited; docker --ulimit memlock=-1; Slurm: "
        "PropagateResourceLimitsExcept=MEMLOCK, and LimitMEMLOCK=infinity for slurmd",
        details={"limit": limit, "devices": devices},
    )
