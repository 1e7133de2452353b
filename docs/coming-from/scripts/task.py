"""What each script of these pages trains: a small network that tells three spiral arms apart."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def spirals(size, seed):
    """Return points on three intertwined arms, and the number of the arm of each."""
    generator = torch.Generator().manual_seed(seed)
    arms = torch.arange(size) % 3
    radius = torch.rand(size, generator=generator)
    angle = 4 * radius + 2.1 * arms + 0.2 * torch.randn(size, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms)


def network():
    """Return a network with a batch norm, which has to know of the other processes' samples."""
    return nn.Sequential(
        nn.Linear(2, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)
    )
