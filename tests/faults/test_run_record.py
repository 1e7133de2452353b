"""The record of a run (hyperparameters, environment, script, log, events) belongs to it as long as
it lives.
"""

from __future__ import annotations

import os
import signal
import socket

import pytest

from tests.launching import Run, python, torchrun, wait_until

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from hyperpyyaml import load_hyperpyyaml
import ddpkit

hparams_file, run_opts, overrides = ddpkit.parse_arguments()
ddpkit.ddp_init_group(run_opts)
with open(hparams_file) as file:
    hparams = load_hyperpyyaml(file, overrides)
ddpkit.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)
folder = Path(hparams["output_folder"])
ddpkit.run_on_main(lambda: (folder / "data.txt").write_text(f"prepared by {os.getpid()}"))

class Line(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        if ddpkit.if_main_process():
            Path(hparams["name"] + ".new").write_text(str(os.getpid()))
            Path(hparams["name"] + ".new").replace(hparams["name"] + ".trains")
        while not (Path(hparams["name"] + ".go").exists() or hparams["at_once"]):
            time.sleep(0.02)
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.square().mean()

brain = Line({"net": torch.nn.Linear(1, 1)}, lambda p: torch.optim.SGD(p, lr=0.1), hparams, run_opts)
data = [torch.ones(1) for _ in range(8)]
brain.fit(range(1, 2), data, train_loader_kwargs={"batch_size": 2})
brain.evaluate(data, test_loader_kwargs={"batch_size": 2})
"""  # noqa: E501

YAML = "output_folder: out\nname: run\nat_once: False\nlr: 0.1\n"


@pytest.fixture
def start(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hparams.yaml").write_text(YAML)
    runs = []

    def begin(name, *words, processes=0, options=()):
        command = torchrun(processes, *options, "train.py") if processes else python("train.py")
        command += ["hparams.yaml", f"--name={name}", "--noprogressbar", *words]
        runs.append(Run(command, tmp_path, name=name, warm=True))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            (tmp_path / f"{run.name}.go").touch()
            run.wait()


def is_there(path):
    return wait_until(path.exists, 60)


def record(folder):
    """Return the content of every file, less the lock."""
    files = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".run.lock"
    ]
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in files
    }


def test_a_second_start_changes_nothing_of_a_living_run_and_names_it(start, tmp_path):
    first = start("first")
    assert is_there(tmp_path / "first.trains"), first.err
    pid = int((tmp_path / "first.trains").read_text())
    before = record(tmp_path / "out")
    assert set(before) >= {
        "hyperparams.yaml",
        "env.log",
        "train.py",
        "data.txt",
        "log.txt",
        "metrics.jsonl",
    }

    (tmp_path / "train.py").write_text(SCRIPT + "# changed since\n")
    second = start("second", "--lr=0.2", "--at_once=True").wait()
    assert second.code == 1
    assert not (tmp_path / "second.trains").exists()
    last = second.tail(1)
    assert f"is in use by another run: process {pid} on {socket.gethostname()}, since 20" in last
    assert "experiment_directory='out'" in last
    assert "Traceback" not in second.err
    assert record(tmp_path / "out") == before

    os.kill(pid, signal.SIGKILL)
    first.wait()
    third = start("third", "--lr=0.2", "--at_once=True").wait()
    assert third.code == 0, third.err
    assert "lr: 0.2" in (tmp_path / "out" / "hyperparams.yaml").read_text()
    assert (tmp_path / "out" / "train.py").read_text().endswith("# changed since\n")


def test_a_second_start_of_two_ranks_is_refused_on_both(start, tmp_path):
    first = start("first", processes=2)
    assert is_there(tmp_path / "first.trains"), first.err
    before = record(tmp_path / "out")
    second = start("second", "--at_once=True", processes=2).wait()
    assert second.code == 1
    assert "is in use by another run: process " in second.err
    assert 'File "train.py"' not in second.err
    assert record(tmp_path / "out") == before


def test_a_restarted_attempt_has_the_folder_of_the_one_before(start, tmp_path):
    run = start("first", processes=2, options=("--max-restarts=1",))
    assert is_there(tmp_path / "first.trains"), run.err
    pid = (tmp_path / "first.trains").read_text()
    os.kill(int(pid), signal.SIGKILL)
    (tmp_path / "first.go").touch()
    run.wait()
    assert run.code == 0, run.err
    assert (tmp_path / "first.trains").read_text() != pid
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count('"start"') == 2


def test_an_evaluation_alone_leaves_the_record_as_it_is(start, tmp_path):
    out = tmp_path / "out"
    first = start("first")
    assert is_there(tmp_path / "first.trains"), first.err
    before = {name: content for name, content in record(out).items() if name != "data.txt"}
    beside = start("beside", "--test_only", "--at_once=True", "--lr=0.3").wait()
    assert beside.code == 0, beside.err
    after = record(out)
    assert {name: after[name] for name in before} == before
    assert "beside" in (out / "metrics.test_only.jsonl").read_text()
    assert "Experiment folder" in (out / "log.test_only.txt").read_text()

    (tmp_path / "first.go").touch()
    assert first.wait().code == 0, first.err
    kept = {name: record(out)[name] for name in ("hyperparams.yaml", "env.log", "train.py")}
    afterwards = start("afterwards", "--test_only", "--at_once=True", "--lr=0.3").wait()
    assert afterwards.code == 0, afterwards.err
    assert {name: record(out)[name] for name in kept} == kept
    assert "afterwards" in (out / "metrics.test_only.jsonl").read_text()


CHILDREN = """
import multiprocessing
import ddpkit

def rank(number):
    ddpkit.create_experiment_directory("out", save_env_desc=False)

if __name__ == "__main__":
    ddpkit.create_experiment_directory("out", save_env_desc=False)
    child = multiprocessing.get_context("fork").Process(target=rank, args=(0,))
    child.start()
    child.join()
    ddpkit.create_experiment_directory("out", save_env_desc=False)
"""


def test_a_process_that_a_script_starts_is_told_to_make_the_folder_itself(tmp_path):
    (tmp_path / "children.py").write_text(CHILDREN)
    run = Run(python("children.py"), tmp_path, warm=True).wait()
    assert run.code == 0, run.err
    assert "is in use by another run: process " in run.err
    assert (
        "Where a script starts ranks by itself, make its folder in the ranks, after ddp_init_group."
    ) in run.err
