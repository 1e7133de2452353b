"""Which optimizers of torch have fused kernels, and where those are used."""

from __future__ import annotations

from typing import Any

import torch

UNASKED: tuple[Any, ...] = (torch.optim.Adam, torch.optim.AdamW)  # are fused without being asked for it
WITH_FUSED: tuple[Any, ...] = (*UNASKED, torch.optim.SGD)
WIDE = (torch.float32, torch.float64)
GPUS = ("cuda",)  # kinds of devices that fused kernels are used on unasked, and that are not waited for
