"""How many files a process may have open: loader workers hand each tensor over as one."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding

ENOUGH = 4096
TOO_FEW = 256


def look(site: Site) -> Iterator[Finding]:
    """Compare ``ulimit -n`` with what loaders take."""
    limit = site.machine.limit(resource.RLIMIT_NOFILE)
    verdict = OK if limit < 0 or limit >= ENOUGH else LOOK
    if 0 <= limit < TOO_FEW:
        verdict = PROBLEM
    yield Finding(
        "open files",
        verdict,
        "no limit" if limit < 0 else f"at most {limit}",
        f"at least {ENOUGH}",
        "torch's loader workers open a file for each tensor of a batch that waits "
        "(docs.pytorch.org/docs/stable/multiprocessing.html, file_descriptor)",
        cost='"Too many open files", or "received 0 items of ancdata", in the middle of an epoch',
        advice=f"ulimit -n {ENOUGH} before the run (docker: --ulimit nofile={ENOUGH})",
        details={"limit": limit},
    )
