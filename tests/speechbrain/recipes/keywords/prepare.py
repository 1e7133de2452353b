"""Writes the manifests: which word is in which utterance. The sound is made where it is read."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = ["up", "down", "left", "right"]


def prepare(folder, sizes):
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, size in sizes.items():
        rows = {
            f"{split}{row:03}": {
                "length": 2000,
                "phase": row,
                "tone": row % len(WORDS),
                "word": WORDS[row % len(WORDS)],
            }
            for row in range(size)
        }
        Path(folder, f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")
