"""A YAML file as nodes, which know their lines. Nothing in it is constructed or called."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML  # a part of HyperPyYAML, which reads the file with it later
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from ddpkit.errors import ConfigError, MissingFileError

YAML_TAG = "tag:yaml.org,2002:"
OVERRIDES = "the overrides"  # in place of a file's name

# What the parser says, and what is meant by it most often.
_HINTS = {
    "cannot start any token": "Indent with spaces; put text that begins with @, ` or % in quotes.",
    "mapping values are not allowed": (
        "Put text with ': ' into quotes, and look at the indentation."
    ),
    "could not find expected ':'": "Every line of a mapping is `key: value`; close what is open.",
    "expected <block end>": "Keys of one mapping, and items of one list, stand in one column.",
    "expected a single document": "A recipe has one document: take the line `---` away.",
    "unexpected end of stream": "Close the quotes.",
    "expected ',' or": "Close the bracket.",
}


@dataclass(frozen=True)
class Document:
    """A YAML file with a mapping at its top level.

    Args:
        file: as messages name it.
        text: what it holds.
        root: its mapping.
        known: the keys of its mappings by the mapping's ``id``, where they have been asked for.
    """

    file: str
    text: str
    root: MappingNode
    known: dict[int, dict[str, Node]] = field(default_factory=dict, repr=False, compare=False)


class NamedText(io.StringIO):
    """A text that knows its file: HyperPyYAML looks beside it for files to include.

    Args:
        text: what the file holds.
        name: its path.
    """

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def read_document(file: str) -> Document:
    """Read a YAML file.

    Args:
        file: its path.

    Returns:
        Its nodes.

    Raises:
        MissingFileError: there is no such file.
        ConfigError: it is no text, no valid YAML, or no mapping, or it has a key twice.

    Example:
        >>> read_document("nowhere.yaml")
        Traceback (most recent call last):
        ddpkit.errors.MissingFileError: There is no file 'nowhere.yaml'...
    """
    path = Path(file)
    if not path.is_file():  # a pipe could be read only once
        text = f"There is no file {file!r} to read hyperparameters from."
        raise MissingFileError(f"{text} The current folder is {str(Path.cwd())!r}.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file!r} cannot be read as a text file: {error}.") from error
    root = compose(text, file, repr(file))
    if root is None:
        raise ConfigError(
            f"{file!r} is empty. A recipe must hold `key: value` lines at its top level."
        )
    if not isinstance(root, MappingNode):
        raise ConfigError(f"{file!r} must hold `key: value` lines at its top level.")
    _check_keys(root, file)
    return Document(file, text, root)


def compose(text: str, name: str, shown: str) -> Node | None:
    """Read YAML text as nodes.

    Args:
        text: YAML.
        name: of its file, for the marks.
        shown: what messages call it.
    """
    try:
        root: Node | None = YAML(typ="safe", pure=True).compose(NamedText(text, name))
    except YAMLError as error:
        raise ConfigError(f"{shown} is not valid YAML: {_words(error)}.{_hint(error)}") from error
    return root


def _words(error: YAMLError) -> str:
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    begun = error.context_mark
    place = "" if begun is None or begun.line == mark.line else f" (begun in line {begun.line + 1})"
    context = f"{error.context}{place}, " if error.context else ""
    return f"{context}{error.problem} in line {mark.line + 1}, column {mark.column + 1}"


def _hint(error: YAMLError) -> str:
    text = str(error)
    return next((f" {hint}" for words, hint in _HINTS.items() if words in text), "")


def pairs(mapping: MappingNode) -> Iterator[tuple[ScalarNode, Node]]:
    """Yield the keys of a mapping with their values; keys merged by ``<<`` come first."""
    for key, value in mapping.value:
        if key.tag == f"{YAML_TAG}merge":
            for part in value.value if isinstance(value, SequenceNode) else [value]:
                if isinstance(part, MappingNode):
                    yield from pairs(part)
    yield from ((key, value) for key, value in mapping.value if isinstance(key, ScalarNode))


def walk(
    node: Node,
    path: tuple[str, ...] = (),
) -> Iterator[tuple[tuple[str, ...], Node, Node]]:
    """Yield the values below a node, as they stand: path, the node that shows the line, value.

    What an anchor names is walked where it stands first.
    """
    yield from _walk(node, path, set())


def _walk(
    node: Node,
    path: tuple[str, ...],
    seen: set[int],
) -> Iterator[tuple[tuple[str, ...], Node, Node]]:
    if id(node) in seen:
        return
    seen.add(id(node))
    for name, shown, value in children(node):
        yield (*path, name), shown, value
        yield from _walk(value, (*path, name), seen)


def children(node: Node) -> Iterator[tuple[str, Node, Node]]:
    """Yield the values in a mapping or a list: name, the node that shows the line, value."""
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                yield key.value, key, value
    elif isinstance(node, SequenceNode):
        for number, item in enumerate(node.value):
            yield str(number), item, item


def place(path: tuple[str, ...], shown: Node | None) -> str:
    """Return the words for a place, such as ``hparams.yaml:3, key 'model[encoder]'``.

    Args:
        path: keys and numbers from the top level on.
        shown: the node whose line it is.
    """
    mark = None if shown is None else shown.start_mark
    key = f"key {key_of(path)!r}"
    return (
        f"{OVERRIDES}, {key}"
        if mark is None or mark.name == OVERRIDES
        else f"{mark.name}:{mark.line + 1}, {key}"
    )


def key_of(path: tuple[str, ...]) -> str:
    """Return a path in the words of a reference.

    Example:
        >>> key_of(("model", "layers", "2"))
        'model[layers][2]'
    """
    return path[0] + "".join(f"[{part}]" for part in path[1:])


def _check_keys(root: Node, file: str) -> None:
    """Refuse a mapping with a key twice."""
    nodes = [
        ((), root),
        *((path, value) for path, _, value in walk(root)),
    ]
    for path, node in nodes:
        first: dict[tuple[str, str], Node] = {}
        for name, key, _ in children(node) if isinstance(node, MappingNode) else ():
            earlier = first.setdefault((str(key.tag), name), key)
            if earlier is not key:
                line = "" if file == OVERRIDES else f", first in line {earlier.start_mark.line + 1}"
                where = place((*path, name), key)
                raise ConfigError(
                    f"{where}: the key is there twice{line}. Take one away, or rename it."
                )


# ------------------------------------------------------------------------------------ overrides


def with_overrides(document: Document, overrides: Mapping[str, Any] | str | None) -> Document:
    """Return a document with values that replace some of its own, as HyperPyYAML replaces them.

    Args:
        document: it is not changed.
        overrides: a mapping, or YAML text of one.

    Raises:
        ConfigError: the overrides are no mapping, or have another structure than the file.
    """
    return with_values(document, overrides_node(overrides) if overrides else None)


def with_values(document: Document, values: Node | None) -> Document:
    """Return a document with values that replace some of its own, if they are a mapping."""
    if not isinstance(values, MappingNode):
        return document
    return Document(
        document.file,
        document.text,
        _updated(document.root, values, ()),
    )


def overrides_node(overrides: Mapping[str, Any] | str) -> MappingNode:
    """Return overrides as nodes.

    Args:
        overrides: a mapping, or YAML text of one.
    """
    root = (
        compose(overrides, OVERRIDES, f"overrides={overrides!r}")
        if isinstance(overrides, str)
        else _node(overrides)
    )
    if not isinstance(root, MappingNode):
        raise ConfigError(
            f"overrides={overrides!r} must be a mapping, or YAML text of `key: value` lines."
        )
    _check_keys(root, OVERRIDES)
    return root


def _node(value: Any) -> Node:
    """Return a Python value as a node; of an object only that it is there."""
    if isinstance(value, Mapping):
        entries = [(_node(key), _node(item)) for key, item in value.items()]
        return MappingNode(f"{YAML_TAG}map", entries)
    if isinstance(value, (list, tuple)):
        return SequenceNode(f"{YAML_TAG}seq", [_node(item) for item in value])
    kind = _KINDS.get(type(value), "python")
    return ScalarNode(f"{YAML_TAG}{kind}", str(value))


_KINDS = {
    str: "str",
    int: "int",
    float: "float",
    bool: "bool",
    type(None): "null",
}


def _updated(old: MappingNode, new: MappingNode, path: tuple[str, ...]) -> MappingNode:
    replaced = {key.value: (key, value) for key, value in pairs(new)}
    known = {key.value: value for key, value in pairs(old)}
    entries = []
    for key, value in old.value:
        entry = replaced.pop(key.value, None) if isinstance(key, ScalarNode) else None
        entries.append((key, value) if entry is None else _merged((key, value), entry, path))
    for key, value in replaced.values():
        merged = known.get(key.value)  # by `<<`
        entries.append(
            (key, value) if merged is None else _merged((key, merged), (key, value), path)
        )
    return MappingNode(old.tag, entries, old.start_mark, old.end_mark)


def _merged(
    old: tuple[ScalarNode, Node],
    new: tuple[ScalarNode, Node],
    path: tuple[str, ...],
) -> tuple[Node, Node]:
    """Return an entry that an override replaces: a mapping is merged into a mapping."""
    if not isinstance(new[1], MappingNode):
        return new
    here = (*path, new[0].value)
    if not isinstance(old[1], MappingNode):
        words = "a mapping cannot replace what is no mapping in the file. Give one value."
        raise ConfigError(f"{place(here, new[0])}: {words}")
    return old[0], _updated(old[1], new[1], here)
