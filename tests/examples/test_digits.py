"""examples/digits as a newcomer runs it: one process and two, once more, and with a slip of the
finger.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.examples.pages import BLOCK, compare, sessions
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
CLOSING = re.compile(
    r"test accuracy (?P<percent>[\d.]+) % \((?P<right>\d+) of 180\), (?P<processes>\d+ "
    r"process(es)?), \d+ s; run directory (?P<folder>\S+)\n"
)
TROUBLE = re.compile(
    r"Warning|WARNING|Error|ERROR|Traceback|[Aa]bort|terminate|^[WEF]\d{4} ",
    re.MULTILINE,
)


def copy_of_the_example(folder):
    for name in COMMAND:
        shutil.copy(EXAMPLE / name, folder)
    return folder


def closing_line(run):
    """The run ended well, and said one thing only on stdout."""
    assert run.code == 0, run.tail()
    found = CLOSING.fullmatch(run.out)
    assert found, run.out
    assert not TROUBLE.search(run.err), run.err
    return found


def events(results, kind):
    lines = (results / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The main job: two processes, nothing but the command of `make demo`, which starts it cold."""
    folder = copy_of_the_example(tmp_path_factory.mktemp("digits"))
    return Run(torchrun(2, *COMMAND), folder, warm=True).wait(110)


def test_it_learns_the_digits_on_two_processes(trained):
    closing = closing_line(trained)
    assert float(closing["percent"]) >= 98.0
    assert float(closing["percent"]) == pytest.approx(int(closing["right"]) / 1.8, abs=0.05)
    assert closing["processes"] == "2 processes"
    assert closing["folder"] == "results/digits/1234"


def test_the_readme_shows_what_is_printed(trained):
    """There the command stands in the Makefile; the rest of the page is tried in test_pages.py."""
    readme = (EXAMPLE.parents[1] / "README.md").read_text(encoding="utf-8")
    [shown] = [
        lines
        for block in BLOCK.finditer(readme)
        for words, lines in sessions(block["text"])
        if words == ["make", "demo"]
    ]
    compare(shown, trained)


def test_it_leaves_the_run_directory(trained):
    results = trained.folder / "results" / "digits" / "1234"
    files = {path.name for path in results.iterdir()}
    assert files == {
        ".run.lock", "digits.pt", "env.log", "hyperparams.yaml", "log.txt", "metrics.jsonl", "save",
        "train.py",
        "train_log.txt",
    }  # fmt: skip
    assert (results / "train.py").read_text() == (EXAMPLE / "train.py").read_text()
    assert "seed: 1234" in (results / "hyperparams.yaml").read_text()
    # ten epochs and the test
    assert len((results / "train_log.txt").read_text().splitlines()) == 11
    train = [event for event in events(results, "stage") if event["stage"] == "TRAIN"]
    assert [event["samples"] for event in train] == [1437] * 10  # every digit once per epoch
    assert train[-1]["optimizer_step"] == 300
    kept = sorted((results / "save").glob("CKPT+*"))
    assert 1 <= len(kept) <= 2  # the newest and the best, which may be the same
    assert {"net.ckpt", "optimizer.ckpt", "epoch_counter.ckpt", "brain.ckpt"} <= {
        p.name for p in kept[0].iterdir()
    }


def test_the_checkpoint_with_the_smallest_error_is_tested(trained):
    results = trained.folder / "results" / "digits" / "1234"
    *epochs, test = events(results, "stats")
    best = min(epoch["valid"]["error"] for epoch in epochs)
    tested = next(epoch for epoch in epochs if epoch["meta"]["epoch"] == test["meta"]["epoch"])
    assert tested["valid"]["error"] == best


def test_a_second_start_has_nothing_left_to_train(trained):
    """And one process takes over what two have left."""
    again = Run(python(*COMMAND), trained.folder, name="again", warm=True).wait()
    closing = closing_line(again)
    assert "Epoch 10 is done already, of 10 at most: nothing is left to train." in again.err
    assert "Going into epoch" not in again.err
    assert closing["right"] == CLOSING.fullmatch(trained.out)["right"]
    assert closing["processes"] == "1 process"


