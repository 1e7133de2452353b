"""Waits for other ranks that torch makes by itself in the middle of a pass, on a CPU.

FSDP2 gathers the weights of a block before it is used, and sends gradients after; DDP sends buffers
before a forward pass. A rank that is late makes these wait on the others, in their own forward or
backward pass, as far as can be seen from outside.

Source: ``FSDPModule.set_custom_all_gather`` and ``set_custom_reduce_scatter`` in torch 2.13, which
set what is read and set here, as torch offers no way to ask for what is there;
``DistributedDataParallel._sync_buffers``.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddpkit.base import waiting

_COLLECTIVES = ("_all_gather_comm", "_reduce_scatter_comm")


class _Told:
    """A collective of FSDP2 that tells when it waits; in all else it is that collective."""

    def __init__(self, collective: Any) -> None:
        self._collective = collective

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        with waiting():
            return self._collective(*tensors, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collective, name)


def tell_waits_of_fsdp(block: Any) -> int:
    """Have a block tell when it waits for other ranks; otherwise, where torch's FSDP is another,
    nothing.

    Args:
        block: divided by ``fully_shard``, on a CPU.

    Returns:
        How many of its collectives tell it.

    Ranks: local.

    Example:
        >>> import torch
        >>> tell_waits_of_fsdp(torch.nn.Linear(1, 1))
        0
    """
    find = getattr(block, "_get_fsdp_state", None)
    state = None if find is None else find()
    groups = getattr(state, "_fsdp_param_groups", None) or [
        getattr(state, "_fsdp_param_group", None)
    ]
    told = 0
    for group in groups:
        for name in _COLLECTIVES:
            collective = getattr(group, name, None)
            if callable(collective):
                setattr(group, name, _Told(collective))
                told += 1
    return told


class TellsWaitsOfBuffers(DistributedDataParallel):
    """DDP that tells when it sends buffers; otherwise, where torch has no such method, the same.

    Ranks: as torch's own.
    """

    def _sync_buffers(self) -> None:
        with waiting():
            super()._sync_buffers()  # type: ignore[no-untyped-call]
