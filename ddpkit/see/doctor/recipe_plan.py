"""What a recipe's parameter file says of the run, read without making any object of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from yaml.nodes import Node

OUTPUT_FOLDER = "output_folder"
CKPT_LOCAL = "ckpt_local"
WORKERS = "num_workers"


@dataclass(frozen=True)
class RecipePlan:
    """What is known of the run before anything is loaded.

    Attributes:
        output_folder: empty where the file does not say it.
        workers: loader processes of each rank, the most of all loaders; None where nothing says it.
        ckpt_local: the option of that name; empty where nothing gives it.
    """

    output_folder: str = ""
    workers: int | None = None
    ckpt_local: str = ""


def parameter_file(recipe: Sequence[str]) -> Sequence[str]:
    """Return the parameter file of a recipe; nothing where it has none.

    Args:
        recipe: script, parameter file if it has one, and overrides.

    Example:
        >>> parameter_file(["train.py", "hparams.yaml", "--seed=1"]), parameter_file(["train.py"])
        (['hparams.yaml'], [])
    """
    return [word for word in recipe[1:2] if not word.startswith("--")]


def plan_of(recipe: Sequence[str]) -> RecipePlan:
    """Read the parameter file with its overrides.

    Args:
        recipe: script, parameter file if it has one, and overrides, such as ``--num_workers=4``.

    Raises:
        ConfigError: it cannot be read.

    Example:
        >>> plan_of(())
        RecipePlan(output_folder='', workers=None, ckpt_local='')
    """
    files = parameter_file(recipe)
    if not files:
        return RecipePlan()
    import yaml
    from hyperpyyaml import resolve_references
    from ruamel.yaml.error import YAMLError  # of HyperPyYAML's own parser

    file = Path(files[0])
    try:
        with file.open(encoding="utf-8") as stream:
            text = resolve_references(stream, _overrides(recipe[2:])).getvalue()
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, ValueError, KeyError, yaml.YAMLError, YAMLError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}") from error
    found = list(_scalars(root)) if root is not None else []
    folders = [value for path, value in found if path == (OUTPUT_FOLDER,)]
    local = [value for path, value in found if path == (CKPT_LOCAL,)]
    workers = [int(value) for path, value in found if path[-1] == WORKERS and value.isdecimal()]
    return RecipePlan(
        folders[-1] if folders else "",
        max(workers, default=None),
        local[-1] if local else "",
    )


def _overrides(words: Sequence[str]) -> str:
    """Write ``--name=value`` and ``--name value`` as YAML."""
    lines = []
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, sign, value = word[2:].partition("=")
        if not sign:
            value = next(iter(words[place + 1 : place + 2]), "--")
        if not value.startswith("--"):
            lines.append(f"{name}: {value}")
    return "\n".join(lines)


def _scalars(
    node: Node,
    path: tuple[str, ...] = (),
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the plain values below a node with their keys."""
    from yaml.nodes import MappingNode, ScalarNode, SequenceNode

    if isinstance(node, ScalarNode) and path:
        yield path, str(node.value)
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            yield from _scalars(value, (*path, str(key.value)))
    elif isinstance(node, SequenceNode):
        for value in node.value:
            yield from _scalars(value, path)
