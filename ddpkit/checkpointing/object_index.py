"""Which checkpoints to look for in a store. A store may list a new folder late, but it answers for
a name at once.

The index is a small object that names all checkpoints that were about to be completed. It is
written before the manifest of each. So a checkpoint that is complete is named there, or was copied
into the store by hand, and is then listed. What is named and has no manifest is no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from ddpkit.checkpointing.object_names import is_one_part
from ddpkit.logger import get_logger
from ddpkit.object_store import Objects

logger = get_logger(__name__)

INDEX_NAME = ".index.json"
INDEX_FORMAT = 1


def read_index(objects: Objects) -> set[str]:
    """Return the folders that the index of a store names; none where there is no index, or one that
    cannot be understood. Names that lead out of the folder are left out.
    """
    try:
        data = objects.read(INDEX_NAME)
    except FileNotFoundError:
        return set()
    try:
        named = json.loads(data)["checkpoints"]
        if not all(isinstance(folder, str) and folder for folder in named):
            raise ValueError("names that are no text")
    except (ValueError, LookupError, TypeError) as error:
        logger.warning(
            "%s/%s cannot be understood (%s): checkpoints are found by the store's listing.",
            objects.url,
            INDEX_NAME,
            error,
        )
        return set()
    outside = sorted(folder for folder in named if not is_one_part(folder))
    if outside:
        logger.warning(
            "%s/%s names %r, which is no folder of a checkpoint: such names are left out.",
            objects.url,
            INDEX_NAME,
            outside[0],
        )
    return set(named) - set(outside)


def write_index(objects: Objects, folders: Iterable[str]) -> None:
    """Write the index anew."""
    content = {"format": INDEX_FORMAT, "checkpoints": sorted(folders)}
    objects.write(INDEX_NAME, json.dumps(content).encode())
