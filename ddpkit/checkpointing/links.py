"""Links in a folder of checkpoints: ``latest`` to the newest one, ``best`` to the best one.

They are for people and for other programs; nothing in ddpkit follows them by itself. A link names a
directory beside it, so the folder may be moved as a whole. It is replaced in one piece, after its
new target is complete and before its old one is deleted: it never points to what is not there.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from ddpkit.checkpointing import storage
from ddpkit.checkpointing.checkpoint import DIRECTORY_PREFIX
from ddpkit.logger import get_logger, shown_path

logger = get_logger(__name__)

LATEST = "latest"
BEST = "best"
NAMES = (LATEST, BEST)


def point(folder: Path, link: str, name: str) -> None:
    """Have a link stand for a checkpoint.

    A failure is told once and is none of the save: there are file systems without links. What
    stands under the name of the link and is no link to a checkpoint is left alone.

    Args:
        folder: of the checkpoints.
        link: :data:`LATEST` or :data:`BEST`.
        name: of the checkpoint's directory in it.

    Ranks: main only.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "CKPT+one").mkdir()
        >>> point(folder, LATEST, "CKPT+one")
        >>> str((folder / "latest").readlink())
        'CKPT+one'
    """
    path = folder / link
    before = target_of(path)
    if before == name:
        return
    if before is None and os.path.lexists(path):
        logger.warning_once(
            "%s is no link to a checkpoint, and is left as it is. So there is no link %r.",
            shown_path(path),
            link,
        )
        return
    try:
        storage.FILES.link(name, path)
    except OSError as error:
        logger.warning_once(
            "There is no link %r in %s: %s. Checkpoints are saved all the same.",
            link,
            shown_path(folder),
            error.strerror or error,
        )


def copy(folder: Path, names: Collection[str], target: Path) -> None:
    """Have the links to checkpoints in another folder, to which these are about to move.

    Args:
        folder: of the checkpoints.
        names: of their directories.
        target: the other folder.

    Ranks: main only.
    """
    for link in NAMES:
        name = target_of(folder / link)
        if name is not None and name in names:
            point(target, link, name)


def drop(folder: Path, names: Collection[str]) -> None:
    """Remove the links to checkpoints that are about to go.

    Args:
        folder: of the checkpoints.
        names: of their directories.

    Ranks: main only.
    """
    for link in NAMES:
        path = folder / link
        if target_of(path) in names:
            try:
                storage.FILES.remove_tree(path)
            except OSError as error:
                logger.warning_once(
                    "The link %s could not be removed: %s. Its checkpoint is gone.",
                    shown_path(path),
                    error.strerror or error,
                )


def behind_link(path: Path) -> Path:
    """Return the checkpoint that a link stands for at this moment; another path as it is.

    Example:
        >>> behind_link(Path("save/CKPT+one")).name
        'CKPT+one'
    """
    name = target_of(path)
    return path if name is None else path.with_name(name)


def target_of(path: Path) -> str | None:
    """Return the checkpoint beside a link that it stands for; None if it is no such link."""
    try:
        target = str(path.readlink())
    except OSError:
        return None
    is_beside = "/" not in target and target.startswith(DIRECTORY_PREFIX)
    return target if is_beside else None
