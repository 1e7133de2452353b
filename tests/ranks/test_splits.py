"""Splits that nobody has seeded are others on each rank: told before the first step, whatever
sample 0 is.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, SubsetRandomSampler, random_split

from ddpkit.distributed import get_rank
from ddpkit.errors import RankMismatchError
from tests.recipes import make, points

SIZE = 20
KWARGS = {"batch_size": 2}


def fold(*, seeded):
    """Return the indices of a split as ``KFold(shuffle=True)`` gives them: sorted, and sample 0 is
    in it.
    """
    generator = np.random.default_rng(3 if seeded else 30 + (get_rank() or 0))
    held_out = 1 + generator.permutation(SIZE - 1)[:5]
    return np.setdiff1d(np.arange(SIZE), held_out), np.sort(held_out)


class Files(Dataset):
    """Holds the chosen samples themselves, as a list of files does."""

    def __init__(self, chosen):
        self.files = [points(SIZE)[k] for k in chosen]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return self.files[index]


class Broken(Files):
    """Cannot load the sample in its middle, which is seen when it is trained on, and not before."""

    def __getitem__(self, index):
        if index == len(self) // 2:
            raise OSError("this file is broken")
        return super().__getitem__(index)


def subset(chosen):
    return Subset(points(SIZE), chosen)


def concatenated(chosen):
    return ConcatDataset(
        [Subset(points(3), range(3)), Subset(Subset(points(SIZE), range(SIZE)), chosen)]
    )


KINDS = {
    "subset": subset,
    "subset of a list": lambda chosen: subset(chosen.tolist()),
    "files": Files,
}
KINDS |= {"concatenated": concatenated}


def train(kind, seeded, stage="fit", num_workers=0):
    torch.manual_seed(2)
    chosen, held_out = fold(seeded=seeded)
    brain = make()
    kwargs = {**KWARGS, "num_workers": num_workers}
    try:
        if stage == "fit":
            brain.fit([1], KINDS[kind](chosen), train_loader_kwargs=kwargs)
        elif stage == "valid":
            brain.fit(
                [1],
                points(SIZE),
                KINDS[kind](held_out),
                train_loader_kwargs=kwargs,
                valid_loader_kwargs=kwargs,
            )
        elif stage == "evaluate":
            brain.evaluate(KINDS[kind](held_out), test_loader_kwargs=kwargs)
        else:
            brain.predict(KINDS[kind](held_out), loader_kwargs=kwargs)
    except RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("stage", ["fit", "valid", "evaluate", "predict"])
@pytest.mark.parametrize("kind", ["subset", "subset of a list", "concatenated"])
def test_a_split_that_shares_sample_0_is_told(ranks, kind, stage):
    for message in ranks.run(train, kind, False, stage, world_size=2):
        assert "selects (" in message
        assert "indices)" in message
        assert (
            "Seed it: give random_split a generator, KFold or train_test_split a random_state"
            in message
        )
        assert "is_sharded = True" in message
    assert ranks.run(train, kind, True, stage, world_size=2) == ["", ""]


@pytest.mark.costly
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_split_whose_samples_alone_tell_is_told(ranks, num_workers):
    for message in ranks.run(train, "files", False, "fit", num_workers, world_size=2):
        assert "the ranks do not hold the same data" in message
        assert "such as a split" in message
    assert ranks.run(train, "files", True, "fit", num_workers, world_size=2) == ["", ""]


def split_at_random():
    torch.manual_seed(get_rank())
    train_set, _ = random_split(points(SIZE), [15, 5])
    with pytest.raises(
        RankMismatchError,
        match=r"samples that train selects \(Subset.indices\): 15 of digest",
    ):
        make().fit([1], train_set, train_loader_kwargs=KWARGS)


def test_random_split_without_a_seed_is_told(ranks):
    ranks.run(split_at_random, world_size=2)


def sample_at_random():
    sampler = SubsetRandomSampler(fold(seeded=False)[0].tolist())
    with pytest.raises(RankMismatchError, match=r"SubsetRandomSampler.indices"):
        make().fit([1], points(SIZE), train_loader_kwargs={**KWARGS, "sampler": sampler})


def test_a_sampler_over_a_split_is_told_before_the_optimizer_is_made(ranks):
    ranks.run(sample_at_random, world_size=2)


def train_until_it_breaks(rank_shift):
    chosen = (fold(seeded=True)[0] + rank_shift * get_rank()) % SIZE
    make().fit([1], Broken(chosen), train_loader_kwargs=KWARGS)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_sample_that_cannot_be_loaded_leaves_the_first_to_be_compared(ranks, shift):
    outcomes = ranks.outcomes(train_until_it_breaks, shift, world_size=2)
    expected = "RankMismatchError" if shift else "OSError"
    assert expected in {one.error_type for one in outcomes}
