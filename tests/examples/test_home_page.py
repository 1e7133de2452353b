"""The home page of the documentation says what README says, in fewer words."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROMISE = re.compile(r"^\| \*\*(.+?)\*\*", re.MULTILINE)


def promises(page):
    return PROMISE.findall((ROOT / page).read_text(encoding="utf-8"))


def test_the_home_page_makes_the_promises_of_the_readme():
    assert len(promises("README.md")) > 1
    assert promises("docs/index.md") == promises("README.md")
