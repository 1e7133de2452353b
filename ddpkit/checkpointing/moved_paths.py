"""Where a path into a folder of checkpoints leads, also after a run has begun anew there.

Such a run moves the checkpoints that it does not continue into ``earlier-<time>``. A path that
named one of them, by its name or by a link, is followed there.
"""

from __future__ import annotations

import os
from pathlib import Path

from ddpkit.base import EARLIER, earlier_folders
from ddpkit.checkpointing.links import NAMES, target_of


def path_now(path: Path) -> Path:
    """Return where something stands that was given by a path.

    Args:
        path: absolute; a part of it may be the link ``latest`` or ``best``.

    Returns:
        The path with the checkpoint in the place of the link; or the place that it was moved to.
        Where there is nothing, the path.

    Ranks: main only.

    Example:
        >>> path_now(Path("/nowhere/save/CKPT+one/net.ckpt")).name
        'net.ckpt'
    """
    direct = _behind_links(path)
    if direct.exists():
        return direct
    return _moved(Path(os.path.realpath(direct))) or direct


def was_moved(path: Path, given: Path) -> bool:
    """Say whether a path stands in what was moved aside, and was not given as such."""
    aside = {part for part in path.parts if part.startswith(EARLIER)}
    return not aside <= set(given.parts)


def _behind_links(path: Path) -> Path:
    for part in (path, *path.parents):
        name = target_of(part)
        if name is not None:
            return part.with_name(name) / path.relative_to(part)
    return path


def _moved(path: Path) -> Path | None:
    folder = next(parent for parent in path.parents if parent.is_dir())
    first, *rest = path.relative_to(folder).parts
    for earlier in earlier_folders(folder):
        # of a link that has gone with its checkpoint, which may have been moved on since
        name = target_of(earlier / first) if first in NAMES else None
        found = earlier / first if name is None else path_now(folder / name)
        if found.joinpath(*rest).exists():
            return found.joinpath(*rest)
    return None
