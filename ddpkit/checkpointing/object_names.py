"""Where a checkpoint is in a store: in a folder of its name. If the store has one of this name
already, the checkpoint is in a new version of that folder.

A store renames nothing, and an object that is written again is gone. So a checkpoint that replaces
another is written beside it, as the next version, and the older one is deleted then. Whoever looks
in between finds both, and takes the higher version. The folder of a version also names the hold of
the lock under which it was written: what a run that has lost the lock still sends lands elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_VERSION = re.compile(r"(?P<name>.+)@(?P<version>[0-9]{1,9})(?:-(?P<hold>[0-9a-f]{8}))?", re.DOTALL)
_HOLD_DIGITS = 8
_OF_A_TIME = re.compile(r"CKPT\+\d{4}-\d\d-\d\d\+\d\d-\d\d-\d\d\+\d+")


def is_one_part(name: str) -> bool:
    """Say whether a name is one part of a path, and leads nowhere else.

    Example:
        >>> is_one_part("CKPT+best@2"), is_one_part("CKPT+a/../../b"), is_one_part("..")
        (True, False, False)
    """
    return name not in {"", ".", ".."} and not any(sign in name for sign in "/\\\0")


def folder_of(
    name: str,
    version: int,
    token: str = "",
) -> str:
    """Return the folder of a version of a checkpoint. Version 0 has the checkpoint's name.

    Args:
        name: of the checkpoint.
        version: from 0.
        token: of the hold of the lock, hexadecimal; empty: there is none.

    Example:
        >>> folder_of("CKPT+best", 0), folder_of("CKPT+best", 2), folder_of("CKPT+a@2", 0)
        ('CKPT+best', 'CKPT+best@2', 'CKPT+a@2@0')
        >>> folder_of("CKPT+best", 2, "0123456789abcdef")
        'CKPT+best@2-01234567'
    """
    if not version and not _VERSION.fullmatch(name):
        return name
    return f"{name}@{version}-{token[:_HOLD_DIGITS]}" if token else f"{name}@{version}"


def may_come_again(folder: str) -> bool:
    """Say whether a later save may be written into a folder, too: that of a name that the caller
    gives, in its version 0. A name that is made of the time never comes again.

    Example:
        >>> may_come_again("CKPT+best"), may_come_again("CKPT+best@1-01234567")
        (True, False)
        >>> may_come_again("CKPT+2026-11-29+12-00-00+00")
        False
    """
    return not (_VERSION.fullmatch(folder) or _OF_A_TIME.fullmatch(folder))


def name_and_version(folder: str) -> tuple[str, int]:
    """Return the checkpoint and the version that a folder is of.

    Example:
        >>> name_and_version("CKPT+best"), name_and_version("CKPT+a@2@0")
        (('CKPT+best', 0), ('CKPT+a@2', 0))
    """
    found = _VERSION.fullmatch(folder)
    return (found["name"], int(found["version"])) if found else (folder, 0)


def newest_versions(folders: Iterable[str]) -> dict[str, str]:
    """Return the folder of the highest version of each checkpoint.

    Example:
        >>> newest_versions(["CKPT+best", "CKPT+best@2", "CKPT+a"])
        {'CKPT+a': 'CKPT+a', 'CKPT+best': 'CKPT+best@2'}
    """
    ordered = sorted((*name_and_version(folder), folder) for folder in folders)
    return {name: folder for name, _, folder in ordered}
