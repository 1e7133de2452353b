"""An attribute of the dataset that changes from epoch to epoch does not reach persistent workers:
that is said.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset

from tests.recipes import QUIET, Squares, sgd


class Levels(Dataset):
    """Each sample is the level that the dataset has where it is loaded."""

    level = 0
    untold = None

    def __init__(self):
        self.level = 0
        self.rates = (0.5, 0.25)
        self._private = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([float(self.level)])


class Told(Levels):
    def set_epoch(self, epoch):
        self.level = epoch


class Stream(IterableDataset):
    def __init__(self):
        self.level = 0

    def __iter__(self):
        return iter([torch.tensor([float(self.level)])] * 4)


class ToldStream(Stream):
    def set_epoch(self, epoch):
        self.level = epoch


class Rising(Squares):
    """Sets the level of the dataset in each epoch, and notes the levels that come."""

    def on_stage_start(self, stage, epoch=None):
        self.data._private = epoch
        if self.sets:
            self.data.level = epoch

    def compute_forward(self, batch, stage):
        self.levels += batch.flatten().tolist()
        return self.modules.net(batch)


def levels(data, *, sets, wrap=None, workers=1, persistent=True):
    brain = Rising({"net": nn.Linear(1, 1)}, sgd(), None, QUIET)
    brain.data = data
    brain.sets = sets
    brain.levels = []
    kwargs = {"batch_size": 4, "num_workers": workers, "persistent_workers": persistent}
    brain.fit([1, 2, 3], data if wrap is None else wrap(data), train_loader_kwargs=kwargs)
    return brain.levels[::4]


def warnings(caplog):
    return [one for one in caplog.messages if one.startswith("persistent_workers=True")]


def in_subset(data):
    return Subset(data, range(4))


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        (Levels, None),
        pytest.param(Levels, in_subset, marks=pytest.mark.slow),
        pytest.param(Stream, None, marks=pytest.mark.slow),
    ],
)
def test_an_attribute_that_persistent_workers_do_not_get_is_named_once(kind, wrap, caplog):
    assert levels(kind(), sets=True, wrap=wrap) == [1.0, 1.0, 1.0]
    [told] = warnings(caplog)
    assert f"{kind.__name__}.level has changed from 1 to 2" in told
    assert "_private" not in told


@pytest.mark.parametrize("kind", [Told, pytest.param(ToldStream, marks=pytest.mark.slow)])
def test_what_set_epoch_changes_reaches_persistent_workers(kind, caplog):
    assert levels(kind(), sets=False) == [1.0, 2.0, 3.0]
    assert not warnings(caplog)


@pytest.mark.parametrize("given", [{"workers": 0}, pytest.param({}, marks=pytest.mark.slow)])
def test_workers_that_are_started_in_each_epoch_have_what_was_set(given, caplog):
    assert levels(Levels(), sets=True, persistent=False, **given) == [1.0, 2.0, 3.0]
    assert not warnings(caplog)
