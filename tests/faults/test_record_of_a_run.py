"""The record of runs that were killed or hung, or of which another rank failed; and of what goes on
from them.
"""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.launching import Run, torchrun, wait_until

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import ddpkit

hparams_file, run_opts, overrides = ddpkit.parse_arguments()
ddpkit.ddp_init_group(run_opts)
hparams = ddpkit.load_hparams(hparams_file, overrides)
ddpkit.create_experiment_directory("out", hparams_file, overrides)

class Line(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        fault, rank = hparams["fault"], int(os.environ["RANK"])
        if fault != 'none' and self.progress.epoch == 2 and self.step == 3:
            if fault == "wait" and not rank:
                Path("waits.new").write_text(str(os.getpid()))
                Path("waits.new").rename("waits")
            if fault == "wait" or (fault == "hang" and rank):
                time.sleep(1000)
            if fault == "raise" and rank:
                raise ValueError("boom on rank 1")
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.square().mean()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is ddpkit.Stage.TRAIN:
            self.checkpointer.save_and_keep_only()

net, counter = torch.nn.Linear(1, 1), hparams["counter"]
checkpointer = ddpkit.checkpoints.Checkpointer("out/save", {"net": net, "counter": counter})
brain = Line({"net": net}, lambda p: torch.optim.SGD(p, lr=0.1), hparams, run_opts, checkpointer)
brain.fit(counter, [torch.ones(1) for _ in range(16)], train_loader_kwargs={"batch_size": 2})
"""

YAML = "fault: none\ncounter: !new:ddpkit.epoch_loop.EpochCounter\n  limit: 2\n"


@pytest.fixture
def start(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hparams.yaml").write_text(YAML)

    def begin(fault, *words):
        command = [*torchrun(2, "train.py"), "hparams.yaml", f"--fault={fault}", "--noprogressbar"]
        return Run([*command, "--device=cpu", *words], tmp_path, name=fault, warm=True)

    return begin


def events_of(folder, *kinds):
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event for event in events if event["event"] in kinds]


def goes_on(start, folder):
    done = start("none").wait()
    assert done.code == 0, done.err
    again = events_of(folder, "start")[-1]
    (saved, *_) = events_of(folder, "checkpoint")
    begun = events_of(folder, "fit")[-1]["resumed_from"]
    assert begun["checkpoint"] == saved["path"]
    assert (begun["epoch"], begun["optimizer_step"]) == (2, 4)
    assert events_of(folder, "fit_end")[-1]["optimizer_step"] == 8
    return again


@pytest.mark.slow
def test_a_run_that_was_killed_and_goes_on(start, tmp_path):
    first = start("wait")
    assert wait_until(lambda: (tmp_path / "waits").exists() or not first.alive(), 60)
    assert (tmp_path / "waits").exists(), first.err
    # The files of a checkpoint and its event are written in a thread, beside the steps.
    assert wait_until(lambda: events_of(tmp_path, "checkpoint"), 60)
    for pid in first.alive():
        os.kill(pid, signal.SIGKILL)
    first.wait()
    assert events_of(tmp_path, "exception", "stopped", "fit_end") == []
    again = goes_on(start, tmp_path)
    assert again["reason"] == "killed, or ended without a word"
    assert again["last_event_time"] <= again["process_start"] + 1.0


@pytest.mark.slow
def test_a_failure_of_another_rank_is_in_the_record_with_its_place(start, tmp_path):
    assert start("raise").wait().code != 0
    (failure,) = events_of(tmp_path, "exception")
    assert failure["type"] == "RankFailedError"
    assert "rank 1 " in failure["message"]
    assert "boom on rank 1" in failure["message"]
    assert (failure["stage"], failure["epoch"], failure["step"]) == ("TRAIN", 2, 3)
    assert "boom on rank 1" in goes_on(start, tmp_path)["reason"]


@pytest.mark.slow
def test_a_hang_is_in_the_record(start, tmp_path):
    assert start("hang", "--hang_warning=4", "--hang_timeout=8").wait().code != 0
    (failure, *_) = events_of(tmp_path, "exception")
    assert "has made no step" in failure["message"] or "hang_timeout" in failure["message"]
    assert (failure["stage"], failure["epoch"], failure["step"]) == ("TRAIN", 2, 3)
