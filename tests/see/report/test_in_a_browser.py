"""The page in a real browser: no script fails, nothing is wider than the window, nothing is
loaded.
"""

from __future__ import annotations

import pytest

from ddpkit.cli.report import run as report
from tests.browser import find_browser
from tests.see.report.made_runs import Writer, killed_and_resumed

pytestmark = pytest.mark.slow


@pytest.fixture
def browser(tmp_path):
    return find_browser(tmp_path)


def a_long_word(folder):
    run = Writer(folder / ("folder" * 20))
    word = "word" * 60
    run.start(arguments=["train.py", word], options={word: word})
    run.event("stats", meta={"epoch": 1}, train={word: 1.0, "<script>": 1e-300})
    run.event("verdict", kind="slow_data", what=word, how_much=word, **{"try": word})
    run.event("checkpoint", path=f"CKPT+{word}", meta={word: 1.0})
    run.event("exception", type=word, message=word)
    run.start(reason=word)
    folder = run.close()
    (folder / "log.txt").write_text(f"{word * 5}\n")
    return folder


PAGES = {
    "one": lambda folder: [killed_and_resumed(folder / "one")],
    "several": lambda folder: [
        killed_and_resumed(folder / str(number), seed=number, options={"seed": number})
        for number in range(3)
    ],
    "begun": lambda folder: [Writer(folder / "begun").close()],
    "long-words": lambda folder: [a_long_word(folder)],
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_in_a_browser(tmp_path, browser, name):
    runs = PAGES[name](tmp_path)
    page = tmp_path / f"{name}.html"
    report([*map(str, runs), "-o", str(page)])
    for width in (1300, 420):
        seen = browser.look(page, width)
        assert seen.width == width
        assert seen.failures == []
        assert (seen.overflow, seen.wide) == (0, [])
        assert seen.loaded == 0
        assert seen.tips == seen.plots
        assert seen.curves_left == 0
        assert seen.curves >= seen.plots
        assert seen.theme == "dark"
        assert browser.photograph(page, width).stat().st_size > 5000


def test_what_is_wrong_with_a_page_is_seen(tmp_path, browser):
    page = tmp_path / "bad.html"
    wide = '<div style="width: 900px">wide</div>'
    button = '<button class="theme"></button>'
    scripts = '<script>missing()</script><img src="nothing.png">'
    page.write_text(f"<html ><head></head><body>{wide}{button}{scripts}</body></html>")
    seen = browser.look(page, 420)
    assert len(seen.failures) == 2
    assert "missing" in seen.failures[0]
    assert seen.overflow > 400
    assert seen.wide
