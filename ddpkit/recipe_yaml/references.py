"""What `!ref <a[b]>` refers to, by HyperPyYAML's rules.

Source: ``hyperpyyaml.core.deref`` and ``recursive_resolve``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from ddpkit.errors import ConfigError
from ddpkit.recipe_yaml.document import YAML_TAG, Document, pairs, read_document, walk, with_values

_REFERENCE = re.compile(r"<([^>]*)>")
_INCLUDE = "!include:"
_TAGS = ("!ref", "!copy")
_MAX_FOLLOWED = 100  # references that go round in a circle


@dataclass(frozen=True)
class Missing:
    """A part of a reference that names nothing.

    Args:
        part: the part.
        before: the parts before it.
        known: the keys that are there.
    """

    part: str
    before: tuple[str, ...]
    known: list[str]


def is_reference(node: Node) -> bool:
    """Say whether a value is `!ref` or `!copy`."""
    return isinstance(node, ScalarNode) and node.tag in _TAGS


def references(node: Node) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what stands in angle brackets in a `!ref` or `!copy`: text, and the keys in it."""
    if not is_reference(node):
        return
    for text in _REFERENCE.findall(node.value):
        yield text, parts_of(text)


def parts_of(text: str) -> tuple[str, ...]:
    """Return the keys that a reference names, without an attribute.

    Example:
        >>> parts_of("model[encoder].weight")
        ('model', 'encoder')
    """
    return tuple(part.strip("]") for part in text.partition(".")[0].split("["))


def whole_reference(node: Node) -> tuple[str, ...]:
    """Return the keys of a value that is one `!ref <key>` and no more; else nothing."""
    if is_reference(node) and _REFERENCE.fullmatch(node.value) and "." not in node.value:
        return parts_of(node.value[1:-1])
    return ()


def look_up(document: Document, parts: tuple[str, ...]) -> Node | Missing | None:
    """Find what keys name; None where that is known only when the file is loaded."""
    return _look_up(document, parts, _MAX_FOLLOWED)


def _look_up(
    document: Document,
    parts: tuple[str, ...],
    left: int,
) -> Node | Missing | None:
    node: Node = document.root
    for number, part in enumerate(parts):
        place = target(document, node, left)
        if place is None:
            return None
        document, node = place
        found = string_keys(document, node)
        if part not in found:
            return Missing(part, parts[:number], list(found))
        node = found[part]
    return node


def target(
    document: Document,
    node: Node,
    left: int = _MAX_FOLLOWED,
) -> tuple[Document, Node] | None:
    """Return what a value stands for: itself, what it refers to, or the file that it includes.

    Args:
        document: in which the value stands.
        node: the value.
        left: how many references may be followed.

    Returns:
        The document in which it was found, and the node; None where it is known only when the file
        is loaded.
    """
    if node.tag == f"{YAML_TAG}python" or str(node.tag).startswith("!applyref:"):
        return None
    if is_include(node):
        included = included_document(document, node)
        return None if included is None else (included, included.root)
    if not is_reference(node):
        return document, node
    parts = whole_reference(node)
    found = _look_up(document, parts, left - 1) if parts and left else None
    return target(document, found, left - 1) if isinstance(found, Node) and left else None


def string_keys(document: Document, node: Node) -> dict[str, Node]:
    """Return the values of a mapping whose keys are text: a reference can name no other.

    Args:
        document: in which the mapping stands.
        node: the mapping; another value has no keys.
    """
    if not isinstance(node, MappingNode):
        return {}
    if id(node) not in document.known:
        texts = {key.value: value for key, value in pairs(node) if key.tag == f"{YAML_TAG}str"}
        document.known[id(node)] = texts
    return document.known[id(node)]


def included_path(document: Document, node: Node) -> Path:
    """Return the file that an `!include:` names."""
    return Path(document.file).resolve().parent / str(node.tag).removeprefix(_INCLUDE)


def with_included(document: Document, seen: frozenset[Path] = frozenset()) -> Iterator[Document]:
    """Yield a document, and those that it includes."""
    path = Path(document.file).resolve()
    if path in seen:
        return
    yield document
    for _, _, node in walk(document.root):
        included = included_document(document, node) if is_include(node) else None
        if included is not None:
            yield from with_included(included, seen | {path})


def is_include(node: Node) -> bool:
    """Say whether a value is another file."""
    return str(node.tag).startswith(_INCLUDE)


def included_document(document: Document, node: Node) -> Document | None:
    """Return the file that an `!include:` names, with the values given to it, if it is readable."""
    try:
        return with_values(read_document(str(included_path(document, node))), node)
    except ConfigError:
        return None