def test_one_process_with_a_break_and_two_without_follow_the_same_trajectory(tmp_path):
    """In double precision, where rounding does not grow into something visible within two
    epochs.
    """
    script = copy_of_the_example(tmp_path) / "train.py"
    text = script.read_text()
    double = text.replace("dtype=torch.float32", "dtype=torch.float64").replace(
        "def main():\n",
        "def main():\n    torch.set_default_dtype(torch.float64)\n",
    )
    assert double.count("float64") == 2
    script.write_text(double)
    one = ("--seed=7", "--output_folder=one")
    two = ("--seed=7", "--output_folder=two")
    closing_line(Run(python(*COMMAND, *one, "--number_of_epochs=1"), tmp_path, warm=True).wait())
    further = Run(python(*COMMAND, *one, "--number_of_epochs=2"), tmp_path, warm=True).wait()
    closing_line(further)
    assert re.findall(r"Going into epoch (\d+)", further.err) == ["2"]
    closing_line(
        Run(torchrun(2, *COMMAND, *two, "--number_of_epochs=2"), tmp_path, warm=True).wait()
    )

    stages = events(tmp_path / "one", "stage")
    assert [stage["stage"] for stage in stages] == [
        "TRAIN",
        "VALID",
        "TEST",
        "TRAIN",
        "VALID",
        "TEST",
    ]
    del stages[2]
    same = events(tmp_path / "two", "stage")
    for stage in (*stages, *same):
        del stage["time"], stage["seconds"]
    losses = [[stage.pop("loss") for stage in run] for run in (stages, same)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert stages == same


def test_flags_of_the_contract(tmp_path):
    """Debugging trains for two batches and two epochs and leaves the real checkpoints alone."""
    copy_of_the_example(tmp_path)
    flags = (
        "--debug",
        "--precision=bf16",
        "--grad_accumulation_factor=2",
        "--max_grad_norm=1",
        "--noprogressbar",
    )
    run = Run(python(*COMMAND, *flags, "--seed", "7", "--lr=0.01"), tmp_path, warm=True).wait()
    assert closing_line(run)["folder"] == "results/digits/7"
    results = tmp_path / "results" / "digits" / "7"
    assert [event["optimizer_step"] for event in events(results, "stage")] == [1, 1, 2, 2, 2]
    assert not list((results / "save").iterdir())
    assert "lr: 0.01" in (results / "hyperparams.yaml").read_text()


def test_a_wrong_flag_ends_with_what_may_have_been_meant(tmp_path):
    copy_of_the_example(tmp_path)
    run = Run(python(*COMMAND, "--epochs=3"), tmp_path, warm=True).wait(30)
    assert run.code == 2
    assert "--epochs is neither a run option nor a key of 'hparams.yaml'" in run.tail(2)
    assert "did you mean --number_of_epochs?" in run.tail(2)
    assert not run.out


def test_a_batch_that_is_divided_unevenly(tmp_path):
    copy_of_the_example(tmp_path)
    sizes = ("--global_batch_size=45", "--micro_batch_size=10", "--number_of_epochs=1")
    run = Run(torchrun(2, *COMMAND, *sizes), tmp_path, warm=True).wait()
    closing_line(run)
    assert "  batch      2 processes x batch 7 to 8 x accumulation 3 = 45 samples" in run.err


def test_sizes_that_contradict_each_other_end_every_process_with_the_reason(tmp_path):
    copy_of_the_example(tmp_path)
    command = torchrun(2, *COMMAND, "--micro_batch_size=10", "--grad_accumulation_factor=7")
    run = Run(command, tmp_path, warm=True).wait(30)
    assert run.code == 1
    assert (
        "grad_accumulation_factor=7 contradicts global_batch_size=48 with micro_batch_size=10"
        in run.tail(3)
    )
    assert not run.out


def test_without_scikit_learn_the_extra_is_named(tmp_path):
    copy_of_the_example(tmp_path)
    (tmp_path / "sklearn.py").write_text("raise ImportError('as if it were not installed')")
    run = Run(python(*COMMAND), tmp_path, warm=True).wait()
    assert run.code == 2
    assert "pip install scikit-learn" in run.tail(1)
