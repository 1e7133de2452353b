"""The same answer on 1, 2 and 3 processes, with every accumulation factor: law 1, for equal
batches.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from ddpkit.run import stage_runner
from ddpkit.types import Stage
from tests.recipes import Classifier, Regression

SAMPLES = 72


def make_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (SAMPLES,), generator=generator)
    return list(zip(inputs, targets, strict=True))


def make_net(*, batch_norm: bool) -> nn.Sequential:
    torch.manual_seed(11)
    # No bias before BatchNorm: its gradient is zero but for rounding, which Adam would blow up.
    middle = [nn.BatchNorm1d(8)] if batch_norm else []
    return nn.Sequential(
        nn.Linear(6, 8, bias=not batch_norm),
        *middle,
        nn.Tanh(),
        nn.Linear(8, 3),
    ).double()


class Recorder(Classifier):
    """Classifies, and remembers what it was told."""

    def on_fit_start(self):
        self.seen = []
        super().on_fit_start()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.seen.append((stage.name, stage_loss))


def train(
    batch_size: int,
    factor: int,
    *,
    batch_norm: bool,
    samples: int = SAMPLES,
    shard: bool = True,
):
    data = make_data()[:samples]
    brain = Recorder(
        {"net": make_net(batch_norm=batch_norm)},
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        run_opts={
            "device": "cpu",
            "noprogressbar": True,
            "grad_accumulation_factor": factor,
            "max_grad_norm": 0.5,
            "shard_evaluation": shard,
        },
    )
    loader = {"batch_size": batch_size, "shuffle": True}
    brain.fit(
        range(1, 4),
        data,
        data[: samples // 2 + 1],
        train_loader_kwargs=loader,
        valid_loader_kwargs=loader,
    )
    test_loss = brain.evaluate(data[:17], test_loader_kwargs={"batch_size": batch_size})
    weights = {
        name: value.detach().clone() for name, value in brain.raw_modules.state_dict().items()
    }
    return weights, brain.seen, brain.optimizer_step, test_loss


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("factor", [1, 3, 4])
@pytest.mark.parametrize("world_size", [2, 3])
def test_same_weights_on_any_number_of_processes(ranks, world_size, factor, batch_norm):
    """One process with the joined batch is the reference; weights, losses and step counts must
    agree.
    """
    joined = 12
    expected, seen, steps, test_loss = train_alone(joined, factor, batch_norm)
    results = ranks.run(
        train_on_rank,
        joined // world_size,
        factor,
        batch_norm,
        world_size=world_size,
    )
    for weights, seen_there, steps_there, test_loss_there in results:
        assert steps_there == steps == 3 * -(-SAMPLES // (joined * factor))
        assert seen_there == results[0][1], "the ranks report different numbers"
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
        assert [name for name, _ in seen_there] == [name for name, _ in seen]
        assert [loss for _, loss in seen_there] == pytest.approx(
            [loss for _, loss in seen],
            abs=1e-10,
        )
        assert test_loss_there == pytest.approx(test_loss, abs=1e-10)


def train_alone(batch_size, factor, batch_norm):
    return train(batch_size, factor, batch_norm=batch_norm)


def train_on_rank(batch_size, factor, batch_norm):
    return train(batch_size, factor, batch_norm=batch_norm)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("samples", [25, 37, 49])
def test_uneven_remainders(ranks, world_size, samples):
    """The last global batch is divided as evenly as possible, and a rank without a sample weighs
    nothing.
    """
    expected, seen, steps, _ = train(12, 2, batch_norm=False, samples=samples)
    for weights, seen_there, steps_there, _ in ranks.run(
        train_uneven,
        12 // world_size,
        samples,
        world_size=world_size,
    ):
        assert steps_there == steps
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
        assert [loss for _, loss in seen_there] == pytest.approx(
            [loss for _, loss in seen],
            abs=1e-10,
        )


def train_uneven(batch_size, samples):
    return train(batch_size, 2, batch_norm=False, samples=samples)


@pytest.mark.costly
def test_full_evaluation_is_one_agreed_number(ranks):
    """Without sharding every rank evaluates everything, and the reported loss is that of one
    process.
    """
    expected = train(12, 1, batch_norm=False, shard=False)
    for result in ranks.run(train_full, world_size=2):
        assert [loss for _, loss in result[1]] == pytest.approx(
            [loss for _, loss in expected[1]],
            abs=1e-10,
        )
        assert [name for name, _ in result[1]] == ["TRAIN", "VALID"] * 3 + ["TEST"]


def train_full():
    return train(6, 1, batch_norm=False, shard=False)


def test_stage_names():
    assert [stage.name for stage in Stage] == ["TRAIN", "VALID", "TEST"]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("samples", [26, 38, 41])
def test_uneven_remainders_with_batch_norm(ranks, world_size, samples):
    """A sample that a rank repeats to keep step counts in no batch statistic, and gets no gradient
    through one.
    """
    expected, seen, _, _ = train(12, 1, batch_norm=True, samples=samples)
    for weights, seen_there, _, _ in ranks.run(
        train_uneven_batch_norm,
        12 // world_size,
        samples,
        world_size=world_size,
    ):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
        assert [loss for _, loss in seen_there] == pytest.approx(
            [loss for _, loss in seen],
            abs=1e-10,
        )


def train_uneven_batch_norm(batch_size, samples):
    return train(batch_size, 1, batch_norm=True, samples=samples)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_remainders_in_one_window_with_batch_norm(ranks, world_size):
    """Weight 0 and left out of the statistics also where the batch closes a longer window."""
    expected = train(12, 3, batch_norm=True, samples=50)[0]
    for weights, _, _, _ in ranks.run(
        train_window_batch_norm,
        12 // world_size,
        world_size=world_size,
    ):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


def train_window_batch_norm(batch_size):
    return train(batch_size, 3, batch_norm=True, samples=50)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("shard", [False, True])
def test_every_sample_is_reported_once(ranks, shard):
    """Where every rank evaluates the whole set, its samples are not counted once per rank."""
    expected = [("TRAIN", SAMPLES), ("VALID", SAMPLES // 2 + 1)] * 3 + [("TEST", 17)]
    assert ranks.run(reported, shard, world_size=2) == [expected] * 2


def reported(shard):
    events = []
    before = stage_runner.run_event
    stage_runner.run_event = lambda _, **fields: events.append((fields["stage"], fields["samples"]))
    try:
        train(6, 1, batch_norm=False, shard=shard)
    finally:
        stage_runner.run_event = before
    return events


class Lookup(Regression):
    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions.squeeze(1), batch[1])


def train_a_table(strategy, *, sparse):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Embedding(6, 3, sparse=sparse), nn.Linear(3, 1)).double()
    options = {
        "device": "cpu",
        "noprogressbar": True,
        "strategy": strategy,
        "max_grad_norm": 0.5,
        "global_batch_size": 6,
    }
    brain = Lookup({"net": net}, functools.partial(torch.optim.SGD, lr=0.5), None, options)
    rows = torch.arange(23)
    data = list(zip(rows % 5, rows.double().sin(), strict=True))
    brain.fit(range(2), data, train_loader_kwargs={"shuffle": True})
    return {name: value.detach().clone() for name, value in brain.raw_modules.state_dict().items()}


def train_a_sparse_table(strategy):
    return train_a_table(strategy, sparse=True)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_sparse_gradients(ranks, strategy, size):
    """Of ``nn.Embedding(sparse=True)``, clipped: as with dense gradients on one process."""
    expected = train_a_table("single", sparse=False)
    for weights in ranks.run(train_a_sparse_table, strategy, world_size=size):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
