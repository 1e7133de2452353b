"""The same augmented batches, and the same weights, whatever the workers and ranks: real ranks,
real workers.
"""

# ruff: noqa: NPY002 -- the global streams are what is tested

from __future__ import annotations

import contextlib
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from ddpkit.augmentation import sample_seed
from ddpkit.brain import Brain
from ddpkit.dataloader import Sharding, plan_of, shard
from ddpkit.distributed import get_rank, get_world_size
from ddpkit.seed import seed_epoch_streams

SIZE = 26
GLOBAL_BATCH = 8


class Augmented(Dataset):
    """A vector per sample, and noise from the streams that ``kind`` names."""

    def __init__(self, kind, size=SIZE):
        self.kind = kind
        self.size = size

    def __len__(self):
        return self.size

    def noise(self):
        drawn = []
        if self.kind in {"python", "all"}:
            drawn += [random.random(), random.gauss(0, 1)]
        if self.kind in {"numpy", "all"}:
            drawn += [np.random.rand(), np.random.randn()]
        if self.kind in {"torch", "all"}:
            drawn += torch.randn(2, dtype=torch.float64).tolist()
        if self.kind in {"own", "all"}:
            drawn += np.random.default_rng(sample_seed()).normal(size=2).tolist()
        return drawn

    def __getitem__(self, index):
        return torch.tensor([index, *self.noise()], dtype=torch.float64)


@contextlib.contextmanager
def three_workers_on_two_cores():
    """No warning of torch's that these are many."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


@three_workers_on_two_cores()
def batches_here(kind, num_workers, size):
    """This rank's samples of every batch of three epochs, as bytes; the global streams are the
    rank's own.
    """
    seed_epoch_streams(torch.initial_seed(), 1, 0)
    rank = get_rank() or 0
    world_size = get_world_size()
    options = {"num_workers": num_workers, "persistent_workers": num_workers > 0, "shuffle": True}
    sharding = Sharding(rank, world_size, seed=7)
    loader = shard(
        Augmented(kind, size),
        sharding,
        batch_size=GLOBAL_BATCH // world_size,
        **options,
    )
    plan = plan_of(loader)
    found = []
    for epoch in (1, 2, 3):
        loader.set_epoch(epoch)
        found.append(
            [batch[: plan.count(number)].numpy().tobytes() for number, batch in enumerate(loader)]
        )
    return found


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize("num_workers", [3, 0, 1])
@pytest.mark.parametrize("kind", ["all", "python", "numpy", "torch", "own"])
def test_the_same_augmented_batches_on_any_workers_and_ranks(ranks, kind, num_workers):
    """Every global batch is bit-identical, in its order, to the one that one process loads without
    workers.
    """
    expected = batches_here(kind, 0, SIZE)
    assert len({batch for epoch in expected for batch in epoch}) == 3 * 4, "nothing is drawn twice"
    assert batches_here(kind, num_workers, SIZE) == expected
    parts = ranks.run(batches_here, kind, num_workers, SIZE, world_size=2)
    joined = [
        [b"".join(pieces) for pieces in zip(*epoch, strict=True)]
        for epoch in zip(*parts, strict=True)
    ]
    assert joined == expected


class Classifier(Brain):
    """Trains on augmented data, with dropout nowhere, so that augmentation is all that is
    random.
    """

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[:, 1:])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions[:, 0], torch.sin(batch[:, 0]))

    def on_fit_start(self):
        self.losses = []
        super().on_fit_start()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.losses.append(stage_loss)


def train(num_workers):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    options = {
        "device": "cpu",
        "noprogressbar": True,
        "max_grad_norm": 0.5,
        "shard_evaluation": True,
    }
    brain = Classifier(
        {"net": net},
        lambda weights: torch.optim.Adam(weights, lr=0.01),
        run_opts=options,
    )
    kwargs = {
        "batch_size": GLOBAL_BATCH // get_world_size(),
        "shuffle": True,
        "num_workers": num_workers,
    }
    brain.fit(
        range(1, 4),
        Augmented("all"),
        Augmented("all", 11),
        train_loader_kwargs=kwargs,
        valid_loader_kwargs=kwargs,
    )
    return {
        name: value.clone() for name, value in brain.raw_modules.state_dict().items()
    }, brain.losses


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_training_with_augmentation_gives_the_same_weights(ranks, num_workers):
    """Training and validation: the random crops of a validation set are the same as well."""
    expected, losses = train(0)
    for weights, losses_there in ranks.run(train, num_workers, world_size=2):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
        assert losses_there == pytest.approx(losses, abs=1e-10)
