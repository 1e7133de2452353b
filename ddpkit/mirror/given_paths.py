"""Paths of files that a recipe gives: a URL among them stands for a file in a mirror, or is refused
before it becomes a folder called ``s3:``.
"""

from __future__ import annotations

import os

from ddpkit.errors import ConfigError
from ddpkit.object_store import is_url


def local_file(
    option: str,
    given: str | os.PathLike[str],
) -> str:
    """Return the path of this machine that a file is written to.

    Args:
        option: that gives it, such as ``"save_file"``.
        given: a path, or a URL in an output folder that is mirrored.

    Raises:
        ConfigError: it is another URL.

    Ranks: local.

    Example:
        >>> local_file("save_file", "results/log.txt")
        'results/log.txt'
    """
    path = os.fspath(given)
    if not is_url(path):
        return path
    from ddpkit.mirror.mirrors import place_in_mirror  # loads fsspec

    place = place_in_mirror(path)
    if place is None:
        raise ConfigError(
            f"{option}={path!r} is a URL, and this file is written on a disk. Give "
            "--output_folder=<URL>, and a path in it, such as !ref <output_folder>/name: it is "
            "copied there at each save, and at the end."
        )
    return str(place)
