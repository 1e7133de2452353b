"""Modules and options that a recipe assigns, on several processes: the strategy has the new ones,
too.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ddpkit.distributed import get_rank
from ddpkit.errors import ConfigError
from tests.recipes import QUIET, Regression, make, points, sgd


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()


def numbers(brain):
    found = [
        one.detach() for one in (*brain.raw_modules.parameters(), *brain.raw_modules.buffers())
    ]
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in found]
    return torch.cat([one.double().flatten() for one in whole]).tolist()


def train(brain):
    brain.fit([1, 2], points(12))
    return numbers(brain)


def train_replaced(options, is_replaced):
    options = {"global_batch_size": 4, "ema_decay": 0.5, **options}
    brain = Regression({"net": net(1 if is_replaced else 2)}, sgd(), None, {**QUIET, **options})
    if is_replaced:
        brain.modules = {"net": net(2)}
    found = train(brain)
    state = {} if brain.ema is None else brain.ema.state_dict()
    averages = [one for one in state.values() if one.is_floating_point()]
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in averages]
    return found, [one.tolist() for one in whole]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "zero1"},
        {"strategy": "fsdp"},
        {"ddp_comm_hook": "post_local_sgd", "local_sgd_period": 2, "ema_decay": None},
    ],
    ids=str,
)
def test_other_modules_are_trained_as_given_ones(ranks, options):
    found = ranks.run(train_replaced, options, True, world_size=2)
    assert found == ranks.run(train_replaced, options, False, world_size=2)
    assert found[0] == found[1]


def train_with(given, assigned):
    brain = make(net=net(2), global_batch_size=4, **given)
    if assigned:
        brain.run_opts = {**brain.run_opts, **assigned}
    return train(brain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"sync_batchnorm": False}, {"find_unused_parameters": True}, {"micro_batch_size": 1}],
    ids=str,
)
def test_options_that_are_assigned_are_those_of_the_strategy(ranks, options):
    found = ranks.run(train_with, {}, options, world_size=2)
    assert found == ranks.run(train_with, options, {}, world_size=2)
    if "sync_batchnorm" in options:
        assert found != ranks.run(train_with, {}, {}, world_size=2)


def assign_a_strategy():
    brain = make(net=net(2))
    with pytest.raises(
        ConfigError,
        match="strategy='fsdp' comes too late: strategy='auto' is in use",
    ):
        brain.run_opts = {**brain.run_opts, "strategy": "fsdp"}
    with pytest.raises(ConfigError, match="ddp_comm_hook='bf16' comes too late"):
        brain.run_opts["ddp_comm_hook"] = "bf16"
    brain.modules = {"net": net(2 + get_rank())}  # rank 0's values count
    return train(brain)


@pytest.mark.costly
def test_another_strategy_is_refused_and_the_run_goes_on_alike(ranks):
    first, second = ranks.run(assign_a_strategy, world_size=2)
    assert first == second
