"""Real ranks: all stop at the same epoch."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ddpkit.distributed import if_main_process
from ddpkit.epoch_loop import EpochCounter, EpochCounterWithStopper


def epochs(metrics, main_only=False):
    counter = EpochCounterWithStopper(10, limit_to_stop=2, limit_warmup=0, direction="min")
    done = []
    for epoch in counter:
        done.append(epoch)
        if not main_only or if_main_process():
            counter.update_metric(metrics[dist.get_rank()][epoch - 1])
    return done, counter.best_score, counter.best_limit, counter.should_stop


def plain_epochs():
    return list(EpochCounter(2))


@pytest.mark.costly
def test_main_s_metric_decides_on_every_rank(ranks):
    main = [3, 2, 2, 2, 1, 0]
    other = [6, 5, 4, 3, 2, 1]
    assert ranks.run(epochs, [main, other]) == [([1, 2, 3, 4], 2.0, 2, True)] * 2
    assert (
        ranks.run(epochs, [other + [9] * 4, main + [0] * 4])
        == [([1, 2, 3, 4, 5, 6, 7, 8], 1.0, 6, True)] * 2
    )


def test_the_metric_may_be_known_on_main_alone(ranks):
    assert ranks.run(epochs, [[3, 2, 2, 2, 1], []], True) == [([1, 2, 3, 4], 2.0, 2, True)] * 2


def test_a_metric_that_is_no_number_fails_on_every_rank(ranks):
    outcomes = ranks.outcomes(epochs, [["low"], [1.0]])
    assert [outcome.error_type for outcome in outcomes] == ["ConfigError", "MainProcessError"]
    assert all("current_metric='low' is not a number" in outcome.error for outcome in outcomes)


def test_a_plain_counter_needs_nobody(ranks):
    assert ranks.run(plain_epochs) == [[1, 2]] * 2
