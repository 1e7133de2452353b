"""What the pages show is what happens: their files are written, their commands run, their output
compared.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ecosystem import OFFLINE
from tests.examples.pages import BLOCK, run, sessions
from tests.launching import Run, python, torchrun

pytestmark = [pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/index.md",
    "docs/tutorial/from-one-process-to-several.md",
    "docs/how-to/accumulation.md",
    "docs/how-to/contrastive.md",
    "docs/how-to/debugging.md",
    "docs/how-to/early-stopping.md",
    "docs/how-to/evaluation.md",
    "docs/how-to/learning-rate-and-batch-size.md",
    "docs/how-to/log-values.md",
    "docs/how-to/mixed-precision.md",
    "docs/how-to/nan.md",
    "docs/how-to/schedules.md",
    "docs/how-to/tensorboard.md",
    "docs/how-to/validation.md",
    "docs/how-to/watch-a-run.md",
)

FILE = re.compile(r"# (?P<name>[\w.]+)(?P<end>, at the end)?(, from `(?P<start>.+)` on)?\n")
NOT_RUN_HERE = ("git", "make")
PYTHON = ("python", "torchrun")  # can be forked from a process that has imported torch


def write(text, folder):
    """Write the file that a block shows: whole, at the end of what is there, or in place of its
    last part.
    """
    found = FILE.match(text)
    assert found, f"the first line of a block says which file it is: {text[:60]}"
    path = folder / found["name"]
    body = text[found.end() :]
    if found["end"]:
        body = path.read_text() + body
    if found["start"]:
        old = path.read_text()
        body = old[: old.rindex("\n", 0, old.index(found["start"])) + 1] + body
    path.write_text(body)


@pytest.mark.in_each_check(99)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_true(page, tmp_path):
    commands = 0
    for block in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")):
        if block["language"] != "console":
            write(block["text"], tmp_path)
            continue
        for words, shown in sessions(block["text"]):
            if words[0] not in NOT_RUN_HERE:
                is_cold = page == "README.md" and not commands  # as a newcomer starts
                run(words, shown, tmp_path, warm=words[0] in PYTHON and not is_cold)
                commands += 1
    assert commands


@pytest.mark.skipif(find_spec("transformers") is None, reason="pip install -e '.[ecosystem]'")
def test_the_page_of_hugging_face_is_true(tmp_path, monkeypatch):
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    test_a_page_is_true("docs/how-to/hugging-face.md", tmp_path)


@pytest.mark.skipif(find_spec("optuna") is None, reason="pip install -e '.[ecosystem]'")
def test_the_page_of_optuna_is_true(tmp_path):
    test_a_page_is_true("docs/how-to/sweeps.md", tmp_path)


# Every process kills itself after optimizer step 26 of 40: in the third epoch, two steps after a
# checkpoint.
KILLED = """
import os, runpy, signal
import ddpkit

def die(self, *arguments):
    if self.optimizer_step == 26:
        os.kill(os.getpid(), signal.SIGKILL)

ddpkit.Brain.on_fit_batch_end = die
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_the_schedule_of_the_page_goes_on_after_a_kill(processes, tmp_path):
    launcher = python() if processes == 1 else torchrun(processes)
    folders = {name: tmp_path / name for name in ("whole", "killed")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "killed.py").write_text(KILLED)
        for block in BLOCK.finditer(
            (ROOT / "docs/how-to/schedules.md").read_text(encoding="utf-8")
        ):
            if block["language"] != "console":
                write(block["text"], folder)
    # what is being written in the background is lost with the process
    at_once = "--ckpt_async=False"
    whole = Run([*launcher, "train.py", "hparams.yaml"], folders["whole"], warm=True).wait()
    again = folders["killed"]
    killed = Run(
        [*launcher, "killed.py", "hparams.yaml", at_once],
        again,
        name="first",
        warm=True,
    ).wait()
    resumed = Run([*launcher, "train.py", "hparams.yaml"], again, name="second", warm=True).wait()
    assert (whole.code, resumed.code) == (0, 0), whole.tail() + resumed.tail()
    assert killed.code != 0
    assert "24 optimizer steps done" in resumed.err
    assert [*killed.out.splitlines(), *resumed.out.splitlines()] == whole.out.splitlines()
    for name in ("net", "optimizer", "scheduler"):
        files = [next(folder.glob(f"results/save/*/{name}.ckpt")) for folder in folders.values()]
        assert files[0].read_bytes() == files[1].read_bytes(), name
