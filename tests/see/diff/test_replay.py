"""``diff --replay``: both runs make the steps again in which they part."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ddpkit
from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError, RunStopped
from ddpkit.launch import SLICE
from ddpkit.see import run_diff
from ddpkit.see.diff import replay
from ddpkit.see.diff.hashed_run import FIELDS, HashedRun
from ddpkit.see.diff.recorded_start import recorded_start
from ddpkit.train_logger import run_event, set_run_log
from ddpkit.types import Stage
from tests.contract.test_predict import handlers_kept
from tests.recipes import QUIET

SAMPLES = 12
BATCH = 2
EVERY = 4
STEPS = 12  # two epochs


class Recipe(Brain):
    """Saves after each epoch; the loss of one step may be another, always or in the first run."""

    other_at = 0

    def compute_forward(self, batch, stage):
        hidden = torch.nn.functional.dropout(batch[0], 0.2, training=stage is Stage.TRAIN)
        return self.modules.net(hidden)

    def compute_objectives(self, predictions, batch, stage):
        loss = (predictions - batch[1]).square().mean()
        return loss * 1.5 if self.optimizer_step + 1 == self.other_at else loss

    def on_stage_end(self, stage, loss, epoch=None):
        if stage is Stage.TRAIN:
            self.checkpointer.save_checkpoint(name=f"{epoch}")


def points():
    drawn = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 4, generator=drawn)
    return list(zip(inputs, torch.randn(SAMPLES, 1, generator=drawn), strict=True))


def train(folder, other_at=0, **options):
    """Train as a script does that begins or goes on."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPKIT_GLOBAL_SEED", "")  # so that the variable is put back afterwards
        return _train(folder, other_at, options)


def _train(folder, other_at, options):
    ddpkit.seed_everything(5)
    torch.manual_seed(5)
    set_run_log(folder / "metrics.jsonl")
    run_event(
        "start",
        command=["train.py", str(other_at)],
        directory=str(folder.parent),
        world_size=1,
    )
    net = torch.nn.Linear(4, 1)
    counter = EpochCounter(2)
    brain = type("Planted", (Recipe,), {"other_at": other_at})(
        {"net": net},
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        run_opts={**QUIET, "hash_every": EVERY, **options},
        checkpointer=Checkpointer(folder / "save", {"net": net, "counter": counter}),
    )
    try:
        brain.fit(counter, points(), train_loader_kwargs={"batch_size": BATCH})
    finally:
        set_run_log(None)
    return folder


def contents(folder):
    """The bytes of all files of a folder."""
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, and one whose tenth step has another loss: its records are of steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "train.py").touch()
    return train(folder / "a"), train(folder / "b", other_at=10)


@pytest.fixture
def in_this_process(monkeypatch):
    """Have a replay's recipe run in this process; its arguments may be changed."""
    changed = {}

    def run_plan(command, cell, plan, tell):
        assert cell.processes == 1
        (other_at,) = command.words[1:]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SLICE, plan.text())
            # what the recipe writes stays out of the user's folder; the plan's log is the replay's
            with handlers_kept(), pytest.raises(RunStopped) as ended:
                train(Path(plan.scratch, "recipe"), changed.get(other_at, int(other_at)))
        assert ended.value.code == 0
        return json.loads(Path(plan.result).read_text())

    monkeypatch.setattr(replay, "run_plan", run_plan)
    return changed


def told(one, other, **kinds):
    lines = []
    said = []
    status = run_diff([str(one), str(other)], lines.append, tell=said.append, **kinds)
    return "\n".join(lines), said, status


@pytest.mark.costly
def test_the_exact_step_is_named_from_the_nearest_checkpoints(runs, in_this_process):
    before = [contents(run) for run in runs]
    text, said, status = told(*runs)
    assert status == 1
    assert "The runs differ at optimizer step 12; step 8 is equal." in text
    saved = runs[0] / "save" / "CKPT+1"
    assert f"A: steps 7 to 12, from {saved} (step 6): as recorded" in text
    assert "The runs differ at optimizer step 10; step 9 is equal." in text
    assert "First in it: loss." in text
    assert "the difference comes again." in text
    assert said[0] == f"a: makes steps 7 to 12 again, from {saved} (step 6)"
    assert [contents(run) for run in runs] == before


