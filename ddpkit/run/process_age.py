"""For how long this process has been running: the time that ``time_limit`` limits."""

from __future__ import annotations

import os
import time

from ddpkit.base import state_and_start

_STARTED = time.monotonic()


def seconds_since_start() -> float:
    """Return for how many seconds this process has been running.

    Where there is no ``/proc`` these are the seconds since this module was imported.
    """
    _, ticks = state_and_start(os.getpid())
    if not ticks:
        return time.monotonic() - _STARTED
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
