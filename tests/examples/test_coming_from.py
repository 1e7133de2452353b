"""Pages for those who know another library: the scripts run, and the options that they name are
options.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ddpkit import RunOptions
from tests.ecosystem import OFFLINE, needs
from tests.launching import Run, python, torchrun

PAGES = Path(__file__).parents[2] / "docs" / "coming-from"
LOSSES = re.compile(r"^\| (?P<who>[^|]+) \| (?P<one>0\.\d+) \| (?P<two>0\.\d+) \|$", re.MULTILINE)
OPTION = re.compile(r"`--(\w+)")
# torchrun's options, and those that end with the start
OF_STARTS = {"standalone", "nproc_per_node", "nproc", "estimate"}


def needs_all(*packages):
    """Return the mark that skips where one of these is not installed; it says how to."""
    *_, is_there = needs(*packages)
    return is_there


def losses(page):
    """Return the losses of a page's table, of one process and of two, by library."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    return {row["who"]: (row["one"], row["two"]) for row in LOSSES.finditer(text)}


def last_loss(launcher, script, folder, shown=r"^epoch 5: loss (0\.\d+)", **options):
    """Run a script in a folder of its own, and return the loss that it prints last."""
    shutil.copytree(PAGES / "scripts", folder)
    run = Run([*launcher, script], folder, **options).wait()
    assert run.code == 0, run.tail()
    return float(re.findall(shown, run.out, re.MULTILINE)[-1])


def is_close(loss, shown):
    return loss == pytest.approx(float(shown), rel=1e-2)


@pytest.mark.parametrize("page", sorted(path.stem for path in PAGES.glob("*.md")))
def test_a_page_names_options_that_there_are(page):
    named = set(OPTION.findall((PAGES / f"{page}.md").read_text(encoding="utf-8")))
    assert named
    assert named - OF_STARTS - set(RunOptions()) == set()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_recipe_has_the_losses_that_are_shown(processes, tmp_path):
    shown = losses("plain-ddp")["ddpkit"]
    loss = last_loss(torchrun(processes), "train.py", tmp_path / "run", warm=True)
    assert is_close(loss, shown[processes - 1])


def test_each_page_has_the_same_losses_of_ddpkit():
    of_ddpkit = {losses(path.stem)["ddpkit"] for path in PAGES.glob("*.md")}
    assert len(of_ddpkit) == 1
    [(one, two)] = of_ddpkit
    assert one == two


class TestScriptsWithoutDdpkit:
    """They show nothing of ddpkit but what the pages compare it with."""

    pytestmark = pytest.mark.exhaustive

    @pytest.mark.parametrize("processes", [1, 2])
    def test_by_hand(self, processes, tmp_path):
        shown = losses("plain-ddp")["by hand"]
        loss = last_loss(torchrun(processes), "by_hand.py", tmp_path / "run")
        assert is_close(loss, shown[processes - 1])

    @needs_all("accelerate")
    def test_accelerate(self, tmp_path):
        shown, _ = losses("accelerate")["Accelerate 1.15.0"]
        on_cpu = {**OFFLINE, "ACCELERATE_USE_CPU": "true"}
        loss = last_loss(python(), "by_accelerate.py", tmp_path / "run", environment=on_cpu)
        assert is_close(loss, shown)

    @needs_all("transformers", "accelerate")
    def test_trainer(self, tmp_path):
        shown, _ = losses("hf-trainer")["transformers 5.24.0"]
        printed = r"'eval_loss': '?(0\.\d+)"
        folder = tmp_path / "run"
        loss = last_loss(python(), "by_trainer.py", folder, printed, environment=OFFLINE)
        assert is_close(loss, shown)
