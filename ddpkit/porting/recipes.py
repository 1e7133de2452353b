"""A recipe's folder: which files it has, what changes in them, and writing them."""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ddpkit.errors import ConfigError
from ddpkit.porting.differences import python_differences, yaml_differences
from ddpkit.porting.names import PACKAGE
from ddpkit.porting.source_code import Note, parse_python, port_python, port_yaml

__all__ = ["PortedFile", "PortedRecipe", "port_recipe", "write_recipe"]

_PYTHON = (".py",)
_YAML = (".yaml", ".yml")
_MENTIONS = re.compile(rf"\b(?:{PACKAGE}|ddpkit)\b")
_BACKUP = ".before-ddpkit"
_NOT_OURS = re.compile(r"\..|__pycache__$|node_modules$|site-packages$|CKPT\+")  # names of folders


@dataclass
class PortedFile:
    """One file of a recipe.

    Attributes:
        path: the file.
        name: relative to the recipe's folder.
        old: its text.
        new: the text that it would have.
        problem: why it was left.
        left: names that were left, and why.
        notes: what behaves differently.
    """

    path: Path
    name: str
    old: str = ""
    new: str = ""
    problem: str = ""
    left: list[Note] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def diff(self) -> str:
        """The change as a unified diff, for ``patch -p1``."""
        old, new = (re.split(r"(?<=\n)", text) for text in (self.old, self.new))
        pieces = difflib.unified_diff(
            [*filter(None, old)],
            [*filter(None, new)],
            f"a/{self.name}",
            f"b/{self.name}",
        )
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in pieces
        )


@dataclass
class PortedRecipe:
    """A recipe's folder.

    Attributes:
        root: the folder.
        files: Python and YAML.
    """

    root: Path
    files: list[PortedFile]

    @property
    def changed(self) -> list[PortedFile]:
        """The files that would not be as they are."""
        return [file for file in self.files if file.new != file.old]

    @property
    def problems(self) -> list[PortedFile]:
        """The files that were left because they cannot be read, parsed or written."""
        return [file for file in self.files if file.problem]


def port_recipe(path: Path) -> PortedRecipe:
    """Work out what changes when a recipe moves to ddpkit; nothing is written.

    Hidden folders, virtual environments, checkpoints, the records of earlier runs and symbolic
    links are passed over.

    Args:
        path: the folder of a recipe, or one file.

    Returns:
        What changes.

    Raises:
        ConfigError: there is no such file or folder, or the file is neither Python nor YAML.
    """
    path = path.resolve()
    if not path.exists():
        raise ConfigError(
            f"{str(path)!r} does not exist: give the folder of a recipe, or one of its files."
        )
    if path.is_file() and path.suffix not in _PYTHON + _YAML:
        raise ConfigError(
            f"{str(path)!r} is neither Python nor YAML: only .py, .yaml and .yml files are ported."
        )
    root = path if path.is_dir() else path.parent
    found = list(_walk(root)) if path.is_dir() else [PortedFile(path, path.name)]
    for file in found:
        _port(file)
    return PortedRecipe(root, found)


def _walk(root: Path) -> Iterator[PortedFile]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not _NOT_OURS.match(name))
        # a virtual environment; the record of a run
        if "pyvenv.cfg" in names or "env.log" in names:
            folders.clear()
            continue
        for name in sorted(names):
            path = Path(folder, name)
            if (
                path.suffix in _PYTHON + _YAML
                and not name.startswith(".")
                and not path.is_symlink()
            ):
                yield PortedFile(path, path.relative_to(root).as_posix())


def _port(file: PortedFile) -> None:
    """Read a file and work out what changes in it."""
    try:
        file.old = file.new = file.path.read_bytes().decode()
        if _MENTIONS.search(file.old) and file.path.suffix in _PYTHON:
            file.notes = python_differences(parse_python(file.old))
            file.new, file.left = port_python(file.old)
        elif _MENTIONS.search(file.old):
            file.notes = yaml_differences(file.old)
            file.new = port_yaml(file.old)
    except (OSError, SyntaxError, ValueError, RecursionError, yaml.YAMLError) as error:
        file.problem = " ".join(f"{type(error).__name__}: {error}".split())


def write_recipe(recipe: PortedRecipe) -> Path | None:
    """Write what has changed, after copying the files as they were into a new folder.

    Args:
        recipe: as worked out by :func:`port_recipe`.

    Returns:
        The folder with the copies; None if nothing has changed.

    Raises:
        OSError: a file cannot be written (the copies are whole then), or there is a folder with
            copies already.
    """
    if not recipe.changed:
        return None
    backup = recipe.root / _BACKUP
    backup.mkdir()
    for file in recipe.changed:
        copy = backup / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file.path, copy)
    for file in recipe.changed:
        file.path.write_bytes(file.new.encode())
    return backup
