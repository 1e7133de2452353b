"""Averages of tensors over the ranks: the same bits on all of them."""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from ddpkit.base import waiting
from ddpkit.comm import control_group
from ddpkit.device import widest_float
from ddpkit.errors import RankMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable

BUCKET_ELEMENTS = 1 << 25  # of one collective, and of the memory that it takes
UNEVEN = (
    "The ranks have other tensors to average (here {} elements in {} tensors). Give the same ones "
    "on every rank, in one order: an optimizer has no state for a parameter that a rank has not "
    "used yet."
)


def average_over_ranks(tensors: Iterable[torch.Tensor], device: str) -> None:
    """Replace tensors by their averages over the ranks, the same bits on all; integers by rank 0's.

    Half precision is added up in float32, and single numbers in float64: a count of steps stays a
    whole number.

    Args:
        tensors: are changed in place; of any shapes and dtypes, alike on all ranks.
        device: of this rank.

    Raises:
        RankMismatchError: the ranks have other shapes, dtypes or devices. On every rank, before
            anything is changed.

    Ranks: collective.

    Example:
        >>> average_over_ranks([torch.ones(2)], "cpu")  # one process
    """
    if not dist.is_initialized():
        return
    given = list(tensors)
    kinds = [(tuple(tensor.shape), tensor.dtype, tensor.device.type) for tensor in given]
    own = zlib.crc32(repr(kinds).encode())
    most = torch.tensor([own, -own])
    with waiting():
        dist.all_reduce(
            most,
            dist.ReduceOp.MAX,
            group=control_group(),
        )
    largest, smallest = most.tolist()
    if largest != -smallest:
        raise RankMismatchError(UNEVEN.format(sum(map(torch.numel, given)), len(given)))
    average_equal(given, torch.device(device))


@torch.no_grad()
def average_equal(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Replace tensors by their averages over the ranks, the same bits on all; integers by rank 0's.

    Half precision is added up in float32, and single numbers in float64: Adam's count of steps
    stays a whole number. What is in host memory beside the device travels there.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        is_exact = not (tensor.is_floating_point() or tensor.is_complex())
        wide = widest_float(tensor.device) if tensor.numel() == 1 else torch.float32
        dtype = tensor.dtype if is_exact else torch.promote_types(tensor.dtype, wide)
        kinds.setdefault((dtype, tensor.device), []).append(tensor)
    for (dtype, where), alike in kinds.items():
        group = control_group() if where.type != device.type else None
        ends = itertools.accumulate(tensor.numel() for tensor in alike)
        for _, pairs in itertools.groupby(
            zip(
                alike,
                ends,
                strict=True,
            ),
            lambda pair: pair[1] // BUCKET_ELEMENTS,
        ):
            bucket = [tensor for tensor, _ in pairs]
            flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in bucket])
            if dtype.is_floating_point or dtype.is_complex:
                # before the sum, which could overflow: a mask has the lowest number
                flat /= dist.get_world_size()
                with waiting():
                    dist.all_reduce(flat, group=group)
            else:
                with waiting():
                    dist.broadcast(
                        flat.view(torch.uint8),
                        src=0,
                        group=group,
                    )
            for target, values in zip(
                bucket,
                torch.split(flat, [tensor.numel() for tensor in bucket]),
                strict=True,
            ):
                target.copy_(values.view_as(target))
