"""Measured steps on a GPU: by its own clock, without a wait for it, and with the same bits."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import nn

from ddpkit.brain import Brain
from ddpkit.train_logger import set_run_log
from tests.gpu.test_brain import Syncs

pytestmark = pytest.mark.gpu

MILLISECONDS = 10.0
STEPS = 60


def cycles():
    """Return for how many cycles a GPU sleeps that is to sleep for so long."""
    torch.cuda._sleep(1_000_000)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    end.synchronize()
    return int(50_000_000 * MILLISECONDS / begin.elapsed_time(end))


class Sleeps:
    """Where the GPU, or the host, sleeps."""

    phase = ""
    on_host = False
    cycles = 0

    @classmethod
    def sleep(cls, phase):
        if phase == cls.phase and cls.on_host:
            time.sleep(MILLISECONDS / 1e3)
        elif phase == cls.phase:
            torch.cuda._sleep(cls.cycles)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Sleeps.sleep("backward")
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.last = nn.Linear(32, 1)

    def forward(self, x):
        Sleeps.sleep("forward")
        return self.last(InBackward.apply(torch.tanh(self.first(x))))


class Small(nn.Module):
    """With a forward pass of its own: torch compiles nothing of a module that has none."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        return torch.tanh(self.layer(x))


class Recipe(Brain):
    def compute_forward(self, batch, stage):
        Sleeps.sleep("move")
        return self.modules.net(batch.to(self.device))

    def compute_objectives(self, predictions, batch, stage):
        return predictions.square().mean()

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        Sleeps.sleep("other")


class Stepper(torch.optim.SGD):
    def step(self, closure=None):
        Sleeps.sleep("optimizer")
        return super().step(closure)


class CountsWaits(Recipe, Syncs):
    """Counts how often a step waits for the GPU."""


def collate(rows):
    Sleeps.sleep("data")
    return torch.stack(rows)


def train(log, cls=Recipe, net=None, **options):
    torch.manual_seed(5)
    brain = cls(
        {"net": Net() if net is None else net},
        lambda parameters: Stepper(parameters, lr=0.01),
        run_opts={"noprogressbar": True, **options},
    )
    set_run_log(log)
    try:
        data = list(torch.randn(4 * STEPS, 8))
        brain.fit([1], data, train_loader_kwargs={"batch_size": 4, "collate_fn": collate})
    finally:
        set_run_log(None)
    return brain


def speed(log):
    """Return the last event of several steps."""
    found = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [one for one in found if one["event"] == "speed" and one["windows"] >= 4][-1]


@pytest.fixture
def sleeps(monkeypatch):
    def plant(phase, *, on_host=False):
        monkeypatch.setattr(Sleeps, "phase", phase)
        monkeypatch.setattr(Sleeps, "on_host", on_host)
        monkeypatch.setattr(Sleeps, "cycles", cycles())

    return plant


@pytest.mark.parametrize("phase", ["move", "forward", "backward", "optimizer"])
def test_what_the_gpu_takes_is_in_its_phase_though_the_host_is_ahead(sleeps, phase, tmp_path):
    sleeps(phase)
    train(tmp_path / "m.jsonl", measure_steps="all")
    event = speed(tmp_path / "m.jsonl")
    times = {name: one["median"] * 1e3 for name, one in event["phases"].items()}
    assert times[phase] == pytest.approx(MILLISECONDS, rel=0.3), times
    assert sum(times.values()) - times[phase] < MILLISECONDS / 2, times
    assert event.get("host_bound", 0.0) < 0.5


def test_a_slow_loader_leaves_the_gpu_without_work(sleeps, tmp_path):
    sleeps("data", on_host=True)
    train(tmp_path / "m.jsonl", measure_steps="all")
    event = speed(tmp_path / "m.jsonl")
    assert event["phases"]["data"]["median"] * 1e3 > 0.8 * MILLISECONDS, event
    assert event["memory"]["allocated"]["max"] > 0
    assert event["memory"]["peak"]["max"] >= event["memory"]["allocated"]["max"]


def test_a_gpu_that_waits_for_the_host_is_seen(sleeps, tmp_path):
    sleeps("other", on_host=True)
    train(tmp_path / "m.jsonl", measure_steps="all")
    event = speed(tmp_path / "m.jsonl")
    assert event["host_bound"] > 0.5, event
    assert event["phases"]["other"]["median"] * 1e3 > 0.8 * MILLISECONDS, event


def test_no_step_waits_for_the_gpu_to_be_measured_and_no_bit_changes(tmp_path):
    found = {}
    for measures in ("off", "sampled", "all"):
        brain = train(tmp_path / f"{measures}.jsonl", cls=CountsWaits, measure_steps=measures)
        state = {name: one.cpu() for name, one in brain.raw_modules.state_dict().items()}
        found[measures] = (state, brain.syncs)
    for measures in ("sampled", "all"):
        torch.testing.assert_close(found[measures][0], found["off"][0], rtol=0, atol=0)
        more = sum(found[measures][1]) - sum(found["off"][1])
        assert more <= 12, (
            measures,
            found[measures][1],
        )  # of the syncs of the ranks, which are a matter of time
    assert speed(tmp_path / "all.jsonl")["gradient_norm"] > 0


def test_a_compiled_model_is_not_compiled_anew_to_be_measured(tmp_path):
    graphs = {}
    for measures in ("off", "all"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        train(
            tmp_path / f"{measures}.jsonl",
            net=Small(),
            measure_steps=measures,
            compile=True,
        )
        graphs[measures] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs["all"] == graphs["off"] > 0
    assert speed(tmp_path / "all.jsonl")["phases"]["forward"]["median"] > 0
