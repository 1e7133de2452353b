"""Learning rates that rise from step to step: the losses are those of a plain loop, on any number
of processes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpkit.launch import SLICE, SlicePlan
from ddpkit.run import rates_between
from tests.contract.test_predict import handlers_kept
from tests.recipes import Regression, linear, make, points, sgd, world_size

SAMPLES = 24
STEP = 8
RATES = rates_between(1e-3, 1.0, 6)


class Sums(Regression):
    """Returns sums with counts that differ from sample to sample."""

    def compute_objectives(self, predictions, batch, stage):
        weights = 1.0 + batch[0][:, :1].abs().round()
        return (weights * (predictions - batch[1]) ** 2).sum(), weights.sum()


class Scheduled(Regression):
    """Has a schedule of its own, which sets the rate in each batch."""

    def compute_forward(self, batch, stage):
        for group in self.optimizer.param_groups:
            group["lr"] = 5.0
        return super().compute_forward(batch, stage)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        raise AssertionError("a slice ends no stage")


def swept(folder, cls, factor=1, rates=RATES, lr=0.1, **options):
    """Run fit as a slice that tries rates; return what it has written, or how it ended."""
    scratch = Path(folder, "scratch")
    scratch.mkdir(exist_ok=True)
    plan = SlicePlan(str(scratch), str(scratch / "result.json"), learning_rates=list(rates))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SLICE, plan.text())
        brain = make(cls, opt=sgd(lr), folder=Path(folder, "save"), max_grad_norm=None, **options)
        size = STEP // factor // world_size()
        with pytest.raises(SystemExit) as ended:
            brain.fit(
                range(1, 9),
                points(SAMPLES),
                train_loader_kwargs={"batch_size": size, "shuffle": False},
            )
    assert ended.value.code == 0
    return json.loads(Path(plan.result).read_text())


def plain_losses(cls, rates=RATES):
    """The loop of torch that the sweep is: the mean loss of a step, then the step."""
    net = linear()
    data = points(SAMPLES)
    losses = []
    for number, rate in enumerate(rates):
        first = number * STEP % SAMPLES
        inputs, targets = (
            torch.stack(rows) for rows in zip(*data[first : first + STEP], strict=True)
        )
        net.zero_grad()
        weights = 1.0 + inputs[:, :1].abs().round() if cls is Sums else torch.ones(STEP, 1)
        loss = (weights * (net(inputs) - targets) ** 2).sum() / weights.sum()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(rate * parameter.grad)
    return losses


@pytest.fixture(autouse=True)
def _handlers():
    """A run that ends its process keeps its signal handlers; these tests do not."""
    with handlers_kept():
        yield


@pytest.mark.parametrize("cls", [Scheduled, Sums])
def test_losses_are_those_of_a_plain_loop(tmp_path, cls):
    found = swept(tmp_path, cls)
    assert found["losses"] == pytest.approx(plain_losses(cls), rel=1e-12)
    assert found["rates"] == RATES
    assert (found["ended"], found["world_size"]) == ("all tried", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("cls", "factor"),
    [(Sums, 2), pytest.param(Scheduled, 1, marks=pytest.mark.slow)],
)
def test_two_processes_with_accumulation_have_the_same_losses(ranks, tmp_path, cls, factor):
    options = {"grad_accumulation_factor": factor}
    found = ranks.run(swept_on_ranks, str(tmp_path), cls, factor, options, world_size=2)
    assert found[0]["losses"] == pytest.approx(plain_losses(cls), rel=1e-12)
    assert found[0]["world_size"] == 2


def swept_on_ranks(folder, cls, factor, options):
    return swept(folder, cls, factor, **options)


def test_a_loss_that_is_not_finite_ends_it(tmp_path):
    rates = [1e-3, 1e-3, 1e200, 1e200, 1e-3]
    found = swept(tmp_path, Regression, rates=rates)
    assert found["ended"] in {"not finite", "diverged"}
    assert 3 <= len(found["losses"]) < len(rates)
    assert all(loss == loss for loss in found["losses"])  # noqa: PLR0124 -- no NaN


def test_a_loss_that_leaves_its_course_ends_it(tmp_path):
    found = swept(tmp_path, Regression, rates=rates_between(1e-3, 1e3, 40))
    assert found["ended"] == "diverged"
    assert found["losses"][-1] > 4 * min(found["losses"])
    assert found["rates"] == rates_between(1e-3, 1e3, 40)[: len(found["losses"])]


def test_groups_keep_their_ratio_also_after_a_warm_up():
    from ddpkit.run.lr_sweep import RateSetter

    layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
    groups = [
        {"params": layer.parameters(), "lr": lr}
        for layer, lr in zip(layers, (0.1, 0.01), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    RateSetter([optimizer]).set(0.5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])
