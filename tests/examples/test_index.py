"""The pages about the examples: each example is listed with its picture, and what is counted is
counted right.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.examples.pages import BLOCK, is_line, parted, sessions
from tests.house import code_lines

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/train.py"))
INDEX = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")


def test_every_example_is_listed():
    assert sorted(re.findall(r"^## (.*)$", INDEX, re.MULTILINE)) == sorted([*NAMES, "notebook"])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"(examples/{name})" not in readme] == []


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_its_files_and_its_picture(name):
    files = {path.name for path in (ROOT / "examples" / name).iterdir()}
    assert files >= {"train.py", "hparams.yaml", "README.md"}
    assert f"(examples/{name}.svg)" in INDEX
    picture = ET.parse(ROOT / "docs" / "examples" / f"{name}.svg")
    curves = picture.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(curves) == 2
    assert all(len(curve.get("points").split()) > 1 for curve in curves)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "digits"])
def test_a_readme_says_what_it_teaches_and_shows_one_process_and_two(name):
    text = (ROOT / "examples" / name / "README.md").read_text(encoding="utf-8")
    assert "\nTeaches: " in text
    assert "\nLines to look at" in text
    shown = [
        words for block in BLOCK.finditer(text) for words, lines in sessions(block["text"]) if lines
    ]
    assert {"python", "torchrun"} <= {words[0] for words in shown}


def test_the_page_counts_the_lines_of_the_three_scripts_right():
    page = (ROOT / "docs" / "tutorial" / "one-script-three-times.md").read_text(encoding="utf-8")
    [counted] = re.findall(r"^\| lines of code \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    scripts = [
        ROOT / "examples" / "own_loop" / name
        for name in ("by_hand.py", "train.py", "with_brain.py")
    ]
    assert [int(one) for one in counted] == [code_lines(path) for path in scripts]


def test_every_how_to_is_offered_by_its_index():
    folder = ROOT / "docs" / "how-to"
    index = (folder / "index.md").read_text(encoding="utf-8")
    offered, listed = (
        set(re.findall(pattern, index, re.MULTILINE))
        for pattern in (r"\]\(([\w-]+)\.md[#)]", r"^([\w-]+)$")
    )
    pages = {path.stem for path in folder.glob("*.md")} - {"index"}
    assert offered == pages
    assert listed == pages


def lines_that_match(printed, shown):
    return [is_line(parted(printed), parted(one)) for one in shown]


def test_a_number_that_is_wrong_on_a_page_is_seen():
    printed = (
        "epoch: 4 - valid loss: 4.163e-01, accuracy 93.3 % (280 of 300), 12 s; in "
        "CKPT+2026-01-02+03-04-05+00"
    )
    right = [
        (
            "epoch: 4 - valid loss: 4.16e-01, accuracy 93.3 % (280 of 300), 7 s; in "
            "CKPT+2025-11-12+13-14-15+01"
        )
    ]
    wrong = [
        right[0].replace(*pair)
        for pair in (("4.16e", "4.26e"), ("93.3", "95.3"), ("280", "281"), ((": 4 "), (": 5 ")))
    ]
    assert (
        lines_that_match(printed.replace("4.163e", "4.16e"), right + wrong) == [True] + [False] * 4
    )
    bar = "epoch 1 of 3 train: 100%|###| 16/16 [run 1:02:03+ left, loss=0.6802, lr=0.01]"
    other = [bar.replace("1:02:03+", "04:05"), bar.replace("0.6802", "0.6902")]
    assert lines_that_match(bar, [*other, bar.replace("16/16", "15/16")]) == [True, False, False]
