"""Sums and counts in one process."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ddpkit.errors import ConfigError
from ddpkit.metrics import Accuracy, LossMeter, Mean, Reduced, Sum
from tests.host_reads import HostReads

FLUSH_AFTER = 64  # a meter adds up every 64 losses, as its docstring says


def test_mean_is_weighted():
    mean = Mean()
    assert math.isnan(mean.compute())
    mean.update(2.0, 3)
    mean.update(torch.tensor(4.0), torch.tensor(2))
    mean.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0]))
    mean.update(torch.tensor([10.0, 20.0]), 0.5)
    assert mean.compute() == pytest.approx((6 + 8 + 4 + 15) / (3 + 2 + 2 + 1))
    assert mean.compute(reduce=True) == mean.compute()
    mean.reset()
    assert math.isnan(mean.compute())


def test_sum_adds_in_float64():
    total = Sum()
    total.update(torch.tensor(2.0**24))
    for _ in range(10):
        total.update(torch.tensor(1.0))
    total.update(3)
    total.update(torch.tensor([True, True]))
    assert total.compute() == 2.0**24 + 15


def test_numbers_that_are_no_tensors():
    mean = Mean()
    total = Sum()
    for metric in (mean, total):
        metric.update(np.array([1.0, 2.0]))
        metric.update(np.float32(6.0))
        metric.update(True)
    mean.update([4, 5], np.array([2, 1]))
    total.update([4, 5])
    assert mean.compute() == (1 + 2 + 6 + 1 + 8 + 5) / 7
    assert total.compute() == 1 + 2 + 6 + 1 + 9


def test_accuracy_of_scores_and_of_classes():
    accuracy = Accuracy()
    accuracy.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    accuracy.update(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 0]))
    assert accuracy.compute() == pytest.approx(0.6)
    assert accuracy.error() == pytest.approx(0.4)
    images = Accuracy()
    images.update(torch.randn(2, 5, 3, 3), torch.zeros(2, 3, 3, dtype=torch.int64), dim=1)
    assert images.state_dict()["count"] == 18
    assert math.isnan(Accuracy().error())


@pytest.mark.parametrize(
    ("predictions", "labels"),
    [((3, 2), (4,)), ((3,), (3, 2)), ((2, 5, 3), (2, 3))],
)
def test_shapes_that_do_not_fit(predictions, labels):
    with pytest.raises(ConfigError, match=r"predictions of shape .* do not fit labels of shape"):
        Accuracy().update(torch.zeros(predictions), torch.zeros(labels))


@pytest.mark.parametrize("kind", [Mean, Sum, Accuracy])
def test_state(kind):
    def feed(metric):
        if kind is Accuracy:
            metric.update(torch.tensor([1, 2]), torch.tensor([1, 3]))
        else:
            metric.update(torch.tensor([1.5, 2.5], requires_grad=True))

    whole = kind()
    first = kind()
    second = kind()
    for metric in (whole, whole, first):
        feed(metric)
    second.load_state_dict(first.state_dict())
    feed(second)
    assert second.compute() == whole.compute()
    assert all(type(value) is float for value in second.state_dict().values())


@pytest.mark.costly
def test_updates_read_nothing_back():
    mean = Mean()
    total = Sum()
    accuracy = Accuracy()
    meter = LossMeter()
    loss = torch.tensor(1.5)
    labels = torch.tensor([1])
    with HostReads() as reads:
        for _ in range(3 * FLUSH_AFTER):
            mean.update(loss, 4)
            mean.update(loss, torch.tensor(4))
            total.update(loss)
            accuracy.update(labels, labels)
            meter.append(loss, 4)
        assert reads.count == 0
        accuracy.compute()
        assert reads.count == 1


def test_loss_meter_o6_leaves_out_what_is_not_finite():
    meter = LossMeter()
    for loss in (math.nan, math.nan, 2.0, 2.0, math.inf, -math.inf):
        meter.append(torch.tensor(loss), 1)
        meter.append(loss, 1)
    assert meter.sums() == (8.0, 4.0, 8)
    assert meter.sums() == (8.0, 4.0, 8)


def test_loss_meter_takes_every_form_of_a_number():
    meter = LossMeter()
    meter.append(torch.tensor([1.0]), 2)
    meter.append(torch.tensor([[2.0]], dtype=torch.bfloat16), 2)
    meter.append(torch.tensor(3.0, dtype=torch.float64, requires_grad=True), 2)
    meter.append(4, 2)
    with torch.inference_mode():
        meter.append(torch.tensor(5.0), 0.5)
        assert meter.sums() == (22.5, 8.5, 0)
    meter.append(torch.tensor(1.0), 1)
    assert meter.sums() == (23.5, 9.5, 0)


def test_a_count_is_not_rounded_to_single_precision_beside_tensors():
    meter = LossMeter()
    loss = torch.tensor(1.0, dtype=torch.float64)
    meter.append_sum(loss, torch.tensor(1.0))
    meter.append_sum(loss, 2.0**24 + 1)
    assert meter.sums() == (2.0, 2.0**24 + 2, 0)


@pytest.mark.parametrize("steps", [1, FLUSH_AFTER - 1, FLUSH_AFTER, FLUSH_AFTER + 1, 1000])
def test_loss_meter_equals_the_plain_sum_over_any_number_of_flushes(steps):
    torch.manual_seed(0)
    losses = torch.rand(steps, dtype=torch.float64)
    counts = torch.randint(1, 9, (steps,))
    meter = LossMeter()
    for loss, count in zip(losses, counts.tolist(), strict=True):
        meter.append(loss, count)
        if count == 3:
            meter.append(torch.tensor(math.nan), count)
    loss_sum, count, bad = meter.sums()
    assert loss_sum == pytest.approx(float((losses * counts).sum()), rel=1e-14)
    assert (count, bad) == (float(counts.sum()), int((counts == 3).sum()))


def test_loss_meter_goes_on_after_restore():
    meter = LossMeter()
    meter.append(torch.tensor(7.0), 1)
    meter.restore(10.0, 4.0, nonfinite=1)
    meter.append(torch.tensor(1.0), 2)
    assert meter.sums() == (12.0, 6.0, 1)


def test_reduced_refuses_what_it_cannot_tell_how_to_exchange():
    class Plain:
        def update(self):
            pass

        compute = reset = update

    with pytest.raises(
        ConfigError,
        match="Plain cannot be reduced over the ranks: it is not a metric of torchmetrics",
    ):
        Reduced(Plain())
    Plain.sync_on_compute = False
    with pytest.raises(
        ConfigError,
        match="Plain cannot be reduced .*, or was made with sync_on_compute=False",
    ):
        Reduced(Plain())


@pytest.mark.parametrize("as_tensor", [False, True])
def test_losses_that_are_sums(as_tensor):
    """A batch that counts nothing is no loss at all; one that is not finite is counted by
    itself.
    """
    kind = torch.tensor if as_tensor else float
    meter = LossMeter()
    entries = [(6.0, 3.0), (0.0, 0.0), (math.nan, 0.0), (math.inf, 2.0), (4.0, 5.0)] * (
        FLUSH_AFTER // 4
    )
    with HostReads() as reads:
        for loss, count in entries:
            meter.append_sum(kind(loss), kind(count))
        meter.append(kind(2.0), 10)
    assert reads.count == 0
    repeats = FLUSH_AFTER // 4
    assert meter.sums() == (10.0 * repeats + 20, 8.0 * repeats + 10, repeats)
    meter.append_sum(torch.tensor([1.0]), 2)
    meter.append_sum(1.0, torch.tensor(2))
    assert meter.sums() == (10.0 * repeats + 22, 8.0 * repeats + 14, repeats)


def test_samples_are_counted_apart():
    meter = LossMeter()
    meter.samples += 5
    meter.restore(4.0, 2.0, samples=7)
    assert (meter.sums(), meter.samples) == ((4.0, 2.0, 0), 7)


def test_losses_that_are_overwritten_count_as_they_were_where_they_are_copied():
    meter = LossMeter(copies=True)
    loss = torch.tensor(2.0)
    meter.append(loss, 1.0)
    meter.append_sum(loss, 1.0)
    loss.fill_(100.0)
    assert meter.sums() == (4.0, 2.0, 0)
