"""The search of the pages finds the how-to of a task first.

Sphinx's search page gives an exact match with a main index entry 100 points. A title gets 16 at
most and a word in a text 15 (`Scorer` in its searchtools.js). So the page that has the entry stands
first, if no other has it.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
ENTRY = re.compile(r"^```\{index\} ! (.+)$", re.MULTILINE)
FIRST = {
    "adapters": "checkpoints",
    "csv": "log-values",
    "debugging": "debugging",
    "deepspeed": "models-that-do-not-fit",
    "early stopping": "early-stopping",
    "fine-tuning": "hugging-face",
    "gradient accumulation": "accumulation",
    "mixed precision": "mixed-precision",
    "nan": "nan",
    "notebook": "notebooks",
    "slow": "why-is-it-slow",
    "tensorboard": "tensorboard",
}


def pages_with_entries():
    return [path for path in HOW_TO.glob("*.md") if ENTRY.search(path.read_text(encoding="utf-8"))]


@pytest.mark.slow
def test_the_how_to_is_found_first(tmp_path):
    from sphinx.cmd.build import build_main

    source = tmp_path / "source"
    source.mkdir()
    for path in pages_with_entries():
        title, *entries = re.findall(
            r"^# .+\n|^```\{index\}.+\n```\n", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        (source / path.name).write_text("\n".join([title, *entries]), encoding="utf-8")
    shutil.move(source / "nan.md", source / "index.md")
    options = ["-D", "extensions=myst_parser", "-D", "html_theme=basic"]
    assert build_main(["-q", "-C", *options, str(source), str(tmp_path / "html")]) == 0

    written = (tmp_path / "html" / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(written.removeprefix("Search.setIndex(").removesuffix(")"))
    names = ["nan" if name == "index" else name for name in index["docnames"]]
    found = {
        query: [names[page] for page, _, is_main in index["indexentries"].get(query, []) if is_main]
        for query in FIRST
    }
    assert found == {query: [page] for query, page in FIRST.items()}


def test_no_two_pages_have_one_entry():
    entries = [
        entry
        for path in (HOW_TO.parent).rglob("*.md")
        for entry in ENTRY.findall(path.read_text(encoding="utf-8"))
    ]
    assert sorted(entries) == sorted(set(entries))
    assert set(FIRST) <= set(entries)
