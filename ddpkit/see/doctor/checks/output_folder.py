"""The output folder: can it be written, on which file system is it, how full and how fast is
that.
"""

from __future__ import annotations

import errno
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ddpkit.base import FileSystem, require_writable
from ddpkit.errors import ConfigError
from ddpkit.see.amounts import GB, MB, in_bytes
from ddpkit.see.checkpoint_place import OF_FOLDER
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.file_systems import (
    IN_MEMORY,
    OF_CONTAINER,
    file_system_of,
    nearest_folder,
)
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding

THREE = "three checkpoints of 300 million parameters with Adam's state"
ROOM = 10 * GB  # a few checkpoints of 300 million parameters with Adam's state are 3.6 GB each
LITTLE_ROOM = 500 * MB
FILES = 10_000
FEW_FILES = 200
TRIES = 5
BLOCK = b"x" * 4096
SLOW_SECONDS = 0.1
VERY_SLOW_SECONDS = 1.0


def look(site: Site) -> Iterator[Finding]:
    """Look at the folder; write a small file into it (or above it) and delete it at once."""
    if site.run.output_url:
        return
    folder = nearest_folder(site.run.output_folder)
    system = file_system_of(site.machine, folder)
    try:
        require_writable("", site.run.output_folder)
    except ConfigError as error:
        yield _folder(site, system, PROBLEM, reason_of(error))
    else:
        yield _folder(site, system, *kind_of(system))
        yield latency(folder, system)
    yield from room(site, folder, THREE, OF_FOLDER)


def reason_of(error: ConfigError) -> str:
    """Say why a folder cannot be written."""
    cause = error.__cause__
    return f"cannot be written: {getattr(cause, 'strerror', None) or error}"


def _folder(
    site: Site,
    system: FileSystem,
    verdict: str,
    fault: str,
) -> Finding:
    path = site.run.output_folder.absolute()
    return Finding(
        "output folder",
        verdict,
        f"{path} on {system.kind}" + (f" {fault}" if fault else ""),
        "a folder that can be written, and that is there after the run",
        "checkpoints, logs and metrics.jsonl are written there (--output_folder)",
        cost="the run ends when it saves, or its checkpoints are lost",
        advice="Give a folder on a disk that stays, such as --output_folder /scratch/results "
        "(docker: -v /path/on/host:/results).",
        details={
            "path": str(path),
            "file_system": system.kind,
            "mount": system.mount,
        },
    )


def kind_of(system: FileSystem) -> tuple[str, str]:
    """Return a verdict on a file system, and what is wrong with it."""
    if system.kind in IN_MEMORY:
        return LOOK, "which is in memory: it ends with the machine, and takes memory of the run"
    if system.kind in OF_CONTAINER:
        return LOOK, "which ends with the container"
    if system.is_of_network and {"nolock", "local_lock=all", "local_lock=flock"} & set(
        system.options
    ):
        return LOOK, "mounted without locks between hosts: nothing stops a second run"
    return OK, ""


def latency(folder: Path, system: FileSystem) -> Finding:
    """Measure how long small files take."""
    seconds = statistics.median(_seconds_to_write(folder) for _ in range(TRIES))
    verdict = OK if seconds < SLOW_SECONDS else LOOK if seconds < VERY_SLOW_SECONDS else PROBLEM
    where = ", over the network" if system.is_of_network else ""
    return Finding(
        "disk latency",
        verdict,
        f"{seconds * 1000:.1f} ms for 4 kB with fsync ({system.kind}{where})",
        f"at most {SLOW_SECONDS * 1000:.0f} ms",
        f"the median of {TRIES} writes; a save does some for each file",
        cost="each checkpoint takes seconds longer, in which all ranks wait unless saves are "
        "asynchronous",
        advice="Write to a local disk, and copy; or see who else is busy with this one (iostat "
        "-x 1).",
        details={"seconds": seconds},
    )


def _seconds_to_write(folder: Path) -> float:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".ddpkit-doctor-") as file:
        began = time.perf_counter()
        file.write(BLOCK)
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - began


def room(
    site: Site,
    folder: Path,
    source: str,
    advice: str,
) -> Iterator[Finding]:
    """Look at what is free.

    Args:
        site: the machine.
        folder: that is there.
        source: what the room is for.
        advice: what to do where there is too little.
    """
    disk = site.machine.disk(folder)
    free = disk.f_bavail * disk.f_frsize
    total = disk.f_blocks * disk.f_frsize
    yield Finding(
        "disk space",
        OK if free >= ROOM else LOOK if free >= LITTLE_ROOM else PROBLEM,
        f"{in_bytes(free)} of {in_bytes(total)} are free",
        f"at least {in_bytes(ROOM)}",
        source,
        cost=f'"{os.strerror(errno.ENOSPC)}" at a save',
        advice=advice,
        details={"free": free, "total": total},
    )
    if disk.f_files:  # some file systems, such as btrfs, have no fixed number
        yield Finding(
            "inodes",
            OK if disk.f_favail >= FILES else LOOK if disk.f_favail >= FEW_FILES else PROBLEM,
            f"{disk.f_favail} more files may be made",
            f"at least {FILES}",
            "a checkpoint has a file for each object and rank",
            cost=f'"{os.strerror(errno.ENOSPC)}" at a save, on a disk that seems to have room',
            advice=f"df -i shows them. {advice}",
            details={"free": disk.f_favail},
        )
