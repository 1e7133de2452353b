"""Another output folder in the place of that of a recipe: the scratch folder of a measured slice,
which writes nothing of the user's, or the folder of this machine that mirrors a URL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hyperpyyaml import resolve_references
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode

from ddpkit.errors import ConfigError
from ddpkit.launch import find_slice
from ddpkit.recipe_yaml.document import YAML_TAG, compose, overrides_node, pairs, read_document

OUTPUT_FOLDER = "output_folder"


def with_scratch_output(file: str, overrides: Mapping[str, Any] | str | None) -> Any:
    """Return overrides of a recipe's YAML that put its output folder into the scratch folder of a
    slice.

    In a process that is no slice, or with a file that has no such key, they are returned as they
    are.

    Args:
        file: path of the YAML.
        overrides: a mapping, which is not changed, or YAML text.
    """
    plan = find_slice()
    if plan is None or OUTPUT_FOLDER not in {
        key.value for key, _ in pairs(read_document(file).root)
    }:
        return overrides
    return with_output_folder(overrides, str(plan.output_folder))


def with_output_folder(overrides: Mapping[str, Any] | str | None, folder: str) -> Any:
    """Return overrides of a recipe's YAML in which its output folder is another.

    Args:
        overrides: a mapping, which is not changed, or YAML text.
        folder: the output folder.

    Example:
        >>> print(with_output_folder("lr: 0.1", "results"))
        lr: 0.1
        output_folder: "results"
    """
    if isinstance(overrides, Mapping):
        return {**overrides, OUTPUT_FOLDER: folder}
    line = f"{OUTPUT_FOLDER}: {json.dumps(folder)}"
    if not overrides or not overrides.strip():
        return line
    for key, value in overrides_node(overrides).value:
        if key.value == OUTPUT_FOLDER:
            before = overrides[: key.start_mark.index]
            return f"{before}{line}{overrides[value.end_mark.index :]}"
    return f"{overrides.rstrip()}\n{line}"


def output_folder_of(file: str, overrides: str) -> str | None:
    """Return what a recipe's YAML says its output folder is, with all references resolved; None
    where it says nothing, or calls something to find out.

    Args:
        file: path of the YAML.
        overrides: YAML text.
    """
    document = read_document(file)
    if OUTPUT_FOLDER not in {key.value for key, _ in pairs(document.root)}:
        return None
    try:
        with open(file, encoding="utf-8") as opened:  # noqa: PTH123 -- HyperPyYAML reads its name
            resolved = resolve_references(opened, overrides or None).getvalue()
        root = compose(resolved, file, repr(file))
    except (YAMLError, ConfigError, ValueError, LookupError, TypeError, AttributeError, OSError):
        return None  # whoever loads the file says what is wrong in it
    if not isinstance(root, MappingNode):
        return None
    found = next((value for key, value in pairs(root) if key.value == OUTPUT_FOLDER), None)
    is_text = isinstance(found, ScalarNode) and str(found.tag).startswith(YAML_TAG)
    return found.value if is_text and isinstance(found, ScalarNode) else None
