"""The event about skipped steps where a run ends: it hides no reason, and waits for no GPU."""

from __future__ import annotations

import json

import pytest
import torch

from ddpkit.base import POSITION, PROCESS
from ddpkit.errors import ConfigError, NonFiniteLossError
from ddpkit.experiment import close_experiment, create_experiment_directory
from ddpkit.optim import PendingStep
from ddpkit.run import skipped_steps
from ddpkit.run.skipped_steps import SkippedSteps
from ddpkit.training import Progress


def test_what_ends_a_run_is_not_hidden_by_a_log_that_cannot_be_written(monkeypatch):
    def fail(event, **fields):
        raise ConfigError("the disk is full")

    monkeypatch.setattr(skipped_steps, "run_event", fail)
    progress = Progress()
    skipped = SkippedSteps(progress)
    progress.nonfinite = 4
    with pytest.raises(NonFiniteLossError, match="too many"), skipped.written_whatever_ends():
        raise NonFiniteLossError("too many")


def test_each_skipped_step_is_told_once(monkeypatch):
    told = []
    monkeypatch.setattr(
        skipped_steps,
        "run_event",
        lambda _, **fields: told.append(fields["count"]),
    )
    progress = Progress(nonfinite=1)  # of an epoch that goes on
    skipped = SkippedSteps(progress)
    progress.nonfinite = 3
    skipped.write()
    progress.nonfinite = 4
    with pytest.raises(KeyboardInterrupt), skipped.written_whatever_ends():
        raise KeyboardInterrupt
    assert told == [2, 1]


def test_another_thread_that_ends_the_process_tells_of_them(tmp_path, monkeypatch):
    """It waits for no step whose result the GPU has not told yet."""
    progress = Progress(epoch=2, step=7, optimizer_step=5, nonfinite=3, skips_written=1)
    progress.pending = PendingStep(torch.tensor(1.0), None)
    progress.pending.then(lambda _: pytest.fail("it has waited"))
    create_experiment_directory(tmp_path, save_env_desc=False)
    try:
        monkeypatch.setattr(POSITION, "progress", progress)
        PROCESS.note_end("rank 1 has failed")
    finally:
        close_experiment()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    *_, skipped, end = [json.loads(line) for line in lines]
    assert skipped["event"] == "skipped_steps"
    assert (skipped["count"], skipped["in_epoch"], skipped["optimizer_step"]) == (2, 3, 5)
    assert (end["event"], end["type"]) == ("exception", "RankFailedError")
