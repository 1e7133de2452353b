"""The files of the modules that a recipe's YAML names, without loading any."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from ddpkit.base import is_library
from ddpkit.recipe_yaml.document import Document, walk
from ddpkit.recipe_yaml.references import with_included

_NAMING = ("!new:", "!name:", "!apply:", "!applyref:", "!module:")


def named_module_files(document: Document, folder: Path) -> dict[str, Path]:
    """Return the files of the modules that a YAML file names, and of the packages that they are in.

    Args:
        document: the file, with its overrides; what it includes is read, too.
        folder: the recipe's. Modules elsewhere are left out, and so are installed ones.

    Returns:
        The files by their paths in the folder.
    """
    files = [file for name in sorted(set(_names(document))) for file in _candidates(name, folder)]
    return {
        str(file.relative_to(folder)): file
        for file in files
        if file.is_relative_to(folder) and file.is_file() and not is_library(str(file))
    }


def _names(document: Document) -> Iterator[str]:
    """Yield the names of modules, and of what is in them, that stand behind tags."""
    for own in with_included(document):
        for _, _, node in walk(own.root):
            tag = str(node.tag)
            if tag.startswith(_NAMING):
                parts = tag.partition(":")[2].split(".")
                yield from (".".join(parts[:number]) for number in range(1, len(parts) + 1))


def _candidates(name: str, folder: Path) -> list[Path]:
    """Return the file of a module that is loaded, or where it is if it is beside the recipe."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is not None:
        return [Path(loaded).absolute()]
    path = folder.joinpath(*name.split("."))
    return [path.with_name(f"{path.name}.py"), path / "__init__.py"]
