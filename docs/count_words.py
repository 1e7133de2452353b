"""Count the words of each sentence of the pages: `python docs/count_words.py [PAGE...]`.

It prints the median and the longest sentences of each page and of all, and each riddle: a phrase
that a reader has to read twice. Code, headings and addresses of links are left out, and tables but
for the riddles. Records
(decisions, changelog) are not counted, since nobody rewrites them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ("README.md", ".github/CONTRIBUTING.md", "docs/**/*.md", "examples/*/README.md")
RECORDS = ("docs/decisions/", "docs/_build/", "docs/changelog.md")
RIDDLES = (
    "of which",
    "of whom",
    "whoever",
    "one that",
    "ones that",
    "which is what",
    "thereof",
    "whereof",
    "whereby",
    "wherein",
)
LONGEST = 3  # sentences that are shown of a page

# What is no prose: a block of code or a directive, a comment, a row of a table, a heading, a fence.
BLOCK = re.compile(r"^( *)(```+).*?^\1\2`*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
ROW = re.compile(r"^ *\|.*$", re.MULTILINE)
LINE = re.compile(r"^ *(\||#+ |:::|\(\S+\)=$).*$", re.MULTILINE)
# What stands for other text.
PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
CODE = re.compile(r"(`+).+?\1", re.DOTALL)
ADDRESS = re.compile(r"<?https?://\S+")
# Where a paragraph begins: after an empty line, and at an item of a list or a definition.
ITEM = re.compile(r"\n\s*\n|^\s*(?:[-*+]|\d+\.|:) +", re.MULTILINE)
END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_]*(?:[A-Z0-9]|ddpkit))")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf)\.")
WORD = re.compile(r"\S*\w\S*")


class Page(NamedTuple):
    """The sentences of a page, the rows of its tables, and the riddles in both."""

    name: str
    sentences: list[str]
    rows: list[str]

    @property
    def lengths(self) -> list[int]:
        """The words of each sentence."""
        return [count(sentence) for sentence in self.sentences]

    @property
    def riddles(self) -> list[str]:
        """The sentences and rows that hold a riddle, each behind the phrase."""
        return [
            f"{phrase!r}: {sentence}"
            for sentence in [*self.sentences, *self.rows]
            for phrase in RIDDLES
            if re.search(rf"\b{phrase}\b", sentence, re.IGNORECASE)
        ]


def count(sentence: str) -> int:
    """Return how many words a sentence has; a piece of code is one."""
    return len(WORD.findall(sentence))


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's prose."""
    for pattern, other in (
        (BLOCK, "\n\n"),
        (COMMENT, ""),
        (LINE, "\n"),
        (PICTURE, ""),
        (LINK, r"\1"),
        (CODE, "Code"),
        (ADDRESS, "Code"),
        (ABBREVIATION, r"\1"),
    ):
        text = pattern.sub(other, text)
    paragraphs = (" ".join(part.split()) for part in ITEM.split(text))
    return [found for part in paragraphs for found in END.split(part) if count(found)]


def rows(text: str) -> list[str]:
    """Return the rows of a page's tables, without pieces of code."""
    return ROW.findall(CODE.sub("Code", BLOCK.sub("\n\n", text)))


def pages() -> Iterator[Path]:
    """Yield the pages that are counted."""
    for pattern in PATTERNS:
        for path in sorted(ROOT.glob(pattern)):
            if not path.relative_to(ROOT).as_posix().startswith(RECORDS):
                yield path


def read(path: Path) -> Page:
    """Read one page."""
    name = path.resolve().relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    return Page(name, sentences(text), rows(text))


def show(name: str, found: list[Page], longest: int) -> None:
    """Print a row about pages, and their longest sentences."""
    lengths = [length for page in found for length in page.lengths]
    middle = median(lengths) if lengths else 0
    sys.stdout.write(f"{middle:5.1f}  {len(lengths):5}  {max(lengths, default=0):5}  {name}\n")
    everything = [sentence for page in found for sentence in page.sentences]
    for sentence in sorted(everything, key=count, reverse=True)[:longest]:
        sys.stdout.write(f"{'':21}{count(sentence)}: {sentence}\n")


def main(words: list[str]) -> int:
    """Print the table; return 1 where there is a riddle."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("page", nargs="*", type=Path, help="these pages (default: all)")
    parser.add_argument("--longest", type=int, default=LONGEST, help="sentences shown of a page")
    options = parser.parse_args(words)
    found = [read(path) for path in options.page or pages()]
    sys.stdout.write("median  count   most  page\n")
    for page in found:
        show(page.name, [page], options.longest)
    folders = sorted({str(Path(page.name).parent) for page in found})
    for folder in folders:
        show(f"{folder}/", [page for page in found if str(Path(page.name).parent) == folder], 0)
    show("all", found, options.longest)
    riddles = [f"{page.name}: {riddle}" for page in found for riddle in page.riddles]
    sys.stdout.write("".join(f"{riddle}\n" for riddle in riddles))
    return int(bool(riddles))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
