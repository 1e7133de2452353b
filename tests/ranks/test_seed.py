"""Real ranks: one seed to begin with, then a stream for each rank."""

# ruff: noqa: NPY002 -- NumPy's global state is what is tested

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ddpkit.seed import seed_epoch_streams, seed_everything


def draw():
    return random.random(), np.random.rand(), float(torch.rand(()))


def draws(seed, epoch=1, step=0):
    seed_everything(seed, verbose=False)
    common = draw()
    stream = seed_epoch_streams(seed, epoch, step)
    return common, stream, draw(), draw()


def test_the_model_s_numbers_are_the_same_and_the_noise_is_not(ranks):
    first, second = ranks.run(draws, 7)
    assert first[0] == second[0]
    for one, other in zip(first[1:], second[1:], strict=True):
        assert one != other
    numbers = [number for rank in (first, second) for drawn in rank[2:] for number in drawn]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.costly
def test_the_streams_follow_from_seed_rank_and_epoch(ranks):
    runs = {
        arguments: ranks.run(draws, *arguments) for arguments in [(7,), (8,), (7, 2), (7, 2, 5)]
    }
    assert ranks.run(draws, 7) == runs[7,]
    streams = [rank[1] for run in runs.values() for rank in run]
    assert len(set(streams)) == len(streams)
