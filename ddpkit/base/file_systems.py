"""On which file system a folder is, and so whether other machines may see what is written there."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MOUNTS = "proc/self/mountinfo"
NETWORK = ("nfs", "cifs", "smb", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "9p", "afs")
# of one machine alone: what its processes do not see there at once, they never will
LOCAL = ("aufs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs",
    "reiserfs", "tmpfs", "xfs", "zfs")  # fmt: skip


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

    @property
    def is_local(self) -> bool:
        """Whether this machine alone has the files; False where that is not known."""
        return self.kind in LOCAL


def mounted_at(mounts: str, folder: Path) -> FileSystem:
    """Find the mount that a folder is in: the deepest, and of several at one place the last.

    Source: https://docs.kernel.org/filesystems/proc.html (``mountinfo``).

    Args:
        mounts: the text of ``/proc/self/mountinfo``; empty: nothing is known.
        folder: need not exist.

    Example:
        >>> mounted_at("27 1 254:0 / / rw - ext4 x rw", Path("/data")).kind
        'ext4'
    """
    path = os.path.realpath(folder)
    best = FileSystem("unknown", "")
    for line in mounts.splitlines():
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


def file_system_here(folder: Path) -> FileSystem:
    """Find the mount of this machine that a folder is in; where the system does not tell, it is of
    the kind ``"unknown"``.

    Args:
        folder: need not exist.

    Example:
        >>> file_system_here(Path("/")).mount in {"/", ""}
        True
    """
    try:
        mounts = Path("/", MOUNTS).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        mounts = ""
    return mounted_at(mounts, folder)
