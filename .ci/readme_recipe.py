#!/usr/bin/env python3
"""Write the recipe that README shows to a folder: .ci/readme_recipe.py README.md FOLDER."""

from __future__ import annotations

import re
import sys
from pathlib import Path

BLOCK = re.compile(
    r"^```(?:python|yaml)\n# (?P<name>[\w.]+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)

readme, folder = map(Path, sys.argv[1:])
found = {
    block["name"]: block["text"] for block in BLOCK.finditer(readme.read_text(encoding="utf-8"))
}
for name in ("train.py", "hparams.yaml"):
    (folder / name).write_text(found[name], encoding="utf-8")
