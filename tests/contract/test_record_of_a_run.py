"""``metrics.jsonl``: what a run was started with, how it went on, what it saved and deleted, and
why it ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import NonFiniteLossError, RunStopped
from ddpkit.experiment import close_experiment, create_experiment_directory
from ddpkit.run_opts import parse_arguments
from ddpkit.train_logger import FileTrainLogger, run_event, set_run_log
from ddpkit.types import Stage
from tests.recipes import Poisoned, Regression, make, points

from .test_predict import handlers_kept

DATA = points(8)
VALID = points(4, seed=6)


class Saving(Regression):
    """Saves after every epoch, and keeps the best by its loss."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage is Stage.VALID:
            self.checkpointer.save_and_keep_only(
                meta={"loss": float(epoch), "name": "text"},
                min_keys=["loss"],
                keep_recent=True,
            )


@pytest.fixture(autouse=True)
def _close(monkeypatch):
    # A test before has perhaps called the hook, too.
    monkeypatch.setattr("ddpkit.base.failure_report.PROCESS.failed", None)
    yield
    close_experiment()


def begin(folder, *arguments, **options):
    close_experiment()
    create_experiment_directory(folder, *arguments, **{"save_env_desc": False, **options})


def events_of(folder, *kinds):
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event for event in events if not kinds or event["event"] in kinds]


def fit(brain, epochs=1, **kwargs):
    return brain.fit(
        range(1, epochs + 1),
        DATA,
        VALID,
        train_loader_kwargs={"batch_size": 2, **kwargs},
    )


# ------------------------------------------------------------------------------------ a whole run


def test_a_run_is_recorded_from_its_start_to_its_end(tmp_path):
    begin(tmp_path / "out")
    brain = make(Saving, folder=tmp_path / "save", grad_accumulation_factor=2, ckpt_async=False)
    fit(brain, epochs=2)
    start, first, *_, last = events_of(tmp_path / "out")
    kinds = [event["event"] for event in events_of(tmp_path / "out")]
    once = [kind for kind in kinds if kind not in {"speed", "verdict"}]
    assert once == ["start", "fit", *["stage", "stage", "checkpoint"] * 2, "fit_end"]
    assert start["pid"] == os.getpid()
    assert start["process_start"] <= start["time"] <= first["time"] <= last["time"] <= time.time()
    assert "reason" not in start
    assert first["call"] == 1
    assert (first["epochs"], first["steps_per_epoch"], first["total_steps"]) == (2, 2, 4)
    assert (first["samples_per_step"], first["grad_accumulation_factor"]) == (4, 2)
    given = {
        "noprogressbar": True,
        "device": "cpu",
        "grad_accumulation_factor": 2,
        "ckpt_async": False,
    }
    assert first["options"] == given
    assert [rank["device"].split()[0] for rank in first["ranks"]] == ["cpu"]
    assert first["parameters"] == {"all": 4, "trained": 4}
    assert first["resumed_from"] is None
    assert (last["event"], last["reason"], last["epochs"], last["optimizer_step"]) == (
        "fit_end",
        "epochs",
        2,
        4,
    )
    assert last["train_loss"] == brain.losses[-2][2]
    assert 0 < last["seconds"] < 60


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(make(Saving, folder=tmp_path / "save"))
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


def test_what_the_start_says_of_options_yaml_and_environment(tmp_path, monkeypatch):
    yaml = tmp_path / "hparams.yaml"
    yaml.write_text("max_grad_norm: 1.0\nlr: 0.1\n")
    words = ["train.py", str(yaml), "--precision=bf16", "--lr=0.2"]
    monkeypatch.setattr(sys, "argv", words)
    _, _, overrides = parse_arguments()
    begin(tmp_path / "out", yaml, overrides)
    start = events_of(tmp_path / "out")[0]
    assert start["options"] == {"max_grad_norm": 1.0, "precision": "bf16"}
    assert start["yaml"] == {
        "path": str(yaml),
        "sha256": hashlib.sha256(yaml.read_bytes()).hexdigest(),
    }
    assert start["overrides"] == {"lr": "0.2"}
    script = start["script"]
    assert script["sha256"] == hashlib.sha256(Path(script["path"]).read_bytes()).hexdigest()
    environment = start["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["python"] == sys.version.split()[0]
    assert environment["host"] == os.uname().nodename
    assert environment["launcher"] == "none"
    assert set(environment) == {
        "host", "python", "torch", "cuda", "numpy", "ddpkit", "platform", "cpus", "launcher",
        "restart_count", "git",
    }  # fmt: skip


def test_the_commit_of_the_recipe_and_whether_its_files_have_changed(tmp_path):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    def state():
        text = "create_experiment_directory(folder, save_env_desc=False)"
        code = compile(text, str(tmp_path / "train.py"), "exec")
        close_experiment()
        names = {
            "create_experiment_directory": create_experiment_directory,
            "folder": tmp_path / "out",
        }
        exec(code, names)
        return events_of(tmp_path / "out", "start")[-1]["environment"]["git"]

    (tmp_path / "train.py").write_text("print(1)\n")
    assert state() is None
    git("init", "-q")
    git("add", "train.py")
    git("commit", "-qm", "first")
    clean = state()
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "train.py").write_text("print(2)\n")
    assert state() == {"commit": clean["commit"], "dirty": True}


