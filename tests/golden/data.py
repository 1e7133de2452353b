"""The rows that all golden cases train on, as a table and as streams."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

SAMPLES = 41
FEATURES = 6
SPOILT = 7  # the row that is not finite in a spoilt table


class Table(Dataset):
    """Rows of a table, each of which may be augmented by Python's, numpy's and torch's random
    numbers.
    """

    def __init__(self, dtype, *, noisy=False, spoilt=False):
        numbers = torch.arange(SAMPLES * FEATURES, dtype=torch.float64).reshape(SAMPLES, FEATURES)
        self.inputs = torch.sin(numbers * 0.37).to(dtype)
        self.targets = self.inputs.sum(1, keepdim=True).mul(0.3)
        self.noisy = noisy
        if spoilt:
            self.inputs[SPOILT, 2] = torch.inf

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        row = self.inputs[index]
        if self.noisy:
            row = row + torch.rand(FEATURES, dtype=row.dtype) * 0.1
            row = row + random.random() * 0.1
            row = row + np.random.rand() * 0.1  # noqa: NPY002 -- as recipes do
        return row, self.targets[index]


class Stream(IterableDataset):
    """The rows one after the other; ddpkit divides them over ranks and workers by counting."""

    def __init__(self, dtype):
        self.table = Table(dtype)

    def __iter__(self):
        return (self.table[index] for index in range(SAMPLES))


class DividedStream(Stream):
    """A stream that divides itself."""

    num_shards = 12

    def __init__(self, dtype, first=0, step=1):
        super().__init__(dtype)
        self.first = first
        self.step = step

    def shard(self, num_shards, index):
        return DividedStream(self.table.inputs.dtype, index, num_shards)

    def __iter__(self):
        return (self.table[index] for index in range(self.first, SAMPLES, self.step))


def make_data(kind, dtype):
    """Make the training data of a case by the name of its kind."""
    makers = {
        "table": Table,
        "noisy": lambda of: Table(of, noisy=True),
        "spoilt": lambda of: Table(of, spoilt=True),
        "stream": Stream,
        "divided stream": DividedStream,
    }
    return makers[kind](dtype)
