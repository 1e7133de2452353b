"""On which file system a folder is."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpkit.see.doctor.machine import Machine

MOUNTS = "proc/self/mountinfo"
NETWORK = ("nfs", "cifs", "smb", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "9p", "afs")
IN_MEMORY = ("tmpfs", "ramfs")
OF_CONTAINER = ("overlay", "aufs")


@dataclass(frozen=True)
class FileSystem:
    """A mounted file system.

    Attributes:
        kind: such as ``"ext4"``.
        mount: the folder at which it is.
        options: of the mount.

    Example:
        >>> FileSystem("nfs4", "/home").is_of_network
        True
    """

    kind: str
    mount: str
    options: tuple[str, ...] = ()

    @property
    def is_of_network(self) -> bool:
        """Whether another machine has the files."""
        return self.kind.startswith(NETWORK)


def file_system_of(machine: Machine, folder: Path) -> FileSystem:
    """Find the mount that a folder is in: the deepest, and of several at one place the last.

    Source: https://docs.kernel.org/filesystems/proc.html (``mountinfo``).
    """
    path = os.path.realpath(folder)
    best = FileSystem("unknown", "")
    for line in machine.read(MOUNTS).splitlines():
        before, _, after = line.partition(" - ")
        words = before.split()
        mount = re.sub(
            r"\\([0-7]{3})",
            lambda found: chr(int(found[1], 8)),
            words[4],
        )
        is_above = path == mount or path.startswith(mount.rstrip("/") + "/")
        if is_above and len(mount) >= len(best.mount):
            best = FileSystem(
                after.split()[0],
                mount,
                tuple(words[5].split(",")),
            )
    return best


def nearest_folder(path: Path) -> Path:
    """Return the folder itself, or the nearest one above it that is there.

    Args:
        path: need not exist.

    Example:
        >>> str(nearest_folder(Path("/proc/no/such")))
        '/proc'
    """
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())
