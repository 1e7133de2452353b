"""``--strategy``, and the same answer from sharded weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpkit.brain import Brain
from ddpkit.errors import ConfigError


def refused(**options):
    with pytest.raises(ConfigError) as caught:
        Brain({"net": nn.Linear(2, 1)}, torch.optim.SGD, run_opts={"device": "cpu", **options})
    return str(caught.value)


def refused_on_ranks():
    return refused(strategy="single")


def test_single_is_for_one_process(ranks):
    for message in ranks.run(refused_on_ranks, world_size=2):
        assert "strategy='single' is for one process, and a launcher has started 2" in message
