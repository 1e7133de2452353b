"""Where a value stands in the user's file, by its path in what HyperPyYAML has made of it."""

from __future__ import annotations

from ruamel.yaml.nodes import MappingNode, Node

from ddpkit.recipe_yaml.document import Document, children, pairs, place, walk
from ddpkit.recipe_yaml.references import target


def find_place(
    document: Document,
    path: tuple[str, ...],
    *,
    follow: bool = True,
) -> str:
    """Return the words for where a value was written.

    References are followed to what they refer to, and includes into their files. Where a part
    cannot be followed, the last that can is named.

    Args:
        document: the user's file, with its overrides.
        path: keys and numbers from the top level on.
        follow: where the value itself is a reference, name what it refers to.
    """
    node: Node = document.root
    own: tuple[str, ...] = ()
    shown: Node | None = None
    for part in path:
        followed = target(document, node)
        if followed is None:
            break
        if followed[1] is not node:
            own, shown = _stands(*followed)
        document, node = followed
        entry = _entries(node).get(part)
        if entry is None:
            break
        shown, node = entry
        own = (*own, part)
    followed = target(document, node) if follow else None
    if followed is not None and followed[1] is not node and followed[1] is not followed[0].root:
        own, shown = _stands(*followed)
    return place(own or path, shown)


def _entries(node: Node) -> dict[str, tuple[Node, Node]]:
    """Return the values in a mapping or a list by name, each after the node that shows its line."""
    if isinstance(node, MappingNode):
        return {key.value: (key, value) for key, value in pairs(node)}
    return {name: (shown, value) for name, shown, value in children(node)}


def _stands(document: Document, node: Node) -> tuple[tuple[str, ...], Node | None]:
    """Return where a value stands in its own file: path, and the node that shows its line."""
    for path, shown, value in walk(document.root):
        if value is node:
            return path, shown
    return (), None
