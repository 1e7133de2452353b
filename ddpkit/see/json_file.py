"""The file of ``--json``, which commands that run a recipe write for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpkit.base import replacing, writing


def write_json(
    path: Path | None,
    values: Mapping[str, Any],
) -> None:
    """Write a result; the file is whole or not there.

    Args:
        path: of the file, as it was given; None: nothing is written.
        values: of the result.

    Raises:
        ConfigError: it cannot be written.

    Ranks: local.
    """
    if path is None:
        return
    text = json.dumps(values, indent=1) + "\n"
    with writing(f"--json={str(path)!r}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
