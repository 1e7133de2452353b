"""The task of the three scripts: which of three spiral arms does a point lie on?"""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def spirals(size, seed):
    """Points on three intertwined arms, and the number of the arm."""
    chance = torch.Generator().manual_seed(seed)
    arms = torch.arange(size) % 3
    radius = torch.rand(size, generator=chance)
    angle = 4 * radius + 2.1 * arms + 0.2 * torch.randn(size, generator=chance)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms)


def network():
    return nn.Sequential(
        nn.Linear(2, 64, bias=False),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 3),
    )
