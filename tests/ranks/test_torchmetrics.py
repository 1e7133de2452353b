"""Metrics of the real torchmetrics on real ranks: the values of one process, in training and in
every evaluation.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpkit.metrics import Reduced
from tests.ecosystem import needs
from tests.rank_pool import RankPool
from tests.recipes import make

pytestmark = needs("torchmetrics")
CLASSES = 3


@pytest.fixture(scope="module")
def own_ranks():
    """Ranks that end with this module, and with them what it has imported."""
    with RankPool(timeout=300) as pool:
        yield pool


def measured(samples, shard_evaluation):
    """Train and validate; return what all metrics say, of a training and a validation."""
    import torchmetrics
    from torchmetrics import classification as of_classes

    from ddpkit.brain import Brain

    class Classifier(Brain):
        def on_stage_start(self, stage, epoch=None):
            for metric in self.metrics.values():
                metric.reset()

        def compute_forward(self, batch, stage):
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            chances = predictions.detach().softmax(-1)
            for name in ("several", "curve", "table", "in modules"):
                self.metrics[name].update(chances, batch[1])
            self.metrics["sum"].update(chances.sum())
            self.metrics["mean"].update(chances[:, 0])
            self.metrics["all"].update(chances[:, 1])
            return nn.functional.cross_entropy(predictions, batch[1])

        def on_stage_end(self, stage, stage_loss, epoch=None):
            found = {name: metric.compute() for name, metric in self.metrics.items()}
            self.found.append({**found, "all": found["all"].sort().values})

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    data = list(zip(inputs, torch.arange(samples) % CLASSES, strict=True))
    torch.manual_seed(3)
    several = {
        "micro": of_classes.MulticlassAccuracy(CLASSES, average="micro"),
        "f1": of_classes.MulticlassF1Score(CLASSES),
    }
    brain = make(
        Classifier,
        net=nn.Linear(3, CLASSES).double(),
        global_batch_size=4,
        shard_evaluation=shard_evaluation,
    )
    brain.modules["accuracy"] = of_classes.MulticlassAccuracy(CLASSES)
    brain.metrics = {
        "several": Reduced(torchmetrics.MetricCollection(several)),
        "curve": Reduced(of_classes.MulticlassAUROC(CLASSES, thresholds=None)),
        "table": Reduced(of_classes.MulticlassConfusionMatrix(CLASSES)),
        "sum": Reduced(torchmetrics.SumMetric()),
        "mean": Reduced(torchmetrics.MeanMetric()),
        "all": Reduced(torchmetrics.CatMetric()),
        "in modules": Reduced(brain.modules["accuracy"]),
    }
    brain.found = []
    brain.fit([1, 2], data, data[:5], valid_loader_kwargs={"batch_size": 4})
    return brain.found


def assert_alike(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_alike(found[name], value)
    else:
        # torchmetrics counts in float32
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shard_evaluation", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_the_values_are_those_of_one_process(own_ranks, world, shard_evaluation):
    """The last batch of training has one sample, which the other ranks repeat; that of validation
    has one, too.
    """
    (alone,) = own_ranks.run(measured, 9, False, world_size=1)
    for found in own_ranks.run(measured, 9, shard_evaluation, world_size=world):
        assert len(found) == len(alone) == 4
        for stage, expected in zip(found, alone, strict=True):
            assert_alike(stage, expected)


def counted_without_reduced():
    import torchmetrics

    from tests.recipes import Regression, points

    class Counts(Regression):
        def compute_objectives(self, predictions, batch, stage):
            self.bare.update(float(len(predictions)))
            self.reduced.update(float(len(predictions)))
            return super().compute_objectives(predictions, batch, stage)

    brain = make(Counts)
    brain.bare, brain.reduced = torchmetrics.SumMetric(), Reduced(torchmetrics.SumMetric())
    brain.evaluate(points(5), test_loader_kwargs={"batch_size": 2})
    return float(brain.bare.compute()), float(brain.reduced.compute())


def test_a_bare_metric_counts_an_undivided_set_once_per_process(own_ranks):
    """As the page says, and why it goes into Reduced."""
    assert own_ranks.run(counted_without_reduced, world_size=2) == [(10.0, 5.0)] * 2
