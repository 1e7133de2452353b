"""Where references stand that HyperPyYAML could not resolve, when that was not seen beforehand."""

from __future__ import annotations

import re

from ruamel.yaml.nodes import Node

from ddpkit.recipe_yaml.document import Document, key_of, place, walk
from ddpkit.recipe_yaml.references import references, with_included

_NOT_VALID = re.compile(r'The reference "(?P<text>.*)" is not valid')


def unresolved_reference(document: Document, error: Exception) -> str:
    """Return a sentence with the place of a reference that has failed; empty if none is found.

    Args:
        document: with its overrides.
        error: what HyperPyYAML has raised.
    """
    found = _NOT_VALID.match(str(error))
    text = found["text"] if found else ""
    for own in with_included(document):
        for path, shown, node in walk(own.root):
            words = _words(path, node, text, is_circle=isinstance(error, RecursionError))
            if words:
                return f"{place(path, shown)}: {words}"
    return ""


def _words(
    path: tuple[str, ...],
    node: Node,
    text: str,
    *,
    is_circle: bool,
) -> str:
    for own, parts in references(node):
        if text and own.partition(".")[0] == text:
            return (
                f"{node.tag} <{own}> is not known here: what it refers to is made further down. "
                "Move that above this key."
            )
        if is_circle and path[: len(parts)] == parts:
            return f"{node.tag} <{own}> refers to {key_of(parts)!r}, of which it is a part."
    return ""