# ------------------------------------------------------------------------------------ goes on


ENDS = {
    "stopped": ([("fit", {}), ("stopped", {"reason": "SIGTERM"})], "stopped by SIGTERM"),
    "exception": (
        [("fit", {}), ("exception", {"type": "ValueError", "message": "bad\nmore"})],
        "ValueError: bad",
    ),
    "finished": ([("fit", {}), ("fit_end", {}), ("stage", {"stage": "TEST"})], "finished"),
    "killed": ([("fit", {}), ("checkpoint", {}), ("stage", {})], "killed, or ended without a word"),
    "killed in a step": ([("speed", {"note": "x" * 70_000})], "killed, or ended without a word"),
    "before fit": ([("start", {})], "ended outside of fit"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_start_says_how_the_one_before_has_ended(tmp_path, end):
    events, reason = ENDS[end]
    set_run_log(tmp_path / "out" / "metrics.jsonl")
    for kind, fields in events:
        run_event(kind, **fields)
    latest = events_of(tmp_path / "out")[-1]["time"]
    begin(tmp_path / "out")
    start = events_of(tmp_path / "out")[-1]
    assert (start["reason"], start["last_event_time"]) == (reason, latest)


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path):
    set_run_log(tmp_path / "out" / "metrics.jsonl")
    run_event("stopped", reason="SIGTERM")
    with (tmp_path / "out" / "metrics.jsonl").open("a") as log:
        log.write('{"event": "spe')
    begin(tmp_path / "out")
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert lines[1] == '{"event": "spe'
    assert json.loads(lines[2])["reason"] == "stopped by SIGTERM"


def test_a_run_that_begins_anew_or_only_tests_has_no_start_before(tmp_path, monkeypatch):
    yaml = tmp_path / "hparams.yaml"
    yaml.write_text("lr: 0.1\n")
    for words in ([], ["--test_only"], ["--resume=never"]):
        monkeypatch.setattr(sys, "argv", ["train.py", str(yaml), *words])
        parse_arguments()
        begin(tmp_path / "out")
    (tested,) = [
        json.loads(line)
        for line in (tmp_path / "out" / "metrics.test_only.jsonl").read_text().splitlines()
    ]
    assert "reason" not in tested
    (started,) = events_of(tmp_path / "out")
    assert "reason" not in started


def test_what_a_run_goes_on_from(tmp_path):
    for epochs in (1, 2):
        begin(tmp_path / "out")
        counter = EpochCounter(epochs)
        brain = make(Saving, folder=tmp_path / "save", recoverables={"counter": counter})
        brain.fit(counter, DATA, VALID, train_loader_kwargs={"batch_size": 2})
    saved, _ = events_of(tmp_path / "out", "checkpoint")
    fits = events_of(tmp_path / "out", "fit")
    assert [event["optimizer_step"] for event in fits] == [0, 4]
    resumed = fits[1]["resumed_from"]
    assert resumed == {"checkpoint": saved["path"], "epoch": 2, "step": 0, "optimizer_step": 4}
    assert events_of(tmp_path / "out", "start")[1]["reason"] == "finished"


def test_an_exception_says_where_the_run_was(tmp_path):
    class Failing(Regression):
        def compute_objectives(self, predictions, batch, stage):
            if self.optimizer_step == 5:
                raise ValueError("boom")
            return super().compute_objectives(predictions, batch, stage)

    begin(tmp_path / "out")
    with pytest.raises(ValueError, match="boom") as caught:
        fit(make(Failing), epochs=2)
    sys.excepthook(ValueError, caught.value, None)
    event = events_of(tmp_path / "out")[-1]
    at = {
        name: event[name]
        for name in ("event", "type", "message", "stage", "epoch", "step", "optimizer_step")
    }
    assert at == {
        "event": "exception", "type": "ValueError", "message": "boom",
        "stage": "TRAIN", "epoch": 2, "step": 2, "optimizer_step": 5,
    }  # fmt: skip


def test_a_run_that_was_stopped_says_when_as_every_event_does(tmp_path):
    begin(tmp_path / "out")
    with handlers_kept(), pytest.raises(RunStopped):
        fit(
            make(Saving, folder=tmp_path / "save", time_limit="0:00:01")
        )  # pytest has run for longer
    saved, stopped = events_of(tmp_path / "out", "checkpoint", "stopped")
    assert saved["time"] <= stopped["time"] <= time.time()
    assert (stopped["reason"], stopped["epoch"], stopped["checkpoint"]) == (
        "time limit",
        1,
        saved["path"],
    )
    assert stopped["optimizer_step"] == saved["optimizer_step"] > 0


# -------------------------------------------------------------------- checkpoints and skipped steps


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_checkpoint_is_told_with_its_place_its_cost_and_what_is_kept(tmp_path, asynchronous):
    begin(tmp_path / "out")
    brain = make(Saving, folder=tmp_path / "save", ckpt_async=asynchronous)
    fit(brain, epochs=3)
    events = events_of(tmp_path / "out", "checkpoint")
    names = [Path(event["path"]).name for event in events]
    assert [(event["epoch"], event["optimizer_step"]) for event in events] == [
        (1, 4),
        (2, 8),
        (3, 12),
    ]
    assert [event["asynchronous"] for event in events] == [asynchronous] * 3
    assert [event["meta"] for event in events] == [{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}]
    assert [event["kept"] for event in events] == [[names[0]], names[:2], [names[0], names[2]]]
    assert [event["deleted"] for event in events] == [[], [], [names[1]]]
    assert [event["best"] for event in events] == [{"loss": names[0]}] * 3
    assert all(event["end_of_epoch"] and 0 < event["seconds"] < 60 for event in events)
    files = [path for path in Path(events[2]["path"]).rglob("*") if path.is_file()]
    assert events[2]["bytes"] == sum(path.stat().st_size for path in files)


def test_a_save_inside_of_an_epoch_and_a_deletion_apart_are_told(tmp_path):
    begin(tmp_path / "out")
    brain = make(folder=tmp_path / "save", ckpt_interval_steps=3)
    fit(brain)
    brain.checkpointer.save_checkpoint(name="mine")
    brain.checkpointer.delete_checkpoints(num_to_keep=1)
    brain.checkpointer.delete_checkpoints(num_to_keep=1)  # deletes nothing
    inside, own, deletion = events_of(tmp_path / "out", "checkpoint", "checkpoints_deleted")
    assert (inside["step"], inside["end_of_epoch"], inside["kept"]) == (
        3,
        False,
        [Path(inside["path"]).name],
    )
    assert (Path(own["path"]).name, own["optimizer_step"]) == ("CKPT+mine", 4)
    assert "kept" not in own
    assert (deletion["event"], deletion["kept"]) == ("checkpoints_deleted", ["CKPT+mine"])
    assert deletion["deleted"] == [Path(inside["path"]).name]


def test_a_checkpoint_that_is_lost_is_told_where_training_goes_on(tmp_path):
    begin(tmp_path / "out")
    brain = make(Saving, folder=tmp_path / "save", ckpt_errors="warn", ckpt_async=False)
    brain.on_fit_batch_end = lambda *_: brain.checkpointer.custom_save_hooks.update(
        net=lambda *_: 1 / 0
    )
    fit(brain)
    assert events_of(tmp_path / "out", "checkpoint") == []
    (lost,) = events_of(tmp_path / "out", "checkpoint_failed")
    assert "ZeroDivisionError" in lost["message"]
    assert lost["epoch"] == 1


def test_skipped_steps_are_told_together(tmp_path):
    begin(tmp_path / "out")
    brain = make(Poisoned, nonfinite_patience=3)
    brain.bad_steps = (1, 3)
    fit(brain, epochs=2)
    skipped = events_of(tmp_path / "out", "skipped_steps")
    assert {event["epoch"] for event in skipped} == {1, 2}
    assert [
        sum(event["count"] for event in skipped if event["epoch"] == epoch) for epoch in (1, 2)
    ] == [2, 2]
    assert (skipped[-1]["norm"], skipped[-1]["in_epoch"]) == ("NaN", 2)
    assert [
        event["skipped"]
        for event in events_of(tmp_path / "out", "stage")
        if event["stage"] == "TRAIN"
    ] == [2, 2]


class Unlucky(Regression):
    """No gradient is finite from the third batch on; ends at its fifth, if nothing else has ended
    it.
    """

    end = None

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        return loss * float("nan") if self.step >= 3 else loss

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.end is not None and self.step == 5:
            raise self.end


REASONS = {
    "patience": (2, None, NonFiniteLossError),
    "an error": (3, ZeroDivisionError("boom"), ZeroDivisionError),
    "Ctrl-C": (3, KeyboardInterrupt(), KeyboardInterrupt),
}


@pytest.mark.parametrize("why", REASONS)
def test_skipped_steps_are_told_whatever_ends_the_run(tmp_path, why):
    """A run of a few milliseconds: no sync has told of the steps before."""
    begin(tmp_path / "out")
    patience, end, kind = REASONS[why]
    brain = make(Unlucky, nonfinite_patience=patience)
    brain.end = end
    with pytest.raises(kind):
        fit(brain, epochs=1, batch_size=1)
    skipped = events_of(tmp_path / "out", "skipped_steps")
    assert sum(event["count"] for event in skipped) == brain.nonfinite_count == 3
    assert (skipped[-1]["epoch"], skipped[-1]["step"], skipped[-1]["in_epoch"]) == (1, 5, 3)
    assert skipped[-1]["optimizer_step"] == 2


# ------------------------------------------------------------------------ the page of the reference

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "metrics-jsonl.md"


def documented():
    """Return the fields that the page lists, by event: whether each is always there."""
    events = {}
    for heading, text in re.findall(
        r"^## `?([^`\n]+)`?\n(.*?)(?=^## |\Z)",
        PAGE.read_text(),
        re.MULTILINE | re.DOTALL,
    ):
        rows = re.findall(r"^\| `(\w+)` \| (.*) \|", text, re.MULTILINE)
        events[heading] = {name: "missing" not in words for name, words in rows}
    return events


class Everything(Saving):
    """Writes all kinds of events that one process can."""

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        self.log("value", loss, per_step=True)
        return loss * float("nan") if stage is Stage.TRAIN and self.step == 3 else loss

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        self.log("score", 1.0)
        self.hparams.train_logger.log_stats(
            {"epoch": epoch},
            **{f"{stage.name.lower()}_stats": {"loss": stage_loss}},
        )


@pytest.mark.costly
def test_the_page_lists_every_field_and_every_kind_of_event(tmp_path):
    begin(tmp_path / "out")
    logger = FileTrainLogger(tmp_path / "log.txt")
    options = {"measure_steps": "all", "count_flops": True}
    brain = make(Everything, hparams={"train_logger": logger}, folder=tmp_path / "save", **options)
    fit(brain, epochs=3)
    brain.checkpointer.delete_checkpoints(num_to_keep=1)
    sys.excepthook(ValueError, ValueError("boom"), None)
    always, *_ = page = documented()
    for event in events_of(tmp_path / "out"):
        known = {**page[always], **page[event["event"]]}
        assert event.keys() <= known.keys(), event
        assert {name for name, is_there in known.items() if is_there} <= event.keys(), event
    kinds = {event["event"] for event in events_of(tmp_path / "out")}
    assert kinds >= {
        "start",
        "fit",
        "fit_end",
        "stage",
        "step",
        "logged",
        "stats",
        "skipped_steps",
        "exception",
    }
    written = {
        kind
        for path in (ROOT / "ddpkit").rglob("*.py")
        for kind in re.findall(
            r"^ +(?:run_event|_write|self\.write)\(\s*\"(\w+)\"",
            path.read_text(),
            re.MULTILINE,
        )
    }
    assert written - {"epoch"} == set(page) - {always}
