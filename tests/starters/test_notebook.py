"""The page about notebooks, in a kernel of Jupyter's: it trains on two processes; a rank that
fails, and an interrupt, end all of them and not the kernel.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from tests.launching import Run, python
from tests.starters.test_starters import block, needs

pytestmark = pytest.mark.launch

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "how-to" / "notebooks.md"
EXAMPLE = REPOSITORY / "examples" / "notebook" / "digits.ipynb"

FAIL = """
class Fails(Rings):
    def compute_forward(self, batch, stage):
        if (self.rank, self.step) == (1, 3):
            raise ValueError("boom")
        return super().compute_forward(batch, stage)

Works, Rings = Rings, Fails
ddpkit.notebook_launch(train, 2, args=(6,))
"""

INTERRUPT = """
import os, signal, threading, time
from pathlib import Path

class Slow(Works):
    def compute_forward(self, batch, stage):
        if self.optimizer_step > 50:
            Path("begun").touch()
        return super().compute_forward(batch, stage)

def interrupt():
    while not Path("begun").exists():
        time.sleep(0.05)
    os.killpg(os.getpgid(0), signal.SIGINT)  # as Jupyter does

Rings = Slow
threading.Thread(target=interrupt).start()
ddpkit.notebook_launch(train, 2, args=(10_000,))
"""


START = """
import json, sys
import nbclient, nbformat

cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(open("cells.json"))]
book = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(book, kernel_name="python3", allow_errors=True, timeout=1200).execute()
json.dump([cell.outputs for cell in book.cells], open("outputs.json", "w"))
"""


def text_of(outputs, name):
    return "".join(one["text"] for one in outputs if one.get("name") == name)


def error_of(outputs):
    [error] = [one for one in outputs if one["output_type"] == "error"]
    return error


@needs("nbclient")
def test_the_page_in_a_kernel(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    cells = [
        block("the cell of the training", text),
        block("the cell that starts it", text) + "print(round(loss, 3))",
        FAIL,
        INTERRUPT,
        "print(len(list(Path('results/rings').glob('CKPT+*'))), 'checkpoints')",
    ]
    (tmp_path / "cells.json").write_text(json.dumps([textwrap.dedent(cell) for cell in cells]))
    (tmp_path / "start.py").write_text(START)
    run = Run(python("start.py"), tmp_path, {"CUDA_VISIBLE_DEVICES": ""}).wait(120)
    assert run.code == 0, run.err
    made, trained, failed, interrupted, after = json.loads((tmp_path / "outputs.json").read_text())
    assert not [one for one in made if one["output_type"] == "error"], made

    shown = text_of(trained, "stdout")
    assert re.findall(r"^epoch (\d): loss 0\.\d+$", shown, re.MULTILINE) == ["1", "2", "3"], trained
    assert re.search(r"^0\.\d+$", shown, re.MULTILINE), trained
    assert "launcher   notebook_launch, 2 processes" in text_of(trained, "stderr")

    assert error_of(failed)["ename"] == "RankFailedError"
    told = [line for line in text_of(failed, "stderr").splitlines() if "boom" in line]
    assert len(told) == 1, told  # what --nproc says last; the traceback is in the exception
    assert re.match(
        r"rank 1 \(.*in TRAIN of epoch 4 .*: ValueError: boom\n", error_of(failed)["evalue"]
    )

    assert error_of(interrupted)["ename"] == "KeyboardInterrupt"
    assert "SIGINT: stopping at the end of a step" in text_of(interrupted, "stderr")
    assert text_of(after, "stdout") != "0 checkpoints\n"


@pytest.mark.exhaustive
@needs("nbclient")
def test_the_notebook_of_the_examples(tmp_path):
    """Its cells run, both numbers of processes come to the same, and it shows what it printed."""
    book = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    shipped = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    cells = ["".join(cell["source"]) for cell in shipped]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    (tmp_path / "start.py").write_text(START)
    run = Run(python("start.py"), tmp_path, {"CUDA_VISIBLE_DEVICES": ""}).wait(120)
    assert run.code == 0, run.err
    outputs = json.loads((tmp_path / "outputs.json").read_text())
    assert not [one for cell in outputs for one in cell if one["output_type"] == "error"], outputs
    lines = text_of(outputs[2], "stdout").splitlines()
    pairs = [re.search(r"([0-9.]+) and ([0-9.]+)$", line).groups() for line in lines]
    assert len(pairs) == 9
    assert all(one == two for one, two in pairs)
    shown = "".join("".join(one.get("text", "")) for one in shipped[2]["outputs"]).splitlines()
    assert [line.partition(":")[0] for line in shown[:-1]] == [f"epoch {n}" for n in range(1, 9)]
    assert abs(float(shown[-1].split()[1]) - float(pairs[-1][0])) < 0.02
    assert [one for one in outputs[3] if "image/png" in one.get("data", {})]
