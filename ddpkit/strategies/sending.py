"""Gives every rank the values that tensors have on rank 0: many in one message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ddpkit.base import waits_for_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MESSAGE_BYTES = 1 << 25  # of one message, and of the memory that it takes; a larger tensor is one
PACKABLE = (torch.Tensor, nn.Parameter)  # their bytes are their values


@torch.no_grad()
@waits_for_ranks
def send_from_main(tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank the values that some tensors have on rank 0.

    Args:
        tensors: are changed; alike on all ranks, but for their values.

    Ranks: collective.
    """
    for message in _messages(tensors):
        if len(message) == 1:
            _send_alone(message[0])
        else:
            _send_packed(message)


def _messages(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Divide tensors into messages. In each the elements get smaller, so that all of them stand
    where their dtype allows it.
    """
    packed: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if type(tensor) in PACKABLE:
            packed.setdefault(tensor.device, []).append(tensor)
        else:
            yield [tensor]
    for alike in packed.values():
        message: list[torch.Tensor] = []
        size = 0
        for tensor in sorted(alike, key=torch.Tensor.element_size, reverse=True):
            if message and size + tensor.nbytes > MESSAGE_BYTES:
                yield message
                message = []
                size = 0
            message.append(tensor)
            size += tensor.nbytes
        if message:
            yield message


def _send_alone(tensor: torch.Tensor) -> None:
    # Else NCCL refuses it, and gloo sends it in the order of memory.
    sent = _plain(tensor)
    torch.distributed.broadcast(sent, src=0)
    if sent.data_ptr() != tensor.data_ptr():
        _put(sent, tensor)


def _send_packed(tensors: list[torch.Tensor]) -> None:
    # by strides: that of a tensor with one element may be any, and view would keep it
    flat = [_plain(tensor).as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    sent = torch.cat([values.view(torch.uint8) for values in flat])
    torch.distributed.broadcast(sent, src=0)
    if torch.distributed.get_rank() == 0:
        return
    parts = torch.split(sent, [tensor.nbytes for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        _put(part.view(tensor.dtype).view(tensor.shape), tensor)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose bytes in memory are its values, in their order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _put(values: torch.Tensor, tensor: torch.Tensor) -> None:
    # Not a change that autograd counts, as a broadcast into the tensor is none: on the other ranks
    # alone, a loss that has yet to go backwards through a constant buffer would be refused.
    tensor.data.copy_(values)
