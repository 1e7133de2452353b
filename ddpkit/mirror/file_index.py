"""Which files of an output folder to look for in a store, besides those that it lists: it may list
a new one late, but it answers for a name at once.

The index is a small object that names all files that were about to be copied up. It is written
before a new file is. What is named and not there was not copied, or is deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from ddpkit.logger import get_logger
from ddpkit.object_store import Objects

logger = get_logger(__name__)

FILE_INDEX = ".files.json"
INDEX_FORMAT = 1


def read_file_index(objects: Objects) -> set[str]:
    """Return the files that the index of a store names; none where there is no index, or one that
    cannot be understood.

    Args:
        objects: of the output folder.
    """
    try:
        data = objects.read(FILE_INDEX)
    except FileNotFoundError:
        return set()
    try:
        named = json.loads(data)["files"]
        if not all(isinstance(name, str) and name and "\0" not in name for name in named):
            raise ValueError("names that are no text")
    except (ValueError, LookupError, TypeError) as error:
        logger.warning(
            "%s/%s cannot be understood (%s): files are found by the store's listing.",
            objects.url,
            FILE_INDEX,
            error,
        )
        return set()
    return set(named)


def write_file_index(objects: Objects, names: Iterable[str]) -> None:
    """Write the index anew.

    Args:
        objects: of the output folder.
        names: of files in it.
    """
    content = {"format": INDEX_FORMAT, "files": sorted(names)}
    objects.write(FILE_INDEX, json.dumps(content).encode())
