"""``python -m tests.clusters``: install what clusters are made of, and a browser, with more time
than a test has.

Needs a Python without packages: `.ci/run` starts it while others are installed.
"""

from __future__ import annotations

import sys

from tests import browser

from . import mpi, slurm_cluster, two_hosts
from .packages import CannotSetUpError, need

SECONDS = 600.0


def main() -> int:
    try:
        need(
            {**slurm_cluster.PROGRAMS, **two_hosts.PROGRAMS, **mpi.PROGRAMS, **browser.PROGRAMS},
            SECONDS,
        )
    except CannotSetUpError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