def test_a_difference_that_does_not_come_again_is_told_with_its_run(runs, in_this_process):
    in_this_process["10"] = 0
    text, _, status = told(*runs)
    assert status == 1
    assert "Now both are equal, up to step 12: the difference has not come again." in text
    assert "B: steps 7 to 12, from " in text
    assert "step 12 is other than recorded (loss, gradients, states, weights)" in text
    assert "B has not done again what it had recorded, and A has." in text


def test_without_checkpoints_a_run_begins_at_its_beginning(runs, in_this_process, tmp_path):
    other = tmp_path / "b"
    shutil.copytree(runs[1], other)
    shutil.rmtree(other / "save")
    log = other / "metrics.jsonl"
    log.write_text(log.read_text().replace(str(runs[1] / "save"), str(tmp_path / "gone")))
    text, _, _ = told(runs[0], other, as_json=True)
    found = json.loads(text)
    assert (found["step"], found["replay"]["comparison"]["step"]) == (12, 10)
    assert [run["after"] for run in found["replay"]["runs"]] == [6, 0]
    assert found["replay"]["runs"][1]["compared_steps"] == [4, 8, 12]
    assert found["replay"]["runs"][1]["other_than_recorded"] == {}


def test_a_damaged_checkpoint_is_passed_over(runs, in_this_process, tmp_path):
    other = tmp_path / "b"
    shutil.copytree(runs[1], other)
    log = other / "metrics.jsonl"
    log.write_text(log.read_text().replace(str(runs[1]), str(other)))
    weights = other / "save" / "CKPT+1" / "net.ckpt"
    weights.write_bytes(weights.read_bytes()[:-1])
    text, _, _ = told(runs[0], other)
    assert "B: steps 1 to 12, from the beginning: as recorded" in text


def test_equal_runs_are_not_run_again(runs, in_this_process):
    text, said, status = told(runs[0], runs[0])
    assert (status, said) == (0, ["No step differs, so there is nothing to make again."])
    assert "again" not in text


def started(folder=Path("/"), **start):
    """The event of a start."""
    return {"event": "start", "world_size": 1, "directory": str(folder), **start}


def hashed(step, threads=3):
    """The record of a step."""
    record = {"event": "hash", "step": step, "previous": "", "chain": ""}
    return {**record, **dict.fromkeys(FIELDS, ""), "labels": {"threads": threads}}


def run_of(*events):
    """A run with these events."""
    run = HashedRun("1234")
    for event in events:
        run.add(event)
    return run


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({}, "its record does not say how it was started"),
        ({"command": ["-c", "run()"]}, "it was started by `python -c run()`, a notebook or a"),
        ({"command": ["-u", "-m", "ipykernel_launcher", "-f", "x"]}, "a notebook or a program"),
        ({"command": ["no/train.py", "x"]}, "/no/train.py is not on this machine. The run was"),
        (
            {
                "command": ["-m", "mine"],
                "directory": "/no/such",
                "environment": {"host": "node7"},
            },
            "/no/such is not on this machine. The run was started on node7, in /no/such, by",
        ),
    ],
)
def test_what_cannot_be_started_again_is_told_with_the_way_by_hand(start, message):
    with pytest.raises(ConfigError) as told:
        recorded_start(run_of(started(**start), hashed(4)), 0, 4)
    assert message in str(told.value)
    assert "Start the recipe by hand in a copy of the run's folder" in str(told.value)


def test_a_run_is_started_with_its_command_threads_and_options(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "hparams.yaml").touch()
    yaml = {"path": str(tmp_path / "hparams.yaml"), "sha256": "0" * 64}
    words = ["-u", "-X", "dev", "train.py", "--nproc", "2", "--lr=1", "--nproc=2"]
    limit = {"optimizer_step_limit": 50}
    run = run_of(
        started(tmp_path, command=words, yaml=yaml),
        {"event": "fit", "world_size": 2, "ranks": [{"device": "cpu"}], "options": limit},
        hashed(4),
    )
    found = recorded_start(run, 0, 4)
    assert found.command.words == ("-u", "-X", "dev", "train.py", "--lr=1")
    assert found.command.directory == str(tmp_path)
    assert found.command.variables == {"OMP_NUM_THREADS": "3"}
    assert (found.processes, found.options) == (2, {**limit, "debug": False})
    assert found.notes == [f"{yaml['path']} is not as it was when the run was started"]


