"""Scores of samples are the same on any number of ranks."""

from __future__ import annotations

import io

import pytest

from ddpkit.distributed import get_rank, if_main_process, run_on_main
from ddpkit.errors import ConfigError, LaunchError
from ddpkit.metric_stats import MetricStats
from tests.recipes import Regression, make, points


class Scored(Regression):
    """Scores every sample as recipes do: summarized on every rank, written on the main process."""

    def on_stage_start(self, stage, epoch=None):
        self.stats = MetricStats(
            lambda predictions, targets: (predictions - targets).square().mean(1),
        )

    def compute_objectives(self, predictions, batch, stage):
        self.stats.append(batch[2], predictions, batch[1])
        return super().compute_objectives(predictions, batch, stage)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.found = self.stats.summarize()
        self.file = io.StringIO()
        if if_main_process():
            self.stats.write_stats(self.file)


def numbered(number):
    return [(row, target, f"s{k:02}") for k, (row, target) in enumerate(points(number))]


def evaluated(number, shard_evaluation):
    brain = make(Scored, shard_evaluation=shard_evaluation)
    brain.evaluate(numbered(number), test_loader_kwargs={"batch_size": 2})
    return brain.found, len(brain.stats.ids), brain.file.getvalue()


def trained(number):
    brain = make(Scored, global_batch_size=4)
    brain.fit([1], numbered(number), train_loader_kwargs={"shuffle": True})
    return brain.found, len(brain.stats.ids)


@pytest.mark.corner
@pytest.mark.parametrize("shard_evaluation", [True, False])
@pytest.mark.parametrize(("world", "number"), [(2, 7), (3, 1)])
def test_an_evaluation_has_every_sample_once(ranks, world, number, shard_evaluation):
    [(expected, _, text)] = ranks.run(evaluated, number, shard_evaluation, world_size=1)
    results = ranks.run(evaluated, number, shard_evaluation, world_size=world)
    assert [found for found, *_ in results] == [expected] * world
    assert sum(count for _, count, _ in results) == number * (1 if shard_evaluation else world)
    assert [written for *_, written in results] == [text] + [""] * (world - 1)


@pytest.mark.corner
@pytest.mark.parametrize("world", [2, 3])
def test_so_has_an_epoch_of_training_whatever_is_repeated_to_keep_step(ranks, world):
    [(expected, _)] = ranks.run(trained, 9, world_size=1)
    results = ranks.run(trained, 9, world_size=world)
    assert sum(count for _, count in results) == 9
    for found, _ in results:
        assert found == results[0][0]
        assert found == pytest.approx(expected)


class WrittenFirst(Scored):
    """Writes what has not been summarized."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.told = []
        for write in (
            lambda: self.stats.write_stats(io.StringIO()),
            lambda: run_on_main(self.stats.summarize),
        ):
            try:
                write()
            except (ConfigError, LaunchError, RuntimeError) as error:
                self.told.append(str(error))


def write_first():
    brain = make(WrittenFirst, shard_evaluation=True)
    brain.evaluate(numbered(4), test_loader_kwargs={"batch_size": 2})
    return get_rank(), brain.told


def test_what_was_not_gathered_is_not_written_and_nobody_waits(ranks):
    (_, (unasked, alone)), (_, (alone_there,)) = ranks.run(write_first)
    assert "Call summarize() on every rank first" in unasked
    assert "inside main-only code" in alone
    assert "inside main-only code" in alone_there
