"""Whether there is room for the checkpoints of a recipe, whose size its own process has told."""

from __future__ import annotations

import errno
import os

from ddpkit.see.amounts import in_bytes
from ddpkit.see.checkpoint_place import AT_A_TIME
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.file_systems import nearest_folder
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding


def checkpoint_space(site: Site, size: int) -> Finding:
    """Compare the size of a checkpoint with what is free where the run keeps it.

    Args:
        site: the machine, and the run.
        size: of a checkpoint, about, in bytes.

    Ranks: local.
    """
    place = site.run.checkpoints
    disk = site.machine.disk(nearest_folder(place.folder))
    free = disk.f_bavail * disk.f_frsize
    fits = free // size
    return Finding(
        "checkpoint space",
        OK if fits >= AT_A_TIME else LOOK if fits else PROBLEM,
        f"{in_bytes(free)} are free in {place.shown}, and a checkpoint of the recipe takes about "
        f"{in_bytes(size)}",
        f"room for {AT_A_TIME}, {in_bytes(AT_A_TIME * size)}",
        "a new one is complete before an old one is deleted",
        cost=f'"{os.strerror(errno.ENOSPC)}" at a save'
        if fits
        else "the run ends before its first step",
        advice=place.advice,
        details={"size": size, "free": free, "path": str(place.folder), "url": place.url},
    )
