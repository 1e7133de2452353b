"""The pages are written in short sentences, and without phrases that a reader reads twice."""

from __future__ import annotations

import runpy
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
COUNT = runpy.run_path(str(ROOT / "docs" / "count_words.py"))
MOST_IN_THE_MEDIAN = 15  # words

TEXT = """# A heading of which nobody counts the words

Three words here. `a piece of code` is one word, [a link](https://of.which/has words) two.

| a table | of which nothing counts |
|---|---|

- An item without an end
- Use `ckpt`: it works. ddpkit begins a sentence.

```python
whoever = "reads this"
```
"""


@pytest.fixture(scope="module")
def pages():
    return [COUNT["read"](path) for path in COUNT["pages"]()]


def test_the_words_of_prose_are_counted():
    lengths = [COUNT["count"](sentence) for sentence in COUNT["sentences"](TEXT)]
    assert lengths == [3, 7, 5, 4, 4]


def test_a_riddle_is_found_in_a_sentence_and_in_a_table():
    text = TEXT + "\nA run, of which one fails.\n"
    page = COUNT["Page"]("page", COUNT["sentences"](text), COUNT["rows"](text))
    assert len(page.riddles) == 2


def test_a_sentence_of_the_pages_has_few_words_in_the_median(pages):
    assert {"README.md", "docs/index.md"} <= {page.name for page in pages}
    assert median(length for page in pages for length in page.lengths) <= MOST_IN_THE_MEDIAN


@pytest.mark.costly
def test_no_page_has_a_riddle(pages):
    assert [f"{page.name}: {riddle}" for page in pages for riddle in page.riddles] == []
