"""What metrics have counted is noted before each step, and put back where the step is repeated."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from ddpkit.metric_stats import MetricStats
from ddpkit.metrics import Reducing, Sum
from ddpkit.parts import Part
from ddpkit.training.metric_contents import KeptMetrics, kept_metrics

MANY = 100_000
FEW_BYTES = 20_000  # a copy of a list so long takes 800,000


def scores():
    return MetricStats(lambda values: values)


class Listed(nn.Module):
    """Keeps a list, and empties it in a reset, as metrics of torchmetrics do."""

    sync_on_compute = True

    def __init__(self):
        super().__init__()
        self._defaults = {"values": []}
        self.values = []

    def reset(self):
        self.values.clear()


class Histogram(Reducing):
    """Has a list that changes in its middle."""

    def __init__(self):
        super().__init__()
        self.counts = [0, 0, 0]


def test_what_is_noted_in_a_step_is_what_is_new():
    metric = scores()
    for number in range(3):
        metric.append(list(range(MANY)), [float(number)] * MANY)
    listed = Listed()
    listed.values = [object() for _ in range(MANY)]
    kept = KeptMetrics([metric, listed])
    metric.append(["first"], [1.0])
    listed.values.append(object())
    kept.keep()  # which makes room for more
    metric.append(["last"], [1.0])
    listed.values.append(object())
    tracemalloc.start()
    try:
        kept.keep()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < FEW_BYTES
    metric.append(["repeated"], [2.0])
    kept.put_back()
    assert metric.ids[-3:] == [MANY - 1, "first", "last"]
    assert len(metric.scores) == len(metric.ids) == 3 * MANY + 2
    assert len(listed.values) == MANY + 2


@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_list_that_began_anew_in_a_step_is_put_back(more):
    metric = scores()
    listed = Listed()
    metric.append(["a", "b"], [1.0, 2.0])
    listed.values += [torch.ones(1), torch.ones(1)]
    kept = KeptMetrics([metric, listed])
    metric.clear()
    listed.reset()
    for number in range(more):
        metric.append([number], [0.5])
        listed.values.append(torch.tensor(number))
    kept.keep()
    metric.append(["z"], [9.0])
    listed.reset()
    kept.put_back()
    assert metric.ids == list(range(more))
    assert listed.values == list(range(more))


def test_other_lists_are_put_back_as_they_were():
    histogram = Histogram()
    kept = KeptMetrics([histogram])
    histogram.counts[1] += 1
    kept.keep()
    histogram.counts[1] += 1
    kept.put_back()
    assert histogram.counts == [0, 1, 0]


@dataclass(frozen=True)
class Frozen(Part):
    hits: Sum = field(default_factory=Sum)


def test_a_part_whose_attributes_cannot_be_set_has_its_metrics_put_back():
    part = Frozen()
    part.hits.update(2)
    with kept_metrics(part):
        part.hits.update(5)
    assert part.hits.compute() == 2
