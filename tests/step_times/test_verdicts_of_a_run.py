"""What is found in the seconds of a run is said in its log and in metrics.jsonl."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

from ddpkit.step_times.verdicts import Verdict, VerdictFinder
from ddpkit.train_logger import set_run_log
from tests.recipes import Squares

FOUND = Verdict(kind="slow_data", what="Slow.", how_much="By half.", advice="Hurry.", phase="data")


def ones(samples):
    return torch.ones(len(samples), 4)


def test_a_training_in_which_nothing_stood_out_says_so_at_its_end(caplog, monkeypatch):
    monkeypatch.setattr(VerdictFinder, "words_if_nothing_found", lambda finder: "No verdict.")
    options = {"device": "cpu", "noprogressbar": True}
    make_sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    brain = Squares({"net": nn.Linear(4, 4)}, make_sgd, run_opts=options)
    with caplog.at_level(logging.INFO):
        brain.fit([1], range(8), train_loader_kwargs={"batch_size": 2, "collate_fn": ones})
    assert [record.getMessage() for record in caplog.records].count("No verdict.") == 1


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(("measured", "said"), [("all", 1), ("off", 0)])
def test_a_verdict_goes_to_both_logs(measured, said, tmp_path, caplog, monkeypatch):
    seen = []

    def note(finder, second):
        seen.append((second, finder.num_workers))
        return [FOUND] if len(seen) == 1 else []

    monkeypatch.setattr(VerdictFinder, "note", note)
    set_run_log(tmp_path / "metrics.jsonl")
    try:
        options = {"device": "cpu", "noprogressbar": True, "measure_steps": measured}
        make_sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        brain = Squares({"net": nn.Linear(4, 4)}, make_sgd, run_opts=options)
        with caplog.at_level(logging.WARNING):
            brain.fit([1], range(800), train_loader_kwargs={"batch_size": 2, "collate_fn": ones})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    finally:
        set_run_log(None)
    events = [json.loads(line) for line in lines]
    verdicts = [event for event in events if event["event"] == "verdict"]
    assert [{name: one[name] for name in FOUND.event()} for one in verdicts] == [
        FOUND.event()
    ] * said
    told = [record.getMessage() for record in caplog.records]
    assert told.count("Slow. By half. Hurry.") == said
    assert bool(seen) == bool(said)
    for second, num_workers in seen:
        assert num_workers == 0
        assert len(second.single_own) == len(second.core_waits) == second.world_size == 1
        assert len(second.single_sizes[0]) == len(second.single_exchange[0]) > 0
