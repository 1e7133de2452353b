"""Real ranks: the reduced number is that of one process, on every rank."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpkit.distributed import (
    ddp_barrier,
    ddp_broadcast,
    gather_objects,
    if_main_process,
    run_on_main,
    start_sum_over_ranks,
    sum_over_ranks,
)
from ddpkit.errors import DataError, LaunchError, RankMismatchError
from ddpkit.metrics import Accuracy, LossMeter, Mean, Reduced, Sum, begin_stage
from ddpkit.types import Stage
from tests.recipes import Regression, Squares, make, points


def uneven():
    """Rank 0 holds 2 of the values, rank 1 the other 5, rank 2 none."""
    values = torch.arange(7.0) ** 2
    begin_stage(divided=False)
    mine = values.split([2, 5, 0])[dist.get_rank()]
    mean = Mean()
    total = Sum()
    accuracy = Accuracy()
    mean.update(mine)
    total.update(mine)
    accuracy.update(mine.long() % 2, torch.zeros(len(mine), dtype=torch.int64))
    reduced = mean.compute(reduce=True), total.compute(reduce=True), accuracy.compute(reduce=True)
    return (*reduced, accuracy.error(reduce=True)), mean.compute()


def test_reduced_metrics_are_those_of_one_process_on_every_rank(ranks):
    results = ranks.run(uneven, world_size=3)
    expected = (91 / 7, 91.0, 4 / 7, 3 / 7)
    assert [reduced for reduced, _ in results] == [expected] * 3
    assert [results[0][1], results[1][1]] == [0.5, 18.0]
    assert math.isnan(results[2][1])


def one_reduction_each():
    calls = []
    begin_stage(divided=False)
    real = dist.all_to_all_single  # two ranks exchange
    dist.all_to_all_single = lambda *args, **kwargs: (
        calls.append(args[0].numel()),
        real(*args, **kwargs),
    )[1]
    try:
        accuracy = Accuracy()
        meter = LossMeter()
        for _ in range(200):
            accuracy.update(torch.tensor([1]), torch.tensor([1]))
            meter.append(torch.tensor(1.0), 1)
        accuracy.compute()
        meter.sums()
        before = list(calls)
        accuracy.compute(reduce=True)
    finally:
        dist.all_to_all_single = real
    return before, len(calls)


def test_one_message_and_only_when_asked(ranks):
    assert ranks.run(one_reduction_each) == [([], 1)] * 2


def nothing():
    return Mean().compute(reduce=True)


def test_nothing_counted_anywhere(ranks):
    assert all(math.isnan(value) for value in ranks.run(nothing))


# ------------------------------------------------------------------------------------ by themselves


class TorchMetric(torch.nn.Module):
    """Behaves as a metric of torchmetrics 1.9: a state that is summed, one that is concatenated,
    one that is listed.
    """

    sync_on_compute = compute_with_cache = True

    def __init__(self, *, with_list=False):
        super().__init__()
        self.with_list = with_list
        self.dist_sync_fn = None
        self.distributed_available_fn = dist.is_initialized
        self._is_synced = False
        self._cache = None
        self.reset()

    def reset(self):
        self._computed = None
        self.total = torch.tensor(0.0)
        self.values = []
        self.pieces = []

    def update(self, values):
        self._computed = None
        self.total = self.total + values.sum()
        # an empty one would have one dimension, and be of floats
        self.values.append(values[:, None].long())
        if self.with_list:
            self.pieces += list(values)

    def sync(
        self,
        dist_sync_fn=None,
        process_group=None,
        should_sync=True,
        distributed_available=None,
    ):
        if self._is_synced and should_sync:
            raise RuntimeError("The Metric has already been synced.")
        available = (distributed_available or self.distributed_available_fn)()
        if not should_sync or not available:
            return
        exchange = dist_sync_fn or own_exchange
        self._cache = copy.copy(
            self.__dict__ | {"values": list(self.values), "pieces": list(self.pieces)}
        )
        self.total = torch.stack(exchange(self.total, group=process_group)).sum()
        values = torch.cat(self.values) if self.values else torch.tensor([])
        self.values = [torch.cat(exchange(values, group=process_group))]
        self.pieces = [one for piece in self.pieces for one in exchange(piece, group=process_group)]
        self._is_synced = True

    def unsync(self):
        if not self._is_synced:
            raise RuntimeError("The Metric has already been un-synced.")
        for name in ("total", "values", "pieces"):
            setattr(self, name, self._cache[name])
        self._is_synced = False
        self._cache = None

    def compute(self):
        if self._computed is None:
            self.sync(dist_sync_fn=self.dist_sync_fn)
            values = torch.cat(self.values) if self.values else torch.tensor([], dtype=torch.int64)
            # a class number that has become a float is none any more
            assert values.dtype == torch.int64
            value = (float(self.total), values.flatten().tolist(), len(self.pieces))
            if self._is_synced:
                self.unsync()
            if not self.compute_with_cache:
                return value
            self._computed = value
        return self._computed


def own_exchange(tensor, group=None):
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


class Measured(Regression):
    """Sums the numbers of the samples in every kind of metric; reads that of the training late, as
    recipes may.
    """

    def compute_objectives(self, predictions, batch, stage):
        counted = batch[2].double()
        if stage is Stage.TRAIN:
            if self.progress.window.count:
                self.train_sum.update(counted)
        else:
            for metric in self.metrics:
                metric.update(counted)
        return super().compute_objectives(predictions, batch, stage)

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN:
            self.train_sum = Sum()
        else:
            self.metrics = [
                Sum(),
                Mean(),
                Reduced(TorchMetric()),
            ]

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is not Stage.TRAIN:
            twice = [[metric.compute() for metric in self.metrics] for _ in range(2)]
            assert twice[0] == twice[1]
            self.found = twice[0]
            if stage is Stage.VALID:
                self.trained = self.train_sum.compute()


def measured(size, shard):
    data = [(*pair, index + 1) for index, pair in enumerate(points(size))]
    brain = make(Measured, shard_evaluation=shard)
    valid = {"batch_size": 2, "shuffle": True}
    brain.fit([1], data, data, train_loader_kwargs={"batch_size": 1}, valid_loader_kwargs=valid)
    validated = brain.found
    trained = brain.trained
    brain.evaluate(data, test_loader_kwargs={"batch_size": 2})
    return (
        trained,
        validated,
        brain.found,
        [metric.compute() for metric in brain.metrics] == brain.found,
    )


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("world", [2, 1, 3])
def test_metrics_reduce_themselves_where_the_data_is_divided(ranks, world, shard):
    for size in sorted({1, world, world + 1, 17}):
        total = size * (size + 1) / 2
        numbers = list(range(1, size + 1))
        for trained, validated, tested, again in ranks.run(measured, size, shard, world_size=world):
            assert trained == total
            assert again
            for found in (validated, tested):
                sums, mean, one = found
                assert (sums, mean) == (total, pytest.approx(total / size))
                assert (one[0], sorted(one[1])) == (total, numbers)


def by_hand():
    """A rank that has counted nothing agrees with one that has, even when asked in a later
    stage.
    """
    found = []
    for divided in (True, False):
        metric = Sum()
        begin_stage(divided=divided)
        if not divided or dist.get_rank() == 0:
            metric.update(3)
        found.append(metric.compute())
        begin_stage(divided=False)
        found.append(metric.compute())
        found += [metric.compute(reduce=False), metric.compute(reduce=True)]
        metric.reset()
        found.append(metric.compute())
    return found


def test_which_stage_decides(ranks):
    first, second = ranks.run(by_hand)
    assert first == [3, 3, 3, 3, 0, 3, 3, 3, 6, 0]
    assert second == [3, 3, 0, 3, 0, 3, 3, 3, 6, 0]


def computed_before():
    """Compute alone, then over the ranks, and the other way round."""
    found = []
    for divided in (True, False):
        begin_stage(divided=divided)
        metric = Reduced(TorchMetric())
        metric.update(torch.tensor([1.0 + dist.get_rank()]))
        found += [
            metric.metric.compute()[0],
            metric.compute()[0],
            metric.compute(reduce=not divided)[0],
        ]
    return found


def test_what_the_metric_has_computed_before_does_not_count(ranks):
    assert ranks.run(computed_before) == [
        [1.0, 3.0, 1.0, 1.0, 1.0, 3.0],
        [2.0, 3.0, 2.0, 2.0, 2.0, 3.0],
    ]


def on_main_alone(kind):
    begin_stage(divided=kind != "undivided")
    metric = Reduced(TorchMetric()) if kind == "reduced" else Sum()
    metric.update(torch.ones(2))
    if kind == "undivided" and if_main_process():
        assert metric.compute() == 2.0  # one rank alone may
    with pytest.raises(
        LaunchError if if_main_process() else Exception,
        match="main-only code",
    ) as caught:
        run_on_main(metric.compute, kwargs={"reduce": True} if kind == "undivided" else {})
    return str(caught.value)


@pytest.mark.corner
@pytest.mark.parametrize("kind", ["divided", "undivided", "reduced"])
def test_compute_in_main_only_code_says_so(ranks, kind):
    for message in ranks.run(on_main_alone, kind):
        assert ("Reduced" if kind == "reduced" else "Sum") + (
            ".compute was called inside main-only code"
        ) in message


OF_OTHERS = {
    "another metric": (lambda _: Mean().compute(), "Mean.compute (2 number(s))"),
    "barrier": (lambda _: ddp_barrier(), "ddp_barrier, at "),
    "broadcast": (lambda _: ddp_broadcast("text"), "ddp_broadcast, at "),
    "objects": (lambda _: gather_objects(str), "gather_objects, at "),
    "sum": (lambda _: sum_over_ranks([1.0] * 12), "sum_over_ranks (12 number(s)), at "),
    "started": (lambda _: start_sum_over_ranks([1.0])(), "start_sum_over_ranks, at "),
}


def compute_elsewhere(metric):
    return metric.compute()


def one_rank_alone(call):
    begin_stage(divided=True)
    metric = Sum()
    other = Sum()
    # what is computed counts, not where
    works = compute_elsewhere(metric) if if_main_process() else metric.compute()
    work = metric.compute if if_main_process() else functools.partial(OF_OTHERS[call][0], other)
    with pytest.raises(RankMismatchError) as caught:
        work()
    return works, str(caught.value)


@pytest.mark.corner
@pytest.mark.parametrize("call", OF_OTHERS)
def test_a_metric_computed_on_one_rank_alone_is_an_error_on_all_and_no_number(ranks, call):
    for rank, (works, message) in enumerate(ranks.run(one_rank_alone, call, world_size=3)):
        assert works == 0.0
        own = OF_OTHERS[call][1] if rank else "Sum.compute (1 number(s)), at "
        assert message.startswith(f"rank {rank} has come to {own}")
        assert "and another rank to another collective" in message


def made_where_first_used():
    begin_stage(divided=True)
    sums = defaultdict(Sum)
    if if_main_process():
        sums["a"].update(torch.ones(3))
    return sums["a"].compute()


def test_a_rank_without_samples_may_make_its_metric_later(ranks):
    assert ranks.run(made_where_first_used) == [3.0, 3.0]


class PrintsOnMain(Regression):
    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        super().on_fit_batch_end(batch, outputs, loss, should_step)
        self.seen = Sum()
        if if_main_process():
            self.seen.compute()


def compute_on_main_in_a_batch():
    with pytest.raises(RankMismatchError) as caught:
        make(PrintsOnMain).fit([1], points(8), train_loader_kwargs={"batch_size": 2})
    return str(caught.value)


def test_a_metric_computed_on_the_main_process_alone_in_a_batch_is_an_error_on_all(ranks):
    main, other = ranks.run(compute_on_main_in_a_batch)
    assert main.startswith("rank 0 has come to Sum.compute")
    assert re.match(r"rank 1 has come to sum_over_ranks \(\d+ number\(s\)\), at ", other)


def unlike():
    begin_stage(divided=True)
    metric = Reduced(TorchMetric(with_list=True))
    metric.update(torch.ones(1 + dist.get_rank()))
    with pytest.raises(DataError) as caught:
        metric.compute()
    return str(caught.value)


def test_states_that_do_not_fit_are_an_error_on_every_rank(ranks):
    for message in ranks.run(unlike):
        assert "keeps a list that is not concatenated, of different lengths on the ranks" in message


class Counting(Squares):
    """Counts in compute_objectives, in training too, as recipes do."""

    def compute_objectives(self, predictions, batch, stage):
        losses = predictions.square().squeeze(1)
        self.seen_here.update(torch.ones_like(losses))
        self.mean_loss.update(losses)
        self.lengths.update(len(losses))
        return losses.mean()

    def on_stage_start(self, stage, epoch=None):
        if self.resets:
            self.begin()

    def begin(self):
        self.seen_here, self.mean_loss, self.lengths = Sum(), Mean(), Sum()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if self.resets:
            numbers = (
                self.seen_here.compute(),
                self.mean_loss.compute(),
                self.lengths.compute(),
                stage_loss,
            )
            self.told.append((stage.name, *numbers))


def count_while_training(size, shard, resets=True):
    torch.manual_seed(0)
    brain = Counting(
        {"net": nn.Linear(1, 1).double()},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        run_opts={
            "device": "cpu",
            "noprogressbar": True,
            "global_batch_size": 3,
            "shard_evaluation": shard,
        },
    )
    brain.resets = resets
    brain.told = []
    brain.begin()
    data = torch.arange(size, dtype=torch.float64).reshape(-1, 1) / size
    brain.fit([1, 2], data, data[: size // 2 + 1])
    return brain.told if resets else brain.seen_here.compute()


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("size", [1, 2, 10])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_repeated_batch_counts_in_no_metric(ranks, world_size, size, shard):
    """Metrics of a training whose last batches leave ranks empty are those of one process."""
    alone = count_while_training(size, shard)
    assert [row[1] for row in alone] == [size, size // 2 + 1] * 2
    for told in ranks.run(count_while_training, size, shard, world_size=world_size):
        assert [row[0] for row in told] == [row[0] for row in alone]
        for row, expected in zip(told, alone, strict=True):
            assert row[1:] == pytest.approx(expected[1:], abs=1e-12)


@pytest.mark.slow
def test_a_metric_of_divided_and_undivided_stages_is_refused(ranks):
    """Each rank would give another number; with the evaluation divided, too, one sum is right."""
    assert count_while_training(7, False, False) == 2 * (7 + 4)
    assert ranks.run(count_while_training, 7, True, False, world_size=2) == [22.0, 22.0]
    for outcome in ranks.outcomes(count_while_training, 7, False, False, world_size=2):
        assert outcome.error_type == "ConfigError"
        assert "this Sum has counted in stages whose data is divided" in outcome.error


def of_a_copy():
    metric = copy.deepcopy(Reduced(TorchMetric()))
    begin_stage(divided=True)
    metric.update(torch.tensor([1.0 + 2 * dist.get_rank()]))
    return float(metric.compute()[0])


def test_a_copy_of_a_reduced_metric_is_of_all_ranks(ranks):
    """As where one is copied for each stage."""
    assert ranks.run(of_a_copy, world_size=2) == [4.0, 4.0]
