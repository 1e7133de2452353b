"""How busy this machine is: its load average and its cores, which a verdict names."""

from __future__ import annotations

import os

#: A load so far above the cores is named: a run alone may come to a little more than its cores.
BUSY = 1.25


def host_load() -> dict[str, float]:
    """Return the load average of the last minute and the cores of the machine; empty where the
    system does not tell.

    It takes some ten microseconds, and is asked for with each report.

    Ranks: local.
    """
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):  # not on Windows
        return {}
    return {"load": load, "cores": float(os.cpu_count() or 1)}


def is_busy(load: float, cores: float) -> bool:
    """Say whether more threads want to run than there are cores.

    Example:
        >>> is_busy(2.3, 2), is_busy(9.5, 2)
        (False, True)
    """
    return load > BUSY * cores