def test_steps_are_made_again_as_the_start_was_that_has_made_them(tmp_path):
    (tmp_path / "train.py").touch()
    events = []
    for step, rate in ((0, 1), (4, 2), (8, 3)):
        events += [
            started(tmp_path, command=["train.py", f"--lr={rate}"]),
            {"event": "fit", "world_size": rate, "optimizer_step": step},
            hashed(step + 4, threads=rate),
        ]
    run = run_of(*events)
    for after, last, rate in ((0, 3, 1), (4, 8, 2), (9, 11, 3)):
        found = recorded_start(run, after, last)
        assert found.command.words == ("train.py", f"--lr={rate}")
        assert (found.processes, found.notes) == (rate, [])
        assert found.command.variables == {"OMP_NUM_THREADS": str(rate)}
    (note,) = recorded_start(run, 2, 6).notes
    assert note.startswith("steps up to 4 were made by an earlier start with another command")


def test_a_run_that_went_on_from_a_checkpoint_that_is_gone_cannot_begin_again(tmp_path):
    before = {"checkpoint": str(tmp_path / "CKPT+gone"), "optimizer_step": 3}
    run = run_of(started(tmp_path), {"event": "fit", "resumed_from": before})
    with pytest.raises(ConfigError, match="no checkpoint from before step 5 is there any more"):
        replay._source(run, 4)


SCRIPT = """
import sys
import torch
import ddpkit
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter


class Recipe(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        loss = (predictions - batch[1]).square().mean()
        return loss * 1.5 if self.optimizer_step + 1 == self.hparams.other_at else loss

    def on_stage_end(self, stage, loss, epoch=None):
        if stage is ddpkit.Stage.VALID:
            self.checkpointer.save_and_keep_only(meta={"loss": loss})


file, run_opts, overrides = ddpkit.parse_arguments(sys.argv[1:])
ddpkit.ddp_init_group(run_opts)
hparams = ddpkit.load_hparams(file, overrides)
ddpkit.seed_everything(hparams["seed"])
ddpkit.create_experiment_directory(hparams["output_folder"], file, overrides)
torch.manual_seed(1)
data = [(torch.randn(4), torch.randn(1)) for _ in range(24)]
first, second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
net = torch.nn.Sequential(first, torch.nn.Dropout(0.2), second)
counter = EpochCounter(4)
brain = Recipe(
    {"net": net},
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    hparams=hparams,
    run_opts=run_opts,
    checkpointer=Checkpointer(
        hparams["output_folder"] + "/save", {"net": net, "counter": counter}
    ),
)
loader = {"batch_size": 4, "shuffle": True}
brain.fit(counter, data, data[:4], train_loader_kwargs=loader)
raise SystemExit("the end of the script is not reached in a replay")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_recipes_are_started_again_by_their_recorded_commands(tmp_path, ranks):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hparams.yaml").write_text("seed: 3\noutput_folder: results/1\nother_at: 0\n")
    last = random.Random(ranks).randint(13, 19)

    def start(*words):
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    for name, other_at in (("a", 0), ("b", last)):
        ended = start(
            "train.py",
            "hparams.yaml",
            f"--output_folder=results/{name}",
            f"--other_at={other_at}",
            "--hash_every=10",
            "--global_batch_size=4",
            f"--nproc={ranks}",
            "--device=cpu",
        )
        assert "the end of the script" in ended.stdout + ended.stderr
    before = contents(tmp_path / "results")
    found = start("-m", "ddpkit", "diff", "results/a", "results/b", "--replay")
    assert found.returncode == 1, found.stderr
    assert "The runs differ at optimizer step 20; step 10 is equal." in found.stdout
    assert f"The runs differ at optimizer step {last}; step {last - 1} is equal." in found.stdout
    assert "the difference comes again." in found.stdout
    assert contents(tmp_path / "results") == before
