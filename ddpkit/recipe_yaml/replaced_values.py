"""Overrides of a recipe's YAML as texts by key, for the record of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ruamel.yaml.nodes import MappingNode, SequenceNode

from ddpkit.recipe_yaml.document import YAML_TAG, overrides_node

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ruamel.yaml.nodes import Node

OBJECT = f"{YAML_TAG}python"  # what YAML has no word for


def override_values(overrides: Mapping[str, Any] | str | None) -> dict[str, str]:
    r"""Return what replaces values of a YAML file, as text by key; a nested key has dots. Objects
    are left out, as their text may be another in each process.

    Args:
        overrides: a mapping, or YAML text of one.

    Raises:
        ConfigError: they are no mapping.

    Ranks: local.

    Example:
        >>> override_values("lr: 0.1\nnet: {sizes: [1, 2]}\nwidth: !ref <n>")
        {'lr': '0.1', 'net.sizes': '[1, 2]', 'width': '!ref <n>'}
        >>> override_values(None)
        {}
    """
    if not overrides:
        return {}
    if isinstance(overrides, str) and not overrides.strip():
        return {}
    root = overrides_node(overrides)
    return dict(_entries(root, ()))


def _entries(mapping: MappingNode, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for key, value in mapping.value:
        here = (*path, str(key.value))
        if isinstance(value, MappingNode) and _is_plain(value):
            yield from _entries(value, here)
        elif value.tag != OBJECT:
            yield ".".join(here), _text(value)


def _is_plain(node: Node) -> bool:
    return str(node.tag).startswith(YAML_TAG)


def _text(node: Node) -> str:
    text = _without_tag(node)
    if _is_plain(node):
        return text
    return f"{node.tag} {text}".rstrip()


def _without_tag(node: Node) -> str:
    if isinstance(node, SequenceNode):
        items = ", ".join(map(_text, node.value))
        return f"[{items}]"
    if isinstance(node, MappingNode):
        entries = []
        for key, value in node.value:
            entries.append(f"{_text(key)}: {_text(value)}")
        joined = ", ".join(entries)
        return f"{{{joined}}}"
    return str(node.value)
