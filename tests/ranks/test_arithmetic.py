"""Law 1 as a property: sizes, remainders, accumulation and weights of every kind give one process's
answer.

One process with the joined batch is the reference. Everything is in float64, where agreement to
1e-10 leaves no room for a sample that counts a little more. Other options, strategies and kills are
drawn in ``tests/model``, against a loop that knows nothing of ddpkit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.errors import DataError
from ddpkit.training import Feed
from ddpkit.types import Stage

EPOCHS = 2
LEARNING_RATE = 0.1
MAX_NORM = 0.5


@dataclass(frozen=True)
class Case:
    """One way to train. The batch size counts per process; None: by ``whole`` and ``micro``."""

    samples: int
    batch_size: int | None = 2
    factor: int = 1
    shuffle: bool = True
    drop_last: bool = False
    objective: str = "mean"
    optimizers: int = 1
    shard_evaluation: bool = True
    whole: int | None = None
    micro: int | None = None

    def alone(self, world_size):
        """The same training in one process."""
        if self.batch_size is None:
            return self
        return Case(**{**vars(self), "batch_size": self.batch_size * world_size})


def make_data(samples, first=0):
    """Samples of a number, 3 features, a target, and 0 to 4 tokens that count."""
    found = []
    for number in range(first, first + samples):
        generator = torch.Generator().manual_seed(number)
        features = torch.randn(3, generator=generator, dtype=torch.float64)
        found.append(
            (number, features, features.sum().tanh().reshape(1) + 0.1 * (number % 3), number % 5)
        )
    return found


def make_modules(case):
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return {"net": net, **({"gain": nn.Linear(1, 1).double()} if case.optimizers > 1 else {})}


class Recorder(Brain):
    """Fits, and remembers which samples it saw and what it was told."""

    objective = "mean"

    def compute_forward(self, batch, stage):
        if stage is Stage.TRAIN and self.progress.window.count:
            self.met[-1].extend(batch[0].tolist())
        output = self.modules.net(batch[1])
        return self.modules.gain(output) if "gain" in self.modules else output

    def compute_objectives(self, predictions, batch, stage):
        losses = (predictions - batch[2]).square().squeeze(1)
        if self.objective == "mean":
            return losses.mean()
        counts = batch[3] if self.objective == "tokens" else batch[3].clamp(min=1)
        total = (losses * counts).sum()
        return total, counts.sum() if self.objective == "tokens" else int(counts.sum())

    def init_optimizers(self):
        if "gain" not in self.modules:
            super().init_optimizers()
            return
        self.optimizers_dict = {
            name: sgd(self.modules[name].parameters()) for name in ("net", "gain")
        }

    def on_stage_start(self, stage, epoch=None):
        self.met.append([])

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.told.append((stage.name, stage_loss))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def train(case):
    """Fit and evaluate; return weights, what was reported, optimizer steps and the samples of every
    epoch.
    """
    brain = Recorder(
        make_modules(case),
        sgd,
        run_opts={
            "device": "cpu",
            "noprogressbar": True,
            "grad_accumulation_factor": case.factor,
            "max_grad_norm": MAX_NORM,
            "shard_evaluation": case.shard_evaluation,
            "global_batch_size": case.whole,
            "micro_batch_size": case.micro,
        },
    )
    brain.objective = case.objective
    brain.met = []
    brain.told = []
    options = {"batch_size": case.batch_size, "shuffle": case.shuffle, "drop_last": case.drop_last}
    if case.batch_size is None:
        del options["batch_size"]
    others = {"batch_size": case.batch_size or 3}
    try:
        brain.fit(
            range(1, EPOCHS + 1),
            make_data(case.samples),
            make_data(case.samples % 11 + 1, first=100),
            train_loader_kwargs=options,
            valid_loader_kwargs=others,
        )
    except DataError as error:
        return str(error).split(":")[0]
    test_loss = brain.evaluate(
        make_data(case.samples % 7 + 1, first=200),
        test_loader_kwargs=others,
    )
    weights = torch.cat(
        [value.detach().double().flatten() for value in brain.raw_modules.state_dict().values()]
    )
    return (
        weights,
        [*brain.told, ("end", test_loss)],
        brain.optimizer_step,
        [one for one in brain.met if one],
    )


def train_all(cases):
    return [train(case) for case in cases]


def compare(ranks, world_size, cases):
    """Train every case on several ranks and in one process."""
    everywhere = ranks.run(train_all, cases, world_size=world_size, timeout=300)
    for number, case in enumerate(cases):
        expected = train(case.alone(world_size))
        found = [results[number] for results in everywhere]
        if isinstance(expected, str):
            assert found == [expected] * world_size, case
            continue
        weights, told, steps, seen = expected
        for weights_there, told_there, steps_there, _ in found:
            assert steps_there == steps, case
            assert repr(told_there) == repr(found[0][1]), (
                "the ranks report different numbers",
                case,
            )
            torch.testing.assert_close(
                weights_there,
                weights,
                rtol=0,
                atol=1e-10,
                equal_nan=True,
                msg=str(case),
            )
            assert [name for name, _ in told_there] == [name for name, _ in told], case
            assert [loss for _, loss in told_there] == pytest.approx(
                [loss for _, loss in told],
                abs=1e-10,
                nan_ok=True,
            ), case
        for epoch in range(EPOCHS):
            together = [
                sample for result in found for sample in (result[3][epoch : epoch + 1] or [[]])[0]
            ]
            assert sorted(together) == sorted(seen[epoch]), ("another set of samples", case)
            keep = case.samples
            if case.drop_last:
                keep -= keep % (case.whole or case.batch_size * world_size)
            assert len(together) == len(set(together)) == keep, (
                "not every sample exactly once",
                case,
            )


def draw(seed, number, **fixed):
    """Draw cases, each of a size, batch size, accumulation, order and remainder of its own."""
    chance = random.Random(seed)
    cases = []
    for _ in range(number):
        drawn = {
            "samples": chance.randint(1, 40),
            "batch_size": chance.randint(1, 7),
            "factor": chance.randint(1, 5),
            "shuffle": chance.random() < 0.5,
            "drop_last": chance.random() < 0.3,
            "shard_evaluation": chance.random() < 0.7,
        }
        cases.append(Case(**{**drawn, **fixed}))
    return cases


# ------------------------------------------------------------------------------------- the property

# The first of the cases that are drawn; all of them in `make check`.
drawn = pytest.mark.parametrize("number", [4, pytest.param(12, marks=pytest.mark.slow)])


# Three ranks divide unevenly all that two do.
@pytest.mark.costly
@pytest.mark.parametrize(
    ("world_size", "number"),
    [
        (3, 4),
        pytest.param(4, 4, marks=pytest.mark.slow),
        pytest.param(3, 12, marks=pytest.mark.slow),
        pytest.param(4, 12, marks=pytest.mark.exhaustive),
        pytest.param(2, 12, marks=pytest.mark.exhaustive),
    ],
)
def test_any_sizes(ranks, world_size, number):
    """N in 1..40, batch 1..7, accumulation 1..5, shuffled or not, remainder dropped or not."""
    small = [
        Case(samples, 1 + samples % 3, 1 + samples % 2) for samples in range(1, world_size + 2)
    ]
    compare(ranks, world_size, small + draw(world_size, number))


@pytest.mark.costly
@pytest.mark.corner
@drawn
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("objective", ["tokens", "frames"])
def test_sums_and_counts(ranks, world_size, objective, number):
    """Losses that are means over tokens: batches and samples without any token count nothing."""
    cases = draw(world_size, number, objective=objective)
    compare(ranks, world_size, [*cases, *draw(7, number // 4, objective=objective, optimizers=2)])


# ------------------------------------------------------------------------------------ its own teeth


@pytest.mark.costly
def test_the_property_has_teeth(ranks):
    """A loop that averages the ranks' means, as is usual, fails it."""
    case = Case(samples=7, batch_size=2, shuffle=False)
    expected = train(case.alone(2))[0]
    (weights, *_), _ = ranks.run(train_with_means_of_means, case, world_size=2)
    assert (weights - expected).abs().max() > 1e-4


