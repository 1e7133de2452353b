"""The mirrors of this process: made once for each URL, found by URL and by folder."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ddpkit.checkpointing import PLACES, REMOTES
from ddpkit.errors import ConfigError
from ddpkit.launch import PARITY, find_slice
from ddpkit.mirror.local_folder import kept_folder, own_folder
from ddpkit.mirror.mirror import Mirror
from ddpkit.object_store import Objects

#: Of this process, by the URL of each.
_MIRRORS: dict[str, Mirror] = {}
_MUTEX = threading.Lock()


def mirror_of(
    url: str,
    keep_in: str | None = None,
    *,
    travels: bool = True,
) -> Path:
    """Return the folder of this machine that stands for a folder of an object store.

    Nothing is asked of the store yet, but that its package is installed.

    Args:
        url: of the folder; one in the folder of an earlier call is a folder in that one's mirror.
        keep_in: a folder of this machine in which the mirror stays from run to run; None: it is
            this launch's alone, and is removed at the end.
        travels: whether anything is copied at all.

    Raises:
        MissingExtraError: a package is missing.
        ConfigError: the folder cannot be made, or no store is known by this URL.

    Ranks: local; do it on every rank, with the same URLs in the same order.

    State: the folder, until the process ends.
    """
    plan = find_slice()
    if plan is not None:
        return plan.output_folder
    Objects(url)  # before anything is stripped: refuses one without a bucket, or with a password
    url = url.rstrip("/")
    with _MUTEX:
        known = place_in_mirror(url)
        if known is not None:
            return known
        folder = own_folder(url) if keep_in is None else kept_folder(url, keep_in)
        mirror = Mirror(
            url, folder, is_kept=keep_in is not None, travels=travels and PARITY not in os.environ
        )
        _MIRRORS[url] = mirror
        mirror.open()
        PLACES.register(folder, url)
        if mirror.travels:
            REMOTES.register(folder, mirror.remote)
        return folder


def place_in_mirror(url: str) -> Path | None:
    """Return the place of this machine that stands for a URL; None where no mirror has it.

    Raises:
        ConfigError: a part of it is ``.`` or ``..``.

    Ranks: local.
    """
    url = url.rstrip("/")
    for known, mirror in _MIRRORS.items():
        if url == known or url.startswith(f"{known}/"):
            parts = url[len(known) + 1 :].split("/")
            if any(part in {".", ".."} or "\0" in part for part in parts):
                shown = "/".join([mirror.objects.url, *parts])
                raise ConfigError(
                    f"{shown!r} has a part that leads elsewhere: a store has no folders to go up "
                    "to. Write the URL without '.' and '..'."
                )
            return mirror.folder.joinpath(*parts)
    return None


def mirror_holding(path: str | os.PathLike[str]) -> Mirror | None:
    """Return the mirror that a path is in; None for most paths.

    Ranks: local.
    """
    absolute = Path(os.path.normpath(Path(path).absolute()))
    found = [mirror for mirror in _MIRRORS.values() if absolute.is_relative_to(mirror.folder)]
    return max(found, key=lambda mirror: len(mirror.folder.parts), default=None)


def forget_mirrors() -> None:
    """Copy up what is left, and forget all mirrors; for processes that run several experiments."""
    with _MUTEX:
        for mirror in _MIRRORS.values():
            mirror.leave()
            REMOTES.forget(mirror.folder)
            PLACES.forget(mirror.folder)
        _MIRRORS.clear()
