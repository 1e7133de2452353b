"""The records of decisions, and their index by question."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "decisions"
ROW = re.compile(
    r"^\| (?P<question>Why .+\?) \| \[(?P<number>\d{4})\]\((?P<file>[\w.-]+)\)(?P<mark>.*) \|$"
)
REPLACED = re.compile(
    r"replaced (?:in part )?by\s+\[(\d{4})\]|\[(\d{4})\]\([\w.-]+\) replaces the part"
)


def rows():
    """Each row of the index that leads to a decision."""
    lines = (FOLDER / "index.md").read_text(encoding="utf-8").splitlines()
    listed = [line for line in lines if "](0" in line]
    found = [ROW.match(line) for line in listed]
    assert [line for line, row in zip(listed, found, strict=True) if row is None] == []
    return found


def replaced_by(path):
    """The numbers of the decisions that replace this one, as the top of its page says."""
    head = path.read_text(encoding="utf-8").partition("\n## ")[0]
    return {number for pair in REPLACED.findall(head) for number in pair if number}


def test_each_decision_stands_once_in_the_index_under_a_question_of_its_own():
    names = {path.name for path in FOLDER.glob("0*.md")}
    assert Counter(row["file"] for row in rows()) == Counter(names)
    assert [row["file"] for row in rows() if not row["file"].startswith(row["number"])] == []
    questions = Counter(row["question"] for row in rows())
    assert [question for question, times in questions.items() if times > 1] == []


def test_the_index_says_which_decisions_are_replaced():
    marked = {row["file"]: set(re.findall(r"\d{4}", row["mark"])) for row in rows()}
    assert marked == {name: replaced_by(FOLDER / name) for name in marked}
    assert marked["0005-the-brain-on-three-floors.md"] == {"0013"}
