"""``/dev/shm``: loader workers hand batches over in it, and NCCL's processes of one host talk
through it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ddpkit.see.amounts import GB, MB, counted, in_bytes
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding

FOLDER = Path("/dev/shm")  # noqa: S108 -- its size is asked for
PREFETCH = 2  # batches ahead of each worker, torch's default
BATCH = 32 * MB  # 64 images of 3 x 224 x 224 in float32 are 38.5 MB
USUAL = GB
DOCKERS = 128 * MB  # docker gives 64 MB unless told otherwise


def look(site: Site) -> Iterator[Finding]:
    """Compare what is free with what the loaders of all ranks of this host take."""
    workers = site.run.workers
    if workers is None:
        wanted = USUAL
        source = "enough for most loaders; --workers N says how many there will be"
    else:
        batches = site.run.processes_here * workers * (PREFETCH + 1)
        wanted = batches * BATCH
        source = f"{counted(batches, 'batch')} at a time (workers x 3), of {in_bytes(BATCH)}"
    if site.run.device == "cuda" and site.run.processes_here > 1:
        wanted = max(wanted, USUAL)
        source += "; NCCL takes some, too (docs.nvidia.com/deeplearning/nccl, Shared Memory)"
    disk = site.machine.disk(FOLDER)
    free = disk.f_bavail * disk.f_frsize
    total = disk.f_blocks * disk.f_frsize
    verdict = OK if free >= wanted else LOOK
    if wanted and min(free, total) < min(DOCKERS, wanted):
        verdict = PROBLEM
    yield Finding(
        "shared memory",
        verdict,
        f"{in_bytes(free)} of {in_bytes(total)} are free in {FOLDER}",
        f"at least {in_bytes(wanted)}",
        source,
        cost='"Bus error" in a loader worker, or "unable to allocate shared memory", once it is '
        "full",
        advice="docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir with medium: "
        f"Memory at {FOLDER}; else: mount -o remount,size=8g {FOLDER}",
        details={"free": free, "total": total, "wanted": wanted},
    )
