"""``self.log`` on several ranks: the numbers of one process, whoever logs, and after a resume
inside an epoch.
"""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from ddpkit.checkpoints import Checkpointer
from ddpkit.distributed import get_rank
from ddpkit.epoch_loop import EpochCounter
from ddpkit.train_logger import set_run_log
from ddpkit.types import Stage
from tests.recipes import QUIET, Killed, Regression, linear, make, points, sgd

DATA = points(13)
VALID = points(7, seed=6)


class Logging(Regression):
    dies_at = None
    seen = ()

    def on_stage_start(self, stage, epoch=None):
        self.epoch = epoch
        self.log("started", 1.0)

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        self.log("mean", batch[0][:, 0].mean(), per_step=True)
        self.log("share", (batch[0] > 0).sum(), count=batch[0].numel())
        low = batch[0][:, 0] < -1
        if low.any():  # in one batch or two of the epoch
            self.log("low", batch[0][low].sum(), count=int(low.sum()))
        if stage is Stage.TRAIN and (self.epoch, self.step) == self.dies_at:
            raise Killed
        return loss

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.log("end", float(epoch or 0))
        if stage is Stage.VALID:
            self.seen = [
                *self.seen,
                {name: dict(values) for name, values in self.progress.logged.values.items()},
            ]


def fit(options=None):
    options = {**QUIET, "batch_size": 2, **(options or {})}
    dies_at = options.pop("dies_at", None)
    folder = options.pop("folder", None)
    epochs = options.pop("epochs", 2)
    kwargs = {"batch_size": options.pop("batch_size"), "shuffle": True}
    net = linear()
    counter = EpochCounter(epochs)
    checkpointer = (
        None if folder is None else Checkpointer(folder, {"net": net, "counter": counter})
    )
    brain = Logging({"net": net}, sgd(), None, options, checkpointer)
    brain.dies_at = dies_at
    try:
        result = brain.fit(
            counter,
            DATA,
            VALID,
            train_loader_kwargs=kwargs,
            valid_loader_kwargs={"batch_size": 3},
        )
    except Killed:
        return None
    return result.logged, brain.seen


def expected():
    found = {"end": 2.0, "started": 1.0}
    logged = {}
    for stage, data in (("train", DATA), ("valid", VALID)):
        rows = torch.stack([x for x, _ in data])
        low = rows[rows[:, 0] < -1]
        logged[stage] = {
            **found,
            "mean": rows[:, 0].mean().item(),
            "share": (rows > 0).double().mean().item(),
        }
        if len(low):
            logged[stage]["low"] = low.sum().item() / len(low)
    return logged


def close(logged):
    return {stage: pytest.approx(values, rel=1e-12) for stage, values in logged.items()}


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(("world", "shard"), [(2, False), (2, True), (3, True)])
def test_the_values_are_those_of_the_whole_set(ranks, world, shard):
    """Some ranks never log a name, and some repeat a batch to keep step."""
    assert {"low"} <= expected()["train"].keys()
    found = ranks.run(fit, {"shard_evaluation": shard}, world_size=world)
    assert len({repr(logged) for logged, _ in found}) == 1, "the same bits on every rank"
    assert found[0][0] == close(expected())
    assert fit()[0] == close(expected())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2, 2),
        (1, 3),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 1), (2, 1), (3, 2))),
    ],
)
def test_a_resume_in_the_middle_of_an_epoch(ranks, tmp_path, before, after):
    options = {"folder": tmp_path, "ckpt_interval_steps": 2, "shard_evaluation": True}

    def run(world, **more):
        given = {**options, "batch_size": 6 // world, **more}
        return [fit(given)] if world == 1 else ranks.run(fit, given, world_size=world)

    whole = run(after, folder=None)
    assert run(before, dies_at=(2, 3)) == [None] * before
    found = run(after)
    assert len({repr(logged) for logged, _ in found}) == 1
    if before == after:
        assert found[0][0] == whole[0][0], "to the last bit"
    assert found[0][0] == close(expected())


class TwoWays(Regression):
    late = False

    def compute_forward(self, batch, stage):
        other = get_rank() == 1 and (not self.late or self.progress.epoch == 2)
        self.log("x", 1.0, 2 if other else None)
        return super().compute_forward(batch, stage)


def log_in_two_ways(late):
    brain = make(TwoWays)
    brain.late = late
    brain.fit([1, 2], DATA, train_loader_kwargs={"batch_size": 2})


@pytest.mark.costly
def test_ranks_that_use_a_name_in_different_ways_all_learn_it(ranks):
    outcomes = ranks.outcomes(log_in_two_ways, False)
    assert [outcome.error_type for outcome in outcomes] == ["BatchError", "BatchError"]
    words = "log('x', ...) was called in two ways in TRAIN"
    assert all(words in outcome.error for outcome in outcomes)
    first, second = ranks.outcomes(log_in_two_ways, True)
    assert (first.error_type, second.error_type) == ("RankFailedError", "BatchError")
    assert words in second.error


def steps_written(folder):
    log = set_run_log(f"{folder}/metrics.jsonl")
    try:
        fit({"epochs": 1})
    finally:
        set_run_log(None)
    return (
        [line for line in log.path.read_text().splitlines() if '"step"' in line]
        if not get_rank()
        else []
    )


@pytest.mark.costly
def test_steps_are_means_over_the_ranks(ranks, tmp_path):
    lines = [json.loads(line) for line in ranks.run(steps_written, str(tmp_path))[0]]
    steps = [line for line in lines if line["event"] == "step"]
    assert steps
    assert steps[-1]["step"] == 4
    weights = [
        after - before
        for before, after in itertools.pairwise([0, *(line["step"] * 4 for line in steps[:-1]), 13])
    ]
    total = sum(
        weight * line["values"]["mean"] for weight, line in zip(weights, steps, strict=True)
    )
    assert total / 13 == pytest.approx(expected()["train"]["mean"], rel=1e-12)
