"""Which checkpoints to look for in a store. A store may list a new folder late, but it answers for
a name at once.

The index names all checkpoints that were about to be completed. It is written before the manifest
of each. So a checkpoint that is complete is named there, or was copied into the store by hand, and
is then listed. What is named and has no manifest is no checkpoint.
"""

from __future__ import annotations

from ddpkit.checkpointing.object_names import is_one_part
from ddpkit.logger import get_logger
from ddpkit.object_store import NameIndex, Objects

logger = get_logger(__name__)

INDEX = NameIndex(".index.json", "checkpoints")


def read_index(objects: Objects) -> set[str]:
    """Return the folders that the index of a store names, as :meth:`NameIndex.read`. Names that
    lead out of the folder are left out.
    """
    named = INDEX.read(objects)
    outside = sorted(folder for folder in named if not is_one_part(folder))
    if outside:
        logger.warning(
            "%s/%s names %r, which is no folder of a checkpoint: such names are left out.",
            objects.url,
            INDEX.name,
            outside[0],
        )
    return named - set(outside)
