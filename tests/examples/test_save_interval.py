"""The program of a page that computes how often to save, on the log of a run."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

from ddpkit.train_logger import set_run_log
from tests.recipes import Regression, make, points

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "checkpoints.md"
PROGRAM = re.compile(r"^```python\n# save_interval.py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Saving(Regression):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.checkpointer.save_and_keep_only()


def test_the_interval_of_a_run(tmp_path, monkeypatch, capsys):
    set_run_log(tmp_path / "metrics.jsonl")
    try:
        make(Saving, folder=tmp_path / "save").fit(range(1, 4), points(4))
    finally:
        set_run_log(None)
    program = tmp_path / "save_interval.py"
    program.write_text(PROGRAM.search(PAGE.read_text(encoding="utf-8"))[1])
    monkeypatch.setattr(sys, "argv", [str(program), str(tmp_path / "metrics.jsonl"), "24"])
    capsys.readouterr()
    runpy.run_path(str(program), run_name="__main__")
    said = re.fullmatch(
        r"3 saves, (\S+) s each: every (\S+) minutes, (\S+)% lost\n", capsys.readouterr().out
    )
    seconds, minutes, lost = map(float, said.groups())
    assert abs((2 * seconds * 24 * 3600) ** 0.5 / 60 / minutes - 1) < 0.1
    assert 0 < lost < 5
