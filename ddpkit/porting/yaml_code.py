"""YAML: the tags that name something in Python."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import yaml

from ddpkit.porting.names import PATHS, PRETRAINER, STAYS, ddpkit_module, ddpkit_name
from ddpkit.porting.text import Change, Note, Source

__all__ = ["fetches", "port_yaml"]

# HyperPyYAML's tags and PyYAML's: `!new:a.b`, `!!python/name:a.b`, `!<tag:yaml.org,2002:python/name:a.b>`.
_TAG = re.compile(r"(?:!(?:new|name|apply|applyref|module):|python/[\w/]+:)(?P<name>speechbrain[\w.]*)")


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
    stays = PRETRAINER if fetches(text) else ""
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if not isinstance(token, yaml.TagToken):
            continue
        start = token.start_mark.index
        found = _TAG.search(text[start : token.end_mark.index])
        new = ddpkit_name(found["name"]) if found else None
        if found and found["name"] == stays:
            notes.append(Note((token.start_mark.line + 1,), STAYS))
        elif found and new:
            source.replace(start + found.start("name"), start + found.end("name"), new)
            names += 1
        elif found and ddpkit_module(found["name"]):
            notes.append(Note((token.start_mark.line + 1,), f"the module {found['name']} stays SpeechBrain's"))
    return Change(source.result(), names, tuple(notes))


def fetches(text: str) -> bool:
    """Say whether a Pretrainer of a YAML file may have to fetch something from a hub or a page.

    Args:
        text: the file.

    Returns:
        Whether one has another source than a path that is seen to be one, or none.

    Raises:
        yaml.YAMLError: the text is not YAML.

    Ranks: local.

    Example:
        >>> fetches("p: !new:speechbrain.utils.parameter_transfer.Pretrainer {paths: {lm: speechbrain/lm/lm.ckpt}}")
        True
    """
    if PRETRAINER not in text:
        return False
    document = yaml.compose(text, Loader=yaml.SafeLoader)
    values = {key: node.value for key, node in _entries(document).items() if isinstance(node, yaml.ScalarNode)}
    pretrainers = [_entries(node).get("paths") for node in _nodes(document) if node.tag.endswith(PRETRAINER)]
    return not all(
        _entries(paths) and all(_is_path(source, values) for source in _entries(paths).values())
        for paths in pretrainers
    )


def _nodes(root: yaml.Node | None) -> Iterator[yaml.Node]:
    """All nodes of a document; what an alias stands for comes once."""
    seen, todo = set[int](), [root] if root is not None else []
    while todo:
        node = todo.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            todo += itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else ()
            todo += node.value if isinstance(node, yaml.SequenceNode) else ()


def _entries(node: yaml.Node | None) -> dict[str, yaml.Node]:
    return {str(key.value): value for key, value in node.value} if isinstance(node, yaml.MappingNode) else {}


def _is_path(node: yaml.Node, values: dict[str, str]) -> bool:
    source = str(node.value)
    for _ in range(len(values)):  # `!ref <folder>/lm.ckpt`, where the folder may be a reference itself
        known = re.match(r"<(\w+)>", source)
        source = (values.get(known[1]) or known[0]) + source[known.end() :] if known else source
    return source.startswith(PATHS)
