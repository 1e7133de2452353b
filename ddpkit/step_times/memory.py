"""How much memory this process uses, read about once a second."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

#: What is told of it, in bytes: of the process, and of torch's allocator on its GPU.
MEMORY: tuple[str, ...] = ("rss", "allocated", "reserved", "peak")

_STATM = Path("/proc/self/statm")
_KIB = 1024


def memory_use(device: str) -> dict[str, float]:
    """Return how much memory this process uses.

    Args:
        device: of this rank.

    Returns:
        Bytes by name of :data:`MEMORY`; without a CUDA device ``"rss"`` alone.

    Example:
        >>> list(memory_use("cpu"))
        ['rss']
    """
    found = {"rss": resident_bytes()}
    if device.startswith("cuda"):
        of_torch = torch.cuda.memory_stats(device)
        found["allocated"] = float(of_torch.get("allocated_bytes.all.current", 0))
        found["reserved"] = float(of_torch.get("reserved_bytes.all.current", 0))
        found["peak"] = float(of_torch.get("allocated_bytes.all.peak", 0))
    return found


def resident_bytes() -> float:
    """Return the resident memory of this process; where the system does not tell it, its highest
    value so far.
    """
    if _STATM.exists():
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
        return float(pages * os.sysconf("SC_PAGE_SIZE"))
    import resource  # another than Linux: it is not on every system

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(highest if sys.platform == "darwin" else highest * _KIB)