def weighed_alike(batches):
    """Have every batch back-propagated as its own mean, whatever it counts."""

    def batches_of(self, window):
        for batch in batches(self, window):
            window.loss_scale = 1.0
            yield batch

    return batches_of


def train_with_means_of_means(case):
    right = Feed.batches
    try:
        Feed.batches = weighed_alike(right)
        return train(case)
    finally:
        Feed.batches = right


# ----------------------------------------------------------------------- on another number of ranks


def train_to_the_middle(folder, epochs):
    """Train with checkpoints inside the epoch; the first run ends after a few optimizer steps."""
    case = Case(20, None, whole=6, micro=1)
    net = make_modules(case)["net"]
    options = {
        "device": "cpu",
        "noprogressbar": True,
        "global_batch_size": 6,
        "micro_batch_size": 1,
    }
    brain = Recorder(
        {"net": net},
        sgd,
        run_opts={
            **options,
            "ckpt_interval_steps": 1,
            "optimizer_step_limit": None if epochs else 2,
        },
        checkpointer=Checkpointer(folder, {"net": net}),
    )
    brain.met = []
    brain.told = []
    brain.fit(EpochCounterOnce(epochs or 1), make_data(20), train_loader_kwargs={"shuffle": True})
    return torch.cat(
        [value.flatten() for value in brain.raw_modules.state_dict().values()]
    ), brain.optimizer_step


class EpochCounterOnce:
    """Epochs from 1, whatever a checkpoint says: the middle of the first is what is continued."""

    def __init__(self, limit):
        self.limit = limit

    def __iter__(self):
        return iter(range(1, self.limit + 1))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_micro_batches_on_another_number_of_ranks_go_on_at_the_same_step(
    ranks,
    world_size,
    tmp_path,
):
    """A place in the epoch is one between optimizer steps, however many batches these take on a
    rank.
    """
    whole, steps = train_to_the_middle(tmp_path / "whole", 2)
    train_to_the_middle(tmp_path / "parts", 0)
    for weights, steps_there in ranks.run(
        train_to_the_middle,
        tmp_path / "parts",
        2,
        world_size=world_size,
    ):
        assert steps_there == steps == 8
        torch.testing.assert_close(weights, whole, rtol=0, atol=1e-10)
