"""A run says what makes it slow: once, in its log and in metrics.jsonl."""

from __future__ import annotations

import json
import logging
import time

import pytest
import torch
from torch import nn

from ddpkit.brain import Brain
from ddpkit.step_times.verdicts import history
from ddpkit.train_logger import set_run_log


class Classifier(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.square().mean()


def slowly(samples):
    time.sleep(0.003)
    return torch.ones(len(samples), 4)


@pytest.mark.parametrize(("measured", "said"), [("sampled", 1), ("off", 0)])
def test_a_loader_that_is_the_limit_is_said_once(measured, said, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(history, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(history, "STRETCH_SECONDS", 0.0)
    set_run_log(tmp_path / "metrics.jsonl")
    try:
        options = {"device": "cpu", "noprogressbar": True, "measure_steps": measured}
        brain = Classifier(
            {"net": nn.Linear(4, 4)}, lambda p: torch.optim.SGD(p, lr=0.1), run_opts=options
        )
        with caplog.at_level(logging.WARNING):
            brain.fit([1], range(264), train_loader_kwargs={"batch_size": 2, "collate_fn": slowly})
        events = [
            json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
        ]
    finally:
        set_run_log(None)
    verdicts = [event for event in events if event["event"] == "verdict"]
    assert [(one["kind"], one["phase"]) for one in verdicts] == [("slow_data", "data")] * said
    lines = [record.getMessage() for record in caplog.records]
    expected = [" ".join((one["what"], one["how_much"], one["try"])) for one in verdicts]
    assert [line for line in lines if "The loader is the limit" in line] == expected
