"""Learning rates on real ranks: one trace, whatever the number of processes."""

from __future__ import annotations

import math

import pytest
import torch

from tests.contract.test_lr_scaling import Scheduled
from tests.recipes import make, points, weights, world_size


def train(joined, factor, number, run_opts):
    """Train on a joined batch of all ranks, the schedule stepped after each optimizer step."""
    brain = make(Scheduled, grad_accumulation_factor=factor, **run_opts)
    brain.fit(
        [1, 2],
        points(number),
        train_loader_kwargs={"batch_size": joined // world_size(), "shuffle": True},
    )
    return brain.rates, brain.optimizer_step, brain.lr_scale, weights(brain)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
@pytest.mark.parametrize(("factor", "number"), [(1, 24), (3, 24), (2, 25), (1, 29)])
def test_schedules_step_once_per_optimizer_step_whatever_the_world_size(
    ranks,
    rule,
    factor,
    number,
):
    run_opts = {"lr_scaling": rule, "reference_batch_size": 3}
    [(rates, steps, scale, expected)] = ranks.run(train, 6, factor, number, run_opts, world_size=1)
    assert steps == len(rates) == 2 * math.ceil(math.ceil(number / 6) / factor)
    assert scale == {"none": 1.0, "linear": 2.0 * factor, "sqrt": (2.0 * factor) ** 0.5}[rule]
    assert len({tuple(one) for one in rates}) == min(steps, 13)
    for world in (2, 3):
        for found in ranks.run(train, 6, factor, number, run_opts, world_size=world):
            assert found[:3] == (rates, steps, scale)
            for name, value in expected.items():
                torch.testing.assert_close(found[3][name], value, rtol=0, atol=1e-10)


def train_per_process(run_opts):
    brain = make(Scheduled, **run_opts)
    brain.fit([1], points(24), train_loader_kwargs={"batch_size": 2})
    return brain.rates[0], brain.lr_scale


@pytest.mark.corner
@pytest.mark.parametrize("world", [1, 2, 3])
def test_more_processes_with_the_same_batch_each_raise_the_rate(ranks, world):
    run_opts = {"lr_scaling": "linear", "reference_batch_size": 2}
    for rates, scale in ranks.run(train_per_process, run_opts, world_size=world):
        assert scale == world
        assert rates == [pytest.approx(0.1 * world)]
