"""Real ranks: only main writes, whoever calls."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from ddpkit.distributed import if_main_process
from ddpkit.train_logger import (
    FileTrainLogger,
    TensorboardLogger,
    WandBLogger,
    run_event,
    set_run_log,
)


class Run:
    def __init__(self):
        self.logged = []

    def log(self, stats, **options):
        self.logged.append((stats, options))


def log_stats(folder, who):
    folder = Path(folder)
    loggers = [
        FileTrainLogger(folder / "log.txt"),
        TensorboardLogger(folder / "board"),
        WandBLogger(Run),
    ]
    set_run_log(folder / "metrics.jsonl")
    for epoch in (1, 2):
        if who == "all" or if_main_process():
            for train_logger in loggers:
                train_logger.log_stats({"epoch": epoch}, {"loss": 2.0})
            run_event("after", rank=dist.get_rank())
    loggers[1].close()
    set_run_log(None)
    dist.barrier()
    return loggers[2].run is not None and len(loggers[2].run.logged), loggers[1].global_step["meta"]


def start_wandb_with_a_failure():
    WandBLogger(os.stat, "/no/such/file")


def check(folder, results):
    assert results == [(2, 2), (False, 0)]
    assert (folder / "log.txt").read_text() == (
        "epoch: 1 - train loss: 2.00\nepoch: 2 - train loss: 2.00\n"
    )
    events = [
        json.loads(line)["event"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert events == ["stats", "after"] * 2
    assert len(list((folder / "board").iterdir())) == 1


@pytest.mark.costly
def test_log_stats_on_all_ranks(ranks, tmp_path):
    check(tmp_path, ranks.run(log_stats, str(tmp_path), "all"))


@pytest.mark.costly
def test_log_stats_on_main_alone(ranks, tmp_path):
    check(tmp_path, ranks.run(log_stats, str(tmp_path), "main"))


def test_2_5_every_rank_learns_why_wandb_did_not_start(ranks):
    outcomes = ranks.outcomes(start_wandb_with_a_failure)
    assert [outcome.error_type for outcome in outcomes] == ["ConfigError", "MainProcessError"]
    assert all("FileNotFoundError" in outcome.error for outcome in outcomes)
