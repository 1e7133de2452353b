"""Real ranks: the main process keeps the record of the run, for all of them."""

from __future__ import annotations

import json
import os

import pytest
import torch.distributed as dist

from ddpkit.train_logger import set_run_log
from tests.contract.test_record_of_a_run import Saving
from tests.recipes import make, points


def train(folder):
    set_run_log(f"{folder}/rank{dist.get_rank()}.jsonl")
    brain = make(Saving, folder=folder / "save", ckpt_async=False)
    brain.fit([1], points(8), points(4), train_loader_kwargs={"batch_size": 2})
    set_run_log(None)
    return os.getpid()


@pytest.mark.costly
def test_the_main_process_alone_writes_and_names_where_every_rank_runs(ranks, tmp_path):
    ranks.run(train, tmp_path)
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["rank0.jsonl"]
    events = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    begun = next(event for event in events if event["event"] == "fit")
    assert (begun["world_size"], begun["strategy"], begun["samples_per_step"]) == (
        2,
        "DistributedDataParallel",
        4,
    )
    assert [rank["host"] for rank in begun["ranks"]] == [os.uname().nodename] * 2
    (saved,) = [event for event in events if event["event"] == "checkpoint"]
    assert (saved["epoch"], saved["optimizer_step"]) == (1, 2)
