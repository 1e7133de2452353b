"""Which optimizers of torch have fused kernels, and where those are used."""

from __future__ import annotations

from typing import Any

import torch

# are fused without being asked for it
UNASKED: tuple[Any, ...] = (torch.optim.Adam, torch.optim.AdamW)
WITH_FUSED: tuple[Any, ...] = (*UNASKED, torch.optim.SGD)
WIDE = (torch.float32, torch.float64)
# kinds of devices that fused kernels are used on unasked, and that are not waited for
GPUS = ("cuda",)
