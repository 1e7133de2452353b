"""The learning rates of a run in words."""

from __future__ import annotations

import torch

from ddpkit.run.learning_rates import rate_of_bar


def test_a_rate_that_is_on_a_gpu_is_not_waited_for():
    """A tensor without values stands for it: to read it would be an error."""
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    there = torch.optim.SGD(weights[:1], lr=0.1)
    there.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    here = torch.optim.Adam(weights[1:], lr=torch.tensor(0.25))
    assert rate_of_bar([there]) == ""
    assert rate_of_bar([there, here]) == "0.25"
