"""Parameters that an optimizer has and no entry of the modules: in the same answer, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddpkit.distributed import get_rank
from tests.rank_pool import RankPoolError
from tests.recipes import QUIET, Regression, linear, points

BATCH = {"batch_size": 4}


class Tempered(Regression):
    """Multiplies its predictions by a parameter of its own; one rank may not use it, or make it
    infinite.
    """

    unused_on = infinite_on = None
    most = 99

    def init_optimizers(self):
        self.factor = nn.Parameter(torch.full((1,), 1.0 + (get_rank() or 0), dtype=torch.float64))
        self.optimizer = torch.optim.AdamW([*self.modules.parameters(), self.factor], lr=0.05)
        self.optimizers_dict = {"all": self.optimizer}

    def compute_objectives(self, predictions, batch, stage):
        rank = get_rank() or 0
        factor = self.factor
        if rank == self.unused_on:
            factor = factor.detach()
        if rank == self.infinite_on and self.step == 2:
            factor = factor * float("inf")
        loss = F.mse_loss(predictions * factor, batch[1])
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss


class OnOneRank(Tempered):
    def init_optimizers(self):
        super().init_optimizers()
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1 + get_rank()))]})


class FrozenAtFirst(Tempered):
    def init_optimizers(self):
        super().init_optimizers()
        self.factor.requires_grad_(False)

    def on_stage_start(self, stage, epoch=None):
        self.factor.requires_grad_(epoch == 2)


class OwnBatch(Tempered):
    def fit_batch(self, batch):
        with self.no_sync(not self.should_step):
            loss = self.compute_objectives(self.modules.net(batch[0]), batch, None)
            self.backward(loss)
        if self.should_step:
            self.optimizers_step()
        return loss.detach()


def train(options):
    options = {"global_batch_size": 8, **options}
    kind = options.pop("kind", Tempered)
    samples = options.pop("samples", 53)
    attributes = {
        name: options.pop(name) for name in ("unused_on", "infinite_on", "most") if name in options
    }
    brain = kind({"net": linear()}, None, run_opts={**QUIET, **options})
    vars(brain).update(attributes)
    brain.fit([1, 2], points(samples), train_loader_kwargs=BATCH)
    weights = [one.tolist() for one in (*brain.raw_modules.parameters(), brain.factor)]
    return weights, brain.optimizer_step, brain.nonfinite_count


@pytest.mark.costly
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"global_batch_size": 12, "micro_batch_size": 2},
        {"kind": OwnBatch},
        {"samples": 9},
        {"kind": FrozenAtFirst},
    ],
    ids=["plain", "accumulated", "own fit_batch", "a rank without samples", "frozen at first"],
)
@pytest.mark.corner
def test_it_is_averaged_over_the_ranks(ranks, strategy, options):
    expected = train(options)
    found = ranks.run(train, {**options, "strategy": strategy})
    assert found[0] == found[1]
    assert found[0][1:] == expected[1:]
    for own, alone in zip(found[0][0], expected[0], strict=True):
        torch.testing.assert_close(torch.tensor(own), torch.tensor(alone), rtol=0, atol=1e-10)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_other_ones_on_another_rank_are_an_error_at_once(ranks, strategy):
    with pytest.raises(
        RankPoolError,
        match=r"RankMismatchError[\s\S]*\[\(1,\), \(1,\)\] on rank 0; \[\(1,\), "
        r"\(2,\)\] on rank 1",
    ):
        ranks.run(train, {"kind": OnOneRank, "strategy": strategy})


@pytest.mark.costly
def test_a_rank_that_does_not_use_it_gets_the_others_gradient(ranks):
    found = ranks.run(train, {"unused_on": 1})
    assert found[0] == found[1]


@pytest.mark.costly
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(ranks):
    found = ranks.run(train, {"infinite_on": 1})
    assert found[0] == found[1]
    assert found[0][2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_attempt_of_auto_micro_batch_counts_twice(ranks, world_size):
    # 16, 8 and 4 on one process are tried, then again between 4 and 8
    given = {"global_batch_size": 16}
    searching = {**given, "auto_micro_batch": True, "most": 7 // world_size}
    begun = {**given, "micro_batch_size": 6 // world_size}
    if world_size == 1:
        assert train(searching) == train(begun)
    else:
        assert ranks.run(train, searching) == ranks.run(train, begun)
