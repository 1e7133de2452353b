"""On which file system a folder of a machine is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit.base import MOUNTS, FileSystem, mounted_at

if TYPE_CHECKING:
    from pathlib import Path

    from ddpkit.see.doctor.machine import Machine

IN_MEMORY = ("tmpfs", "ramfs")
OF_CONTAINER = ("overlay", "aufs")


def file_system_of(machine: Machine, folder: Path) -> FileSystem:
    """Find the mount of a machine that a folder is in."""
    return mounted_at(machine.read(MOUNTS), folder)


def nearest_folder(path: Path) -> Path:
    """Return the folder itself, or the nearest one above it that is there.

    Args:
        path: need not exist.

    Example:
        >>> from pathlib import Path
        >>> str(nearest_folder(Path("/proc/no/such")))
        '/proc'
    """
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())
