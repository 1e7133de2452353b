"""Averages gradients over the ranks where DDP does not do it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ddpkit.base import reads_device
from ddpkit.comm import start_sum

if TYPE_CHECKING:
    from collections.abc import Sequence


@reads_device
def average_gradients(
    parameters: Sequence[nn.Parameter],
    group: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Average gradients over the ranks, where DDP does not. A rank that has none of a parameter
    gets the others'.

    Args:
        parameters: at least one, the same on all ranks.
        group: of the ranks.

    Ranks: collective.
    """
    own_ones = [parameter.grad is not None for parameter in parameters]
    sums = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in parameters
    ]
    present = torch.tensor(own_ones, dtype=sums[0].dtype)
    # One length on all ranks, whatever each has: NCCL does not notice where they differ.
    flat = torch.cat(
        [
            tensor.flatten()
            for tensor in (
                *sums,
                present.to(sums[0].device, non_blocking=True),
            )
        ]
    )
    start_sum(flat, group)()
    flat /= torch.distributed.get_world_size(group)
    *averages, present = torch.split(flat, [tensor.numel() for tensor in (*sums, present)])
    exists = own_ones if all(own_ones) else present.tolist()
    for parameter, own, average, anywhere in zip(parameters, sums, averages, exists, strict=True):
        if anywhere:  # a rank that took another branch gets the others' gradients
            own.copy_(average.view_as(own))
            parameter.grad = own
