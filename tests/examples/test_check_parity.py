"""``--check_parity`` as a recipe's author types it: examples/digits, as it is and with a slip."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from tests.launching import Run, python, torchrun

# Looked for and not imported: importing it takes seconds, in a process that only starts others.
if importlib.util.find_spec("sklearn") is None:
    pytest.skip(
        "the digits come with scikit-learn: pip install scikit-learn",
        allow_module_level=True,
    )

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
COMMAND = ("train.py", "hparams.yaml")


@pytest.fixture
def digits(tmp_path):
    for name in COMMAND:
        shutil.copy(EXAMPLE / name, tmp_path)
    return tmp_path


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.exhaustive
def test_the_digits_hold_on_four_ranks(digits):
    run = Run(python(*COMMAND, "--check_parity", "4"), digits, warm=True).wait(180)
    assert run.code == 0, run.tail()
    assert (
        "Parity holds: 4 processes and one with the joined batch have the same gradients."
        in run.err
    )
    for name in ("net.0.weight", "net.1.weight", "net.5.bias", "net.8.weight"):
        assert re.search(rf"^  {re.escape(name)} .* equal$", run.err, re.MULTILINE), run.err
    assert "optimizer steps 1, 2, 30 of 30 in an epoch, 48 samples in the first" in run.err
    assert not run.out, "a parity check has no test accuracy"
    results = digits / "results" / "digits" / "1234"
    assert not list((results / "save").iterdir())
    assert not (results / "train_log.txt").exists()


def test_a_slip_ends_with_the_cause_and_an_exit_code(digits):
    change(
        digits / "train.py",
        "F.cross_entropy(predictions, labels)",
        'F.cross_entropy(predictions, labels, reduction="sum")',
    )
    run = Run(python(*COMMAND, "--check_parity=3"), digits, warm=True).wait(180)
    assert run.code == 1
    assert "ParityError: Parity does not hold: 3 processes and one" in run.err
    assert "The loss is not a mean over the samples of a batch" in run.err
    assert re.search(r"^  net\.8\.weight .* differs$", run.err, re.MULTILINE), run.err
    assert not run.out


def test_dropout_is_no_error(digits):
    old = "  - !new:torch.nn.Flatten\n"
    change(digits / "hparams.yaml", old, old + "  - !new:torch.nn.Dropout [0.3]\n")
    run = Run(python(*COMMAND, "--check_parity=2", "--precision=bf16"), digits, warm=True).wait(180)
    assert run.code == 0, run.tail()
    assert "Parity holds: 2 processes" in run.err


def test_several_processes_are_told_to_be_one(digits):
    run = Run(torchrun(2, *COMMAND, "--check_parity=4"), digits, warm=True).wait(180)
    assert run.code == 1
    assert (
        "check_parity=4 starts the processes itself, and a launcher has started 2. Start one:"
        in run.err
    )
    assert "python train.py hparams.yaml --check_parity=4" in run.err
