"""The page *Why is it slow?* is true: its recipe runs, and the log says what the page shows, with
other figures.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.examples.pages import BLOCK, sessions
from tests.launching import BIN, Run

from .test_pages import write

pytestmark = [pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "why-is-it-slow.md"
# What is measured differs from one start to the next: its unit stays, or a larger one takes its
# place.
MEASURED = re.compile(
    r"\d[\d.]* ?(?:ms|s|%)(?!\w)|\d[\d.]* samples/s|could take \d[\d.]*"
    r"|Rank \d \(\w+\) (?=waits)|\(\w+\) (?=is late)"
)


BUSY = re.compile(r"The machine is busy: load [\d.]+ on \d+ cores\. ")  # this one may be


def unwrapped(lines):
    """Join lines that are continued with two blanks."""
    return "\n".join(lines).replace("\n  ", " ").splitlines()


def without_figures(line):
    return MEASURED.sub("#", BUSY.sub("", line))


def test_a_figure_may_differ_and_a_word_may_not():
    shown = (
        "Rank 1 (vm) is late in the forward pass. It needs 20 ms more than the median of the "
        "others, 76 % of it."
    )
    other = shown.replace("20 ms", "1.20 s").replace("76 %", "4 %").replace("(vm)", "(node7)")
    assert without_figures(shown) == without_figures(other)
    busy = shown.replace("It needs", "The machine is busy: load 9.3 on 2 cores. It needs")
    assert without_figures(shown) == without_figures(busy)
    assert without_figures(shown) != without_figures(shown.replace("forward", "backward"))
    assert without_figures(shown) != without_figures(shown.replace("Rank 1", "Rank 0"))


def test_the_page_shows_what_the_log_says(tmp_path):
    shown = 0
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        if block["language"] != "console":
            write(block["text"], tmp_path)
            continue
        for number, (words, lines) in enumerate(sessions(block["text"])):
            program = (
                sys.executable if words[0] == "python" else shutil.which(words[0], path=str(BIN))
            )
            name = f"run{shown}.{number}"
            run = Run([program, *words[1:]], tmp_path, name=name, warm=True).wait(120)
            assert run.code == 0, run.tail()
            printed = {
                without_figures(line) for line in [*run.out.splitlines(), *run.err.splitlines()]
            }
            for line in unwrapped(lines):
                assert without_figures(line) in printed, f"{line}\n{run.out}\n{run.err}"
                shown += 1
    assert shown
