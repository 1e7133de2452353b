"""The progress bar of a run: which epoch of how many, the learning rate, the time left of the whole
run.
"""

from __future__ import annotations

import io
import logging
import re
import time
from types import SimpleNamespace

import pytest
import torch

from ddpkit.epoch_loop import EpochCounter
from tests.recipes import Regression, make, points, sgd


class Console(io.StringIO):
    """Says that it is a terminal; of what width is not known."""

    def isatty(self):
        return True


@pytest.fixture
def console(monkeypatch):
    console = Console()
    monkeypatch.setattr("ddpkit.reporting.stage_report.sys", SimpleNamespace(stderr=console))
    return console


def last_bars(console):
    """Return what stood in each bar at its end."""
    return [line.rpartition("\r")[2] for line in console.getvalue().split("\n")[:-1]]


class SlowSteps(Regression):
    def compute_forward(self, batch, stage):
        time.sleep(0.01)
        return super().compute_forward(batch, stage)


def fit(epochs, *, scheduler=None, valid=None, **options):
    brain = make(noprogressbar=False, **options)
    brain.scheduler_class = scheduler
    brain.fit(epochs, points(8), valid, train_loader_kwargs={"batch_size": 2})


def test_the_epoch_of_how_many_the_rate_and_the_time_left(console):
    fit(range(1, 4), valid=points(2), opt=sgd(lr=0.03))
    bars = last_bars(console)
    stages = [
        f"epoch {epoch} of 3 {stage}: 100%" for epoch in (1, 2, 3) for stage in ("train", "valid")
    ]
    assert [bar.partition("|")[0] for bar in bars] == stages
    assert ["lr=0.03" in bar for bar in bars] == [True, False] * 3
    times = [re.search(r"run (\S+) left", bar)[1] for bar in bars]
    assert times[0] == "00:00+", "no validation has been made yet"
    assert times[1:] == ["00:00"] * 5


def test_the_rate_is_that_of_the_next_step(console):
    def halve(optimizer, _):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    options = {"lr_scaling": "linear", "reference_batch_size": 1}
    fit([1], scheduler=halve, opt=sgd(lr=0.4), **options)
    assert f"lr={2 * 0.4 / 16:.3g}," in last_bars(console)[0]


@pytest.mark.parametrize(
    ("epochs", "options", "label"),
    [
        (range(5, 7), {}, "epoch 6 of 6 train"),
        (EpochCounter(2), {}, "epoch 2 of 2 train"),
        (range(1, 9), {"optimizer_step_limit": 6}, "epoch 2 of 2 train"),
        (range(1, 10**12), {"optimizer_step_limit": 6}, "epoch 2 of 2 train"),
        (range(1, 9), {"debug": True, "debug_epochs": 2}, "epoch 2 of 2 train"),
        ((number for number in (1, 2)), {}, "epoch 2 train"),
        ([2, 1], {}, "epoch 1 train"),
    ],
    ids=["from 5", "counter", "limit", "for ever", "debug", "generator", "no order"],
)
def test_the_number_of_epochs_where_it_is_known(console, epochs, options, label):
    fit(epochs, **options)
    last = last_bars(console)[-1]
    assert last.partition(":")[0] == label
    assert ("left]" in last) == (" of " in label)


def test_without_a_terminal_the_line_says_the_same(monkeypatch, caplog):
    monkeypatch.setattr("ddpkit.reporting.stage_report.LINE_SECONDS", 0.0)
    caplog.set_level(logging.INFO, logger="ddpkit.reporting.stage_report")
    fit(range(1, 3), opt=sgd(lr=0.03))
    first = caplog.messages[0]
    last = caplog.messages[-1]
    assert first.startswith("epoch 1 of 2 train: batch ")
    assert re.fullmatch(
        r"epoch 2 of 2 train: batch 4/4, loss \S+, lr 0.03, \S+ samples/s, 00:00 left, run 00:00 "
        r"left",
        last,
    )


class SlowItems(list):
    """Points that take their time to be read."""

    def __getitem__(self, index):
        time.sleep(0.004)
        return super().__getitem__(index)


@pytest.mark.parametrize(("data", "is_shown"), [(SlowItems, True), (list, False)])
def test_the_wait_for_data_is_shown_where_it_is_long(console, data, is_shown):
    brain = make(SlowSteps, noprogressbar=False, measure_steps="all")
    brain.fit([1], data(points(40)), train_loader_kwargs={"batch_size": 2})
    assert bool(re.search(r"data wait [1-9]\d %", last_bars(console)[-1])) == is_shown


def test_a_line_that_is_announced_does_not_stand_behind_the_bar(console, monkeypatch):
    """Where nobody has set logging up."""
    logger = logging.getLogger("ddpkit")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr("sys.stderr", console)
    fit([1], opt=sgd(lr=1e-9), max_grad_norm=1e-9)
    (line,) = [line for line in console.getvalue().splitlines() if "were clipped" in line]
    assert line.rpartition("\r")[2].startswith("epoch 1: the gradients of 4 of 4")
