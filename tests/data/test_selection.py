"""What a digest of a dataset's selection sees, and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, SubsetRandomSampler

from ddpkit.data.selection import selection_facts


class Wrapper(Dataset):
    """Passes another dataset on, under an attribute."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index


def words(source):
    return list(selection_facts("train", source).values())


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_the_same_indices_have_the_same_digest_in_any_container(kind):
    assert words(Subset(range(99), kind([0, 5, 7]))) == words(Subset(range(99), [0, 5, 7]))


@pytest.mark.parametrize(
    "make",
    [
        lambda chosen: Subset(range(99), chosen),
        lambda chosen: Subset(range(99), np.array(chosen)),
        lambda chosen: Subset(Subset(range(99), chosen), [0, 1]),
        lambda chosen: ConcatDataset([Subset(range(99), [1]), Subset(range(99), chosen)]),
        lambda chosen: Wrapper(inner=Subset(range(99), chosen)),
        lambda chosen: Wrapper(parts=[Subset(range(99), chosen)]),
        lambda chosen: Wrapper(data_ids=[f"/node1/{one}" for one in chosen]),
        lambda chosen: Wrapper(order=torch.tensor(chosen)),
        SubsetRandomSampler,
    ],
)
def test_other_samples_have_another_digest(make):
    assert words(make([0, 5, 7])) == words(make([0, 5, 7])) != words(make([0, 6, 7])) != []


def test_a_range_is_not_written_out():
    assert words(Subset(range(10**12), range(0, 10**12, 2)))


@pytest.mark.parametrize(
    "source",
    [
        [1, 2, 3],
        Wrapper(indices=[1, 2]),
        Wrapper(indices=[1.5, 2.5, 3.5]),
        Wrapper(indices=[[1], [2], [3, 4]]),
        Wrapper(indices=torch.tensor(3)),
        Wrapper(index={"a": 1, "b": 2, "c": 3}),
        Wrapper(noise=torch.arange(3)),
    ],
    ids=["list", "short", "floats", "lists", "no shape", "dict", "another name"],
)
def test_what_is_no_selection_is_left_alone(source):
    assert words(source) == []


def test_datasets_that_hold_each_other_end():
    one = Wrapper(indices=[1, 2, 3])
    other = Wrapper()
    one.inner = other
    other.inner = one
    assert len(words(one)) == len(words(other)) == 1


def test_a_folder_of_each_machine_is_no_difference():
    facts = [
        selection_facts("train", Wrapper(ids=[f"/node{node}/{k}" for k in range(3)]))
        for node in range(2)
    ]
    assert facts[0] == facts[1]
