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
from ddpkit.porting.names import PACKAGE, ddpkit_module, ddpkit_name
from ddpkit.porting.python_code import parse_python, port_python
from ddpkit.porting.text import Change, Note, Source, decode

__all__ = ["PortedFile", "PortedRecipe", "port_recipe", "port_yaml", "write_recipe"]

_PYTHON, _YAML = (".py",), (".yaml", ".yml")
_MENTIONS = re.compile(rf"\b(?:{PACKAGE}|ddpkit)\b")
_BACKUP = ".before-ddpkit"
_NOT_OURS = re.compile(r"\..|__pycache__$|node_modules$|site-packages$|CKPT\+")  # names of folders
# HyperPyYAML's tags and PyYAML's: `!new:a.b`, `!!python/name:a.b`, `!<tag:yaml.org,2002:python/name:a.b>`.
_TAG = re.compile(r"(?:!(?:new|name|apply|applyref|module):|python/[\w/]+:)(?P<name>speechbrain[\w.]*)")


@dataclass
class PortedFile:
    """One file of a recipe.

    Attributes:
        path: the file.
        name: relative to the recipe's folder.
        old: its text.
        change: the new text; None where the file was left.
        encoding: its own.
        problem: why it was left.
        notes: what behaves differently.

    Ranks: local.
    """

    path: Path
    name: str
    old: str = ""
    change: Change | None = None
    encoding: str = "utf-8"
    problem: str = ""
    notes: list[Note] = field(default_factory=list)

    @property
    def changes(self) -> bool:
        """Whether the file would not be as it is."""
        return self.change is not None and self.change.text != self.old

    def diff(self) -> str:
        """The change as a unified diff, for ``patch -p1``."""
        if self.change is None:
            return ""
        old, new = (re.split(r"(?<=\n)", text) for text in (self.old, self.change.text))
        pieces = difflib.unified_diff([*filter(None, old)], [*filter(None, new)], f"a/{self.name}", f"b/{self.name}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in pieces)


@dataclass
class PortedRecipe:
    """A recipe's folder.

    Attributes:
        root: the folder.
        files: Python and YAML.

    Ranks: local.
    """

    root: Path
    files: list[PortedFile]

    @property
    def changed(self) -> list[PortedFile]:
        """The files that would not be as they are."""
        return [one for one in self.files if one.changes]

    @property
    def problems(self) -> list[PortedFile]:
        """The files that were left because they cannot be read, parsed or written."""
        return [one for one in self.files if one.problem]


def port_recipe(path: Path) -> PortedRecipe:
    """Work out what changes when a recipe moves to ddpkit; nothing is written.

    Hidden folders, virtual environments, checkpoints and the records of earlier runs are passed over. A symbolic
    link is not followed out of the folder.

    Args:
        path: the folder of a recipe, or one file.

    Returns:
        What changes.

    Raises:
        ConfigError: there is no such file or folder, or the file is neither Python nor YAML.

    Ranks: local.
    """
    path = path.resolve()
    if not path.exists():
        raise ConfigError(f"{str(path)!r} does not exist: give the folder of a recipe, or one of its files.")
    if path.is_file() and path.suffix not in _PYTHON + _YAML:
        raise ConfigError(f"{str(path)!r} is neither Python nor YAML: only .py, .yaml and .yml files are ported.")
    root = path if path.is_dir() else path.parent
    found = list(_walk(root)) if path.is_dir() else [PortedFile(path, path.name)]
    for one in found:
        _port(one)
    return PortedRecipe(root, found)


def _walk(root: Path) -> Iterator[PortedFile]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not _NOT_OURS.match(name))
        if "pyvenv.cfg" in names or "env.log" in names:  # a virtual environment; the record of a run
            folders.clear()
            continue
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in _PYTHON + _YAML and not name.startswith("."):
                if path.is_symlink() and path.resolve().is_relative_to(root) and path.exists():
                    continue  # its target is in the folder, too
                yield PortedFile(path, path.relative_to(root).as_posix())


def _port(one: PortedFile) -> None:
    """Read a file and work out what changes in it."""
    is_python = one.path.suffix in _PYTHON
    try:
        one.old, one.encoding = decode(one.path.read_bytes(), is_python=is_python)
        if _MENTIONS.search(one.old):
            one.notes = python_differences(parse_python(one.old)) if is_python else yaml_differences(one.old)
            one.change = port_python(one.old) if is_python else port_yaml(one.old)
            if one.changes and one.path.is_symlink():
                raise OSError(f"a link that leads out of the folder, to {str(one.path.resolve())!r}")
    except (OSError, SyntaxError, ValueError, RecursionError, yaml.YAMLError) as error:
        one.change, one.notes, one.problem = None, [], _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}" if error.lineno else str(error.msg)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def write_recipe(recipe: PortedRecipe) -> Path | None:
    """Write what has changed, after copying the files as they were into a new folder.

    Args:
        recipe: as worked out by :func:`port_recipe`.

    Returns:
        The folder with the copies; None if nothing has changed.

    Raises:
        OSError: a file cannot be written. The copies are whole.

    Ranks: local.
    """
    if not recipe.changed:
        return None
    backup = _new_folder(recipe.root)
    for one in recipe.changed:
        copy = backup / one.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(one.path, copy)
    for one in recipe.changed:
        if one.change is not None:
            one.path.write_bytes(one.change.text.encode(one.encoding))
    return backup


def _new_folder(root: Path) -> Path:
    number, folder = 1, root / _BACKUP
    while folder.exists():
        number += 1
        folder = root / f"{_BACKUP}-{number}"
    folder.mkdir()
    return folder


def port_yaml(text: str) -> Change:
    """Rename what the tags of a YAML file name and ddpkit has; comments, strings and all else stay.

    Args:
        text: the file.

    Returns:
        The new text.

    Raises:
        yaml.YAMLError: the text is not YAML.

    Ranks: local.

    Example:
        >>> port_yaml("a: !new:speechbrain.utils.epoch_loop.EpochCounter {limit: 2} # speechbrain").text
        'a: !new:ddpkit.epoch_loop.EpochCounter {limit: 2} # speechbrain'
    """
    source, names, notes = Source(text), 0, list[Note]()
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if not isinstance(token, yaml.TagToken):
            continue
        start = token.start_mark.index
        found = _TAG.search(text[start : token.end_mark.index])
        new = ddpkit_name(found["name"]) if found else None
        if found and new:
            source.replace(start + found.start("name"), start + found.end("name"), new)
            names += 1
        elif found and ddpkit_module(found["name"]):
            notes.append(Note((token.start_mark.line + 1,), f"the module {found['name']} stays SpeechBrain's"))
    return Change(source.result(), names, tuple(notes))
