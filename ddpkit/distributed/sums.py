"""Sums of numbers over all ranks."""

from __future__ import annotations

from typing import Any

import torch

from ddpkit.base import is_distributed_initialized
from ddpkit.comm import get_runtime, keep_alive
from ddpkit.distributed.collectives import ddp_all_reduce
from ddpkit.distributed.marked_sums import MARKED_NUMBERS, start_sum_over_ranks
from ddpkit.distributed.object_gathering import gather_objects


def sum_over_ranks(values: list[float], call: str = "sum_over_ranks") -> list[float]:
    """Add up a few numbers over all ranks in float64, up to 30 in one message; every rank gets the
    same bits.

    Args:
        values: the same number of them on every rank.
        call: names the call, the same on every rank.

    Returns:
        The sums; the values themselves without a process group.

    Ranks: collective.

    Example:
        >>> sum_over_ranks([1.5, 2.0])
        [1.5, 2.0]
    """
    if not is_distributed_initialized():
        return list(values)
    first = values[:MARKED_NUMBERS]
    rest = values[MARKED_NUMBERS:]
    with get_runtime().mailbox.forgetting():
        sums = start_sum_over_ranks(first, f"{call} ({len(values)} number(s))")()
        return sums + (
            ddp_all_reduce(keep_alive(torch.tensor(rest, dtype=torch.float64))).tolist()
            if rest
            else []
        )


def sum_exactly(values: list[Any]) -> list[Any]:
    """Add up a few numbers over all ranks without rounding: whole numbers and fractions stay what
    they are.

    Args:
        values: the same number of them on every rank.

    Returns:
        The sums, on every rank.

    Ranks: collective.

    Example:
        >>> sum_exactly([1, 2.5])
        [1, 2.5]
    """
    return [sum(numbers) for numbers in zip(*gather_objects(lambda: values), strict=True)]
