"""The pictures that explain: they say what happens, and can be read in both themes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

import ddpkit

ROOT = Path(__file__).parents[2]
ON = ("panel", "plain", "first", "second", "third", "waiting")
PAGES = {"light": "#ffffff", "dark": "#131416"}  # furo's backgrounds


@pytest.fixture
def drawings(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import drawings

    return drawings


class Recorder(ddpkit.Brain):
    """Writes down which of its methods are called."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.square().mean()


def recorded(calls, name):
    method = getattr(Recorder, name)

    def call(self, *arguments, **options):
        given = [*arguments, *options.values()]
        stage = next((one for one in given if isinstance(one, ddpkit.Stage)), None)
        is_shown = stage is not None and not name.startswith(("compute", "evaluate"))
        calls.append(f"{name}({stage.name})" if is_shown else name)
        return method(self, *arguments, **options)

    return call


def test_the_order_of_calls_is_that_of_the_picture(drawings):
    drawn = list(drawings.order_of_calls.names())
    calls = []
    names = sorted({name.partition("(")[0] for name in drawn})
    watched = type("Watched", (Recorder,), {name: recorded(calls, name) for name in names})
    brain = watched({"net": torch.nn.Linear(1, 1)}, lambda p: torch.optim.SGD(p, lr=0.1))
    brain.fit(range(1, 2), torch.ones(1, 1), torch.ones(1, 1))
    assert calls == drawn


def test_samples_of_the_picture_are_each_taken_once_and_by_step_the_same(drawings):
    steps = [
        [sorted(itertools.chain(*step)) for step in drawings.samples_of_processes.shares(size)]
        for size in (1, 2, 3)
    ]
    assert steps[0] == steps[1] == steps[2]
    assert sorted(itertools.chain(*steps[0])) == list(range(11))


def luminance(colour):
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", PAGES)
def test_words_can_be_read_on_each_colour(drawings, theme):
    number = list(PAGES).index(theme)
    colours = {name: both[number] for name, both in drawings.canvas.COLOURS.items()}
    for background in [PAGES[theme], *(colours[name] for name in ON)]:
        assert contrast(colours["ink"], background) >= 4.5
    for words in ("faint", "trouble"):
        for background in (PAGES[theme], colours["panel"]):
            assert contrast(colours[words], background) >= 4.5


def test_each_picture_stands_in_a_page_with_words_in_its_place(drawings):
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*/*.md")]
    shown = [
        found
        for page in pages
        for found in re.findall(r"!\[([^\]]*)\]\(\.\./_build/pictures/drawings/(\w+)\.svg\)", page)
    ]
    assert sorted(name for _, name in shown) == sorted(drawings.ALL)
    assert all(len(words.split()) > 10 for words, _ in shown)


def test_pictures_that_are_the_same_keep_their_files(drawings, tmp_path):
    drawings.draw_all(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    drawings.draw_all(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert len(before) == len(drawings.ALL)
