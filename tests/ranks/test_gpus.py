"""What ranks do with GPUs, as far as it can be seen where there is none."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpkit import device
from ddpkit.brain import Brain
from ddpkit.run_opts import RunOptions
from ddpkit.strategies.ddp import DDP


def brain_in_a_group_of_the_script(backend, chosen):
    """Make a Brain as under ``mp.spawn``: no launcher, and a process group that the script has
    started.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    bound = None if chosen is None else torch.device(f"cuda:{chosen[dist.get_rank()]}")
    dist.group.WORLD.bound_device_id = bound
    with (
        mock.patch.object(device, "count_devices", lambda kind: {"cuda": 4}.get(kind, 0)),
        mock.patch.object(device, "accelerator_kind", return_value="cuda"),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(dist, "get_backend", return_value=backend),
    ):
        return Brain({}, run_opts={"noprogressbar": True}).device


@pytest.mark.parametrize(("backend", "chosen"), [("nccl", (2, 1)), ("gloo", None)])
def test_a_gpu_for_each_rank_is_right_and_gloo_may_share_one(ranks, backend, chosen):
    expected = ["cuda:0", "cuda:0"] if chosen is None else ["cuda:2", "cuda:1"]
    assert ranks.run(brain_in_a_group_of_the_script, backend, chosen) == expected


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Linear(2, 1)
        self.right = nn.Linear(2, 3)
        self.never = nn.Linear(2, 4)

    def forward(self, x, left):
        return (self.left if left else self.right)(x).sum()


def other_branches_than_the_other_rank(lefts):
    modules = nn.ModuleDict({"net": Branches()})
    strategy = DDP(RunOptions(device="cpu"))
    strategy.wrap(modules)
    with strategy.no_sync():
        modules.net.module(torch.tensor([[1.0, 2.0]]), lefts[dist.get_rank()]).backward()
    strategy.finish_gradients()
    return {
        name: None if one.grad is None else one.grad.tolist()
        for name, one in modules.net.module.named_parameters()
    }


def test_minor_5_gradients_that_not_every_rank_has_are_averaged_with_none_for_the_others(ranks):
    """Of different sizes on the ranks they would be added to each other, or wait for each other for
    ever.
    """
    found = ranks.run(other_branches_than_the_other_rank, (True, False))
    assert found[0] == found[1]
    assert found[0]["left.weight"] == [[0.5, 1.0]]
    assert found[0]["right.bias"] == [0.5, 0.5, 0.5]
    assert found[0]["never.weight"] is None
    assert ranks.run(other_branches_than_the_other_rank, (True, True))[1]["right.weight"] is None


def frozen_after_spreading(make):
    torch.manual_seed(dist.get_rank())
    layer = nn.Linear(2, 3).requires_grad_(requires_grad=False)
    make(layer)
    modules = nn.ModuleDict({"frozen": layer})
    DDP(RunOptions(device="cpu")).wrap(modules)
    return layer.weight.tolist()


def transpose_on_one(layer):
    if dist.get_rank():
        layer.weight = nn.Parameter(torch.randn(2, 3).t(), requires_grad=False)


def keep(layer):
    pass


@pytest.mark.parametrize("make", [transpose_on_one, keep])
def test_minor_11_frozen_parameters_that_are_not_contiguous_are_those_of_rank_0(ranks, make):
    """NCCL refuses them; gloo sends them in the order of memory, which may be another on each
    rank.
    """
    first, second = ranks.run(frozen_after_spreading, make)
    assert first == second
