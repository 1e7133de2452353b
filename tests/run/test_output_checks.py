"""The size of a checkpoint is estimated before the first step."""

from __future__ import annotations

from torch import nn, optim

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
