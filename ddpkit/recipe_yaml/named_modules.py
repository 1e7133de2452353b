"""The modules that a recipe's YAML names, without loading any."""

from __future__ import annotations

import sys

from ddpkit.recipe_yaml.document import Document, walk
from ddpkit.recipe_yaml.references import with_included

_NAMING = ("!new:", "!name:", "!apply:", "!applyref:", "!module:")


def named_modules(document: Document) -> list[str]:
    """Return the modules that are loaded and that a file names, with the packages that they are in.

    Args:
        document: the file; what it includes is read, too.

    Returns:
        Their names, sorted.

    Ranks: local.
    """
    tags = [str(node.tag) for own in with_included(document) for _, _, node in walk(own.root)]
    found: set[str] = set()
    for name in [tag.partition(":")[2] for tag in tags if tag.startswith(_NAMING)]:
        parts = name.split(".")
        prefixes = [".".join(parts[:number]) for number in range(1, len(parts) + 1)]
        found.update(prefix for prefix in prefixes if prefix in sys.modules)
    return sorted(found)
