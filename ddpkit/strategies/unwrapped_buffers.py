"""Sends the buffers of entries that torch does not wrap, because they have nothing to train.
Nothing else sends them while a run trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ddpkit.strategies.batch_norm_layers import has_moving_buffers
from ddpkit.strategies.sending import send_from_main

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


class UnwrappedBuffers:
    """Keeps buffers equal on all ranks, such as those of a codebook without parameters.

    They are sent with each optimizer step, in one message, once the forward passes of all ranks
    are over. A hook before a forward pass, as DDP has it, would wait for ranks that do not call the
    module.

    Args:
        device: of this rank; what is elsewhere is left alone.

    Ranks: collective.
    """

    def __init__(self, device: str) -> None:
        self.modules: list[nn.Module] = []
        self._kind = torch.device(device).type

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Take the entries that are not wrapped now, and whose buffers may move."""
        self.modules = [module for module in modules if has_moving_buffers(module)]

    def send(self) -> None:
        """Give every rank the buffers of rank 0, where a module trains."""
        self._send(module for module in self.modules if module.training)

    def send_all(self) -> None:
        """Give every rank the buffers of rank 0, before an evaluation."""
        self._send(self.modules)

    def _send(self, modules: Iterable[nn.Module]) -> None:
        # Also where no rank has moved a buffer. To agree on that would be a message as well.
        send_from_main(
            buffer
            for module in modules
            for buffer in module.buffers()
            if buffer.device.type == self._kind
        )
