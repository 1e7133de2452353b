"""Real ranks: the reduced number is that of one process, on every rank."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from ddpkit.metrics import Accuracy, LossMeter, Mean, Sum


def uneven():
    """Rank 0 holds 2 of the values, rank 1 the other 5, rank 2 none."""
    values = torch.arange(7.0) ** 2
    mine = values.split([2, 5, 0])[dist.get_rank()]
    mean, total, accuracy = Mean(), Sum(), Accuracy()
    mean.update(mine)
    total.update(mine)
    accuracy.update(mine.long() % 2, torch.zeros(len(mine), dtype=torch.int64))
    reduced = mean.compute(reduce=True), total.compute(reduce=True), accuracy.compute(reduce=True)
    return (*reduced, accuracy.error(reduce=True)), mean.compute()


def test_d7_reduced_metrics_are_those_of_one_process_on_every_rank(ranks):
    results = ranks.run(uneven, world_size=3)
    expected = (91 / 7, 91.0, 4 / 7, 3 / 7)
    assert [reduced for reduced, _ in results] == [expected] * 3
    assert [results[0][1], results[1][1]] == [0.5, 18.0]
    assert math.isnan(results[2][1])


def one_reduction_each():
    calls = []
    real = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(args[0].numel()), real(*args, **kwargs))[1]
    try:
        accuracy, meter = Accuracy(), LossMeter()
        for _ in range(200):
            accuracy.update(torch.tensor([1]), torch.tensor([1]))
            meter.append(torch.tensor(1.0), 1)
        accuracy.compute()
        meter.sums()
        before = list(calls)
        accuracy.compute(reduce=True)
    finally:
        dist.all_reduce = real
    return before, len(calls)


def test_one_collective_and_only_when_asked(ranks):
    assert ranks.run(one_reduction_each) == [([], 1)] * 2


def nothing():
    return Mean().compute(reduce=True)


def test_nothing_counted_anywhere(ranks):
    assert all(math.isnan(value) for value in ranks.run(nothing))
