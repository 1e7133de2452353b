"""Where the output folder of a recipe is in a measured slice, which writes nothing of the
user's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ddpkit.launch import find_slice
from ddpkit.recipe_yaml.document import overrides_node, pairs, read_document

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
    folder = str(plan.output_folder)
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
