"""The examples as a newcomer runs them: the commands of each README, what they print, and 1 process
against 2.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

from ddpkit.checkpoints import safe_load
from tests.cells import some_of
from tests.examples.pages import BLOCK, run, sessions
from tests.launching import Run, python, torchrun

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(
    path.parent.name for path in EXAMPLES.glob("*/README.md") if path.parent.name != "digits"
)
EXTRAS = {"fine_tuning": "sklearn", "tabular": "sklearn"}
COMMAND = ("train.py", "hparams.yaml")
CONTENTS = shutil.ignore_patterns("results", "__pycache__")


def copy_of(name, folder):
    if name in EXTRAS and importlib.util.find_spec(EXTRAS[name]) is None:
        pytest.skip("needs pip install scikit-learn")
    return Path(shutil.copytree(EXAMPLES / name, folder / name, ignore=CONTENTS))


def stages(results):
    """Return the stages of a run, without what depends on the clock."""
    events = map(json.loads, (results / "metrics.jsonl").read_text().splitlines())
    return [
        (one["stage"], one["epoch"], one["loss"], one["samples"])
        for one in events
        if one["event"] == "stage"
    ]


def stats(results):
    events = map(json.loads, (results / "metrics.jsonl").read_text().splitlines())
    return [
        number
        for event in events
        if event["event"] == "stats"
        for part in ("train", "valid", "test")
        for number in event.get(part, {}).values()
    ]


def newest(results):
    return max((results / "save").glob("CKPT+*"))


def tensors(path):
    """List the tensors of a checkpoint's file, in order."""

    def inside(value):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple)):
            for one in value.values() if isinstance(value, dict) else value:
                yield from inside(one)

    return list(inside(safe_load(path)))


@pytest.mark.parametrize("name", some_of(NAMES, ["gan", "own_loop", "stream", "tagging"]))
def test_an_example_does_what_its_readme_shows_and_the_same_on_two_processes(name, tmp_path):
    folder = copy_of(name, tmp_path)
    readme = (folder / "README.md").read_text(encoding="utf-8")
    commands = [one for block in BLOCK.finditer(readme) for one in sessions(block["text"])]
    for number, (words, shown) in enumerate(commands):
        run(words, shown, folder, name=f"run{number}", warm=True)
    launchers = [words[0] for words, _ in commands]
    assert {"python", "torchrun"} <= set(launchers), launchers
    one = folder / "results" / "1234"
    two = folder / "results" / "two"
    assert stats(one)
    assert stats(one) == pytest.approx(stats(two), rel=1e-3, abs=1e-6)
    epochs = [[stage for stage in stages(results) if stage[0] != "TEST"] for results in (one, two)]
    assert [(*stage[:2], stage[3]) for stage in epochs[0]] == [
        (*stage[:2], stage[3]) for stage in epochs[1]
    ]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_loop_of_ones_own_has_the_weights_of_the_brain(processes, tmp_path):
    """And goes on after the end of an epoch, on another number of processes as on its own."""
    folder = copy_of("own_loop", tmp_path)
    launcher = python() if processes == 1 else torchrun(processes)

    def start(script, output_folder, *words):
        command = [*launcher, script, "hparams.yaml", f"--output_folder={output_folder}", *words]
        ended = Run(command, folder, name=Path(output_folder).name, warm=True).wait()
        assert ended.code == 0, ended.tail()
        return newest(folder / output_folder)

    brain = start("with_brain.py", "brain", "--number_of_epochs=4")
    own = start("train.py", "own", "--number_of_epochs=2")
    assert tensors(own / "optimizer.ckpt")[0] == 2 * 32  # steps
    own = start("train.py", "own", "--number_of_epochs=4")
    for name in ("net", "optimizer"):
        pairs = list(
            zip(tensors(brain / f"{name}.ckpt"), tensors(own / f"{name}.ckpt"), strict=True)
        )
        assert pairs
        assert all(one.equal(other) for one, other in pairs), name


def test_the_loop_of_ones_own_with_more_processes_than_samples_in_a_batch(tmp_path):
    """The last batch has two samples: the third process repeats one to keep step, which counts
    nothing.
    """
    folder = copy_of("own_loop", tmp_path)
    script = folder / "train.py"
    script.write_text(script.read_text().replace("spirals(1000, seed=1)", "spirals(98, seed=1)"))
    for processes, results in ((1, "one"), (3, "three")):
        launcher = python() if processes == 1 else torchrun(processes)
        words = (f"--output_folder={results}", "--number_of_epochs=1")
        ended = Run([*launcher, *COMMAND, *words], folder, name=results, warm=True).wait()
        assert ended.code == 0, ended.tail()
    assert stats(folder / "one") == pytest.approx(stats(folder / "three"), rel=1e-4)


@pytest.mark.parametrize(
    "name",
    some_of(["gan", "language_model", "own_loop", "stream", "tagging"], ["gan", "own_loop"]),
)
def test_a_second_start_has_nothing_to_train(name, tmp_path):
    folder = copy_of(name, tmp_path)
    for number in (1, 2):
        words = (*COMMAND, "--number_of_epochs=1")
        ended = Run(python(*words), folder, name=f"run{number}", warm=True).wait()
        assert ended.code == 0, ended.tail()
    assert "nothing is left to train" in ended.err
    trained = [stage for stage in stages(folder / "results" / "1234") if stage[0] == "TRAIN"]
    assert len(trained) <= 1


def test_bf16_trains_the_language_model(tmp_path):
    folder = copy_of("language_model", tmp_path)
    for precision in ("fp32", "bf16"):
        words = (f"--precision={precision}", f"--output_folder={precision}", "--number_of_epochs=3")
        ended = Run(python(*COMMAND, *words), folder, name=precision, warm=True).wait()
        assert ended.code == 0, ended.tail()
        assert f"precision  {precision}" in ended.err
    full = stats(folder / "fp32")
    half = stats(folder / "bf16")
    assert half != full
    assert half == pytest.approx(full, rel=0.05)


def test_the_language_model_writes_the_same_where_its_weights_are_divided(tmp_path):
    folder = copy_of("language_model", tmp_path)
    written = {}
    for strategy in ("fsdp", "zero1"):
        words = (
            *COMMAND,
            f"--strategy={strategy}",
            f"--output_folder={strategy}",
            "--number_of_epochs=1",
        )
        ended = Run([*torchrun(2), *words], folder, name=strategy, warm=True).wait()
        assert ended.code == 0, ended.tail()
        written[strategy] = ended.out
    assert "The sea" in written["fsdp"]
    assert written["fsdp"] == written["zero1"]


def test_parity_of_the_transformer_under_zero1(tmp_path):
    folder = copy_of("transformer", tmp_path)
    words = (*COMMAND, "--check_parity=2", "--strategy=zero1", "--num_train=256")
    ended = Run(python(*words), folder, warm=True).wait(180)
    assert ended.code == 0, ended.tail()
    assert "Parity holds: 2 processes" in ended.err
