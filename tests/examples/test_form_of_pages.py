"""The form of the pages: what a block is coloured as, and what stands for a picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        ROOT / "README.md",
        *(ROOT / ".github").glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
    if "_build" not in path.parts
)
FENCE = re.compile(r"^ *(?P<marks>`{3,}|~{3,}|:{3,})(?P<words>.*)$")
LANGUAGES = {"console", "diff", "json", "pycon", "python", "py", "sh", "text", "yaml"}
PROMPT = "$ "


def blocks_of(text):
    """Yield (line, words after the fence, lines) of each block of a page."""
    opened = None
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened, shown = (fence["marks"], number, fence["words"].strip()), []
        elif opened and fence and fence["marks"].startswith(opened[0]) and not fence["words"]:
            yield opened[1], opened[2], shown
            opened = None
        elif opened:
            shown.append(line)


def faults_of(text):
    """Return what is wrong with the languages of a page's blocks."""
    faults = []
    for number, words, shown in blocks_of(text):
        has_prompt = any(line.startswith(PROMPT) for line in shown)
        if words.startswith("{"):
            continue
        if words not in LANGUAGES:
            faults.append(f"line {number}: {words!r} is no language of the pages")
        elif has_prompt != (words == "console"):
            faults.append(f"line {number}: a block is 'console' if it has prompts, else not")
    return faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```\nepoch 1\n```", "'' is no language"),
        ("```bash\nls\n```", "'bash' is no language"),
        ("```text\n$ ls\nREADME.md\n```", "if it has prompts"),
        ("```console\nls\n```", "if it has prompts"),
        ("````text\n```\n````\n```\nls\n```", "line 4: ''"),
    ],
)
def test_a_block_of_the_wrong_language_is_found(text, fault):
    [found] = faults_of(text)
    assert fault in found


def test_each_block_is_coloured_as_what_it_is():
    found = {page: faults_of((ROOT / page).read_text(encoding="utf-8")) for page in PAGES}
    assert {page: faults for page, faults in found.items() if faults} == {}
