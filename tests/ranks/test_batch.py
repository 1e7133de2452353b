"""Padded batches weigh by their samples, on any number of ranks."""

from __future__ import annotations

import pytest
import torch

from ddpkit.batch import PaddedBatch
from ddpkit.brain import Brain
from ddpkit.sampler import DynamicBatchSampler
from tests.recipes import QUIET, linear, sgd, weights

LENGTHS = [1 + (7 * k) % 5 for k in range(13)]


class Ragged:
    """Dicts of sequences; known by what it offers, as SpeechBrain's dataset is."""

    pipeline = None

    def __init__(self):
        made = torch.Generator().manual_seed(3)
        self.rows = [torch.randn(n, 3, generator=made, dtype=torch.float64) for n in LENGTHS]

    def set_output_keys(self, keys):
        raise AssertionError("a loader changes no dataset")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"id": index, "sig": self.rows[index]}


class MaskedSum(Brain):
    """The mean over the samples of each one's sum over what is not padding."""

    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        sig, lengths = batch.sig
        steps = torch.arange(sig.shape[1]) < (lengths * sig.shape[1]).round().unsqueeze(1)
        return (self.modules.net(sig).squeeze(-1) * steps).sum(1)

    def compute_objectives(self, predictions, batch, stage):
        return (predictions - 1).square().mean()


class Batches:
    """A loader of one's own, with batches of different sizes."""

    def __iter__(self):
        data = Ragged()
        for first, last in ((0, 3), (3, 4), (4, 8), (8, 9), (9, 13)):
            yield PaddedBatch([data[k] for k in range(first, last)])


def train(kind, factor=1, workers=0):
    brain = MaskedSum(
        {"net": linear()},
        sgd(0.01),
        None,
        {**QUIET, "grad_accumulation_factor": factor},
    )
    options = {
        "plan": {"batch_size": 2, "num_workers": workers},
        "dynamic": {
            "batch_sampler": DynamicBatchSampler(Ragged(), 8.0, 3, lengths_list=LENGTHS, seed=1)
        },
        "own": {},
    }[kind]
    result = brain.fit(
        range(1, 3),
        Batches() if kind == "own" else Ragged(),
        train_loader_kwargs=options,
    )
    return weights(brain), result.train_loss


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(("kind", "world"), [("plan", 2), ("dynamic", 3), ("own", 2), ("own", 3)])
def test_unequal_padded_batches_come_to_the_same_weights_on_any_number_of_ranks(ranks, kind, world):
    [(expected, loss)] = ranks.run(train, kind, world, world_size=1)
    for found, found_loss in ranks.run(train, kind, 1, world_size=world):
        assert found_loss == pytest.approx(loss, abs=1e-10)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_they_come_out_of_workers_on_every_rank(ranks):
    (with_workers, _), (again, _) = ranks.run(train, "plan", 1, 1, world_size=2)
    without, _ = ranks.run(train, "plan", 1, 0, world_size=2)[0]
    assert with_workers.keys() == again.keys() == without.keys()
    for name, value in without.items():
        assert torch.equal(with_workers[name], value)
        assert torch.equal(again[name], value)
