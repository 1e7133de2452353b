"""The size of a checkpoint is estimated before the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from ddpkit.ema import WeightAverage
from ddpkit.run.output_checks import state_bytes


def test_the_estimate_of_a_state():
    net = nn.Linear(9, 1)
    for optimizer, expected in (
        (optim.SGD(net.parameters(), lr=0.1), 40),
        (optim.SGD(net.parameters(), lr=0.1, momentum=0.9), 80),
        (optim.AdamW(net.parameters(), amsgrad=True), 160),
        (optim.RMSprop(net.parameters(), centered=True), 120),
    ):
        assert state_bytes([net, optimizer, net, "something else"]) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_average_of_weights_counts_as_it_is_saved(dtype):
    net = nn.Sequential(nn.Linear(30, 40, dtype=dtype), nn.BatchNorm1d(40, dtype=dtype))
    net[0].bias.requires_grad_(False)
    average = WeightAverage(nn.ModuleDict({"net": net}), decay=0.5)
    average.update()
    saved = [value for value in average.state_dict().values() if value.dim()]
    expected = sum(value.nbytes for value in saved)
    assert abs(state_bytes([average]) - expected) <= 0.1 * expected
    without = expected - net[0].bias.nbytes
    assert abs(average.saved_bytes([net[0].bias]) - without) <= 0.1 * without
