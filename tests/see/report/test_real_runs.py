"""The page about runs that have really been trained, killed and resumed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from ddpkit.cli.report import run as report
from ddpkit.see import find_runs, read_run
from ddpkit.see.report.goodput import AGAIN, COUNTED, DOWN
from tests.browser import find_browser
from tests.launching import Run, torchrun, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.faults]

HERE = Path(__file__).parent
LOST = 20  # optimizer steps at least between the last checkpoint and the kill


@pytest.fixture
def train(tmp_path):
    for name in ("recipe.py", "hparams.yaml"):
        shutil.copy(HERE / name, tmp_path)
    runs = []

    def begin(*words, name="run"):
        command = torchrun(2, "recipe.py", "hparams.yaml", "--noprogressbar", *words)
        runs.append(Run(command, tmp_path, name=name, warm=True))
        return runs[-1]

    yield begin
    for run in runs:
        kill(run)
        run.wait()


def kill(run):
    for pid in run.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def read(folder):
    return read_run(*find_runs([folder]))


def saved_at(report):
    return max((row.steps for row in report.checkpoints), default=0)


def is_beyond_its_checkpoint(folder):
    if not (folder / "metrics.jsonl").exists():
        return False
    report = read(folder)
    return saved_at(report) and report.optimizer_steps >= saved_at(report) + LOST


def test_a_run_that_was_killed_and_resumed(train, tmp_path):
    folder = tmp_path / "results"
    killed = train("--pause=0.03")
    assert wait_until(lambda: is_beyond_its_checkpoint(folder), 60), killed.err
    is_running = read(folder).state == "going on"
    kill(killed)
    killed.wait()
    at_death = read(folder)
    assert is_running
    assert at_death.state == "ended or killed"
    resumed = train("--pause=0.02", name="resumed")
    assert report([str(folder), "-o", str(tmp_path / "going-on.html")]) == 0
    resumed.wait()
    assert resumed.code == 0, resumed.err

    found = read(folder)
    assert found.state == "finished"
    assert found.optimizer_steps == 450
    (restart,) = found.goodput.restarts
    assert restart.resumed_at == saved_at(at_death)
    assert restart.resumed_from in found.history.checkpoints
    assert restart.steps == at_death.optimizer_steps - saved_at(at_death) >= LOST
    assert restart.reason.startswith("killed")
    parts = found.goodput.parts
    assert sum(parts.values()) == pytest.approx(found.goodput.wall)
    assert 0 < restart.again == parts[AGAIN] < parts[COUNTED]
    assert restart.down == parts[DOWN] > 0
    assert 0 < found.goodput.share < 0.9
    steps = list(found.steps["optimizer_step"])
    assert steps == sorted(set(steps)), "each step is drawn once"
    assert [row.best_of for row in found.checkpoints if row.is_there] == [("loss",)]

    page = tmp_path / "page.html"
    assert report([str(folder), "-o", str(page), "--png", str(tmp_path / "page.png")]) == 0
    browser = find_browser(tmp_path)
    for width in (1300, 420):
        seen = browser.look(page, width)
        assert (seen.failures, seen.overflow, seen.tips) == ([], 0, seen.plots)


def test_a_run_that_has_failed_beside_one_that_has_not(train, tmp_path):
    good = train("--output_folder=good", "--seed=2", "--epochs=1").wait()
    assert good.code == 0, good.err
    bad = train("--output_folder=bad", "--fails_in_epoch=1", name="bad").wait()
    assert bad.code != 0
    found = read(tmp_path / "bad")
    assert found.state == "failed"
    assert found.history.now.words == "ValueError: <b>this epoch</b> was told to fail"
    page = tmp_path / "page.html"
    assert report([str(tmp_path / "good"), str(tmp_path / "bad"), "-o", str(page)]) == 0
    text = page.read_text()
    assert "&lt;b&gt;this epoch&lt;/b&gt; was told to fail" in text
    seen = find_browser(tmp_path).look(page, 420)
    assert (seen.failures, seen.overflow, seen.tips) == ([], 0, seen.plots)
