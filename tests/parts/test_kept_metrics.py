"""A validation between two steps leaves all kinds of metrics as they were in the training."""

from __future__ import annotations

import torch

from ddpkit import Part, Stage
from ddpkit.metrics import Reduced, Sum
from ddpkit.parts import ValidationSchedule
from tests.recipes import QUIET, Regression, linear, points, sgd

DATA = points(8)


class Added(torch.nn.Module):
    """Behaves as a metric of torchmetrics: it adds in place, and lists what it has seen."""

    sync_on_compute = compute_with_cache = True

    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self):
        self.total = torch.tensor(0)
        self.values = []

    def update(self, number):
        self.total += number
        self.values.append(number)

    def compute(self):
        return self.total.item(), sum(self.values)


class Counts(Part):
    """Counts batches by a metric of its own, which begins anew in each stage."""

    def __init__(self):
        self.batches = Sum()

    def on_stage_start(self, brain, stage, epoch):
        self.batches.reset()

    def on_gradients(self, brain):
        self.batches.update(1)

    def on_stage_end(self, brain, stage, stage_loss, epoch):
        brain.told[stage, "part"] = self.batches.compute()


class Counting(Regression):
    """Counts samples by metrics of each kind, which begin anew in each stage."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.told = {}
        self.reduced = Reduced(Added())
        self.plain = Added()
        self.by_name = {"samples": Sum()}

    def kinds(self):
        return self.reduced, self.plain, self.by_name["samples"]

    def on_stage_start(self, stage, epoch=None):
        for metric in self.kinds():
            metric.reset()

    def compute_objectives(self, predictions, batch, stage):
        for metric in self.kinds():
            metric.update(len(batch[1]))
        return super().compute_objectives(predictions, batch, stage)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.told[stage, "recipe"] = [metric.compute() for metric in self.kinds()]


def told(*parts):
    brain = Counting({"net": linear()}, sgd(), {}, QUIET, parts=[Counts(), *parts])
    brain.fit([1], DATA, DATA[:3], train_loader_kwargs={"batch_size": 2})
    return brain.told


def test_a_validation_between_two_steps_keeps_metrics_of_each_kind():
    found = told(ValidationSchedule(every_steps=1, every_epochs=1))
    assert found == told()
    assert found[Stage.TRAIN, "recipe"] == [(8, 8), (8, 8), 8.0]
    assert found[Stage.VALID, "recipe"] == [(3, 3), (3, 3), 3.0]
    assert found[Stage.TRAIN, "part"] == 4.0
