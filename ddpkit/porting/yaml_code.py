"""YAML: the tags that name something in Python."""

from __future__ import annotations

import re

import yaml

from ddpkit.porting.names import ddpkit_module, ddpkit_name
from ddpkit.porting.text import Change, Note, Source

__all__ = ["port_yaml"]

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
