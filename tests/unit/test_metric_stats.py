"""Scores of samples in one process."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import pytest
import torch

from ddpkit.errors import DataError
from ddpkit.metric_stats import MetricStats
from ddpkit.metrics import counted_by


def distance(predict, target):
    return (predict - target).abs().mean(-1)


def filled(scores="312", **options):
    stats = MetricStats(lambda values: values, **options)
    for score in scores:
        stats.append([f"s{score}"], torch.tensor([float(score)]))
    return stats


def test_the_summary_has_every_field_and_is_written():
    stats = filled()
    expected = {"average": 2.0, "min_score": 1.0, "min_id": "s1", "max_score": 3.0, "max_id": "s3"}
    assert stats.summarize() == stats.summary == expected
    assert [stats.summarize(field) for field in expected] == list(expected.values())
    file = io.StringIO()
    stats.write_stats(file)
    assert file.getvalue() == "Average score: 2.0\nMin error: 1.0 id: s1\nMax error: 3.0 id: s3\n"


def test_what_is_appended_after_a_summary_is_in_what_is_written(caplog):
    stats = filled("2")
    stats.summarize()
    stats.append(["s4"], torch.tensor([4.0]))
    assert stats.summary == {}
    file = io.StringIO()
    with caplog.at_level("INFO"):
        stats.write_stats(file, verbose=True)
    assert file.getvalue().startswith("Average score: 3.0\n")
    assert "Average score: 3.0" in caplog.text
    stats.clear()
    assert (stats.ids, stats.scores, stats.summary) == ([], [], {})


def test_the_order_does_not_matter():
    scores = [1e16, 1.0, -1e16, 1.0, 1e16]
    found = []
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
        stats = MetricStats(lambda values: values)
        stats.append(
            [f"s{k}" for k in order],
            torch.tensor([scores[k] for k in order], dtype=torch.float64),
        )
        found.append(stats.summarize())
    assert found[0] == found[1]
    assert (found[0]["max_id"], found[0]["average"]) == ("s0", (1e16 + 2) / 5)


def test_both_infinities_have_no_average():
    stats = MetricStats(lambda scores: scores)
    stats.append(["a", "b", "c"], torch.tensor([math.inf, 1.0, -math.inf]))
    found = stats.summarize()
    assert math.isnan(found.pop("average"))
    assert found == {"min_score": -math.inf, "min_id": "c", "max_score": math.inf, "max_id": "a"}


def test_nan_is_in_the_average_alone():
    stats = filled("12")
    stats.append(["bad"], torch.tensor([math.nan]))
    found = stats.summarize()
    assert math.isnan(found.pop("average"))
    assert found == {"min_score": 1.0, "min_id": "s1", "max_score": 2.0, "max_id": "s2"}
    only = MetricStats(lambda values: values)
    only.append([7], [math.nan])
    assert only.summarize("min_id") == 7


def test_nan_is_neither_the_lowest_nor_the_highest_score_where_it_comes_first():
    stats = MetricStats(lambda values: values)
    stats.append(["bad", "low", "high"], torch.tensor([math.nan, 1.0, 2.0]))
    assert [stats.summarize(field) for field in ("min_id", "max_id")] == ["low", "high"]


def test_scores_are_detached_and_ids_may_be_a_tensor():
    stats = MetricStats(distance)
    stats.append(
        torch.tensor([3, 4]),
        torch.ones(2, 3, requires_grad=True),
        target=torch.zeros(2, 3),
    )
    assert stats.ids == [3, 4]
    assert stats.scores == [1.0, 1.0]
    assert stats.summarize("max_id") == 3


@pytest.mark.parametrize("n_jobs", [1, 3])
@pytest.mark.parametrize("lengths", [None, torch.tensor([0.5, 1.0])])
def test_samples_are_scored_one_by_one_without_their_padding(n_jobs, lengths):
    stats = MetricStats(distance, n_jobs=n_jobs, batch_eval=False)
    stats.append(
        ["a", "b"],
        predict=torch.tensor([[1.0, 9.0], [1.0, 3.0]]),
        target=torch.zeros(2, 2),
        lengths=lengths,
    )
    assert stats.scores == [5.0 if lengths is None else 1.0, 2.0]


def test_a_batch_that_counts_nothing_is_left_out():
    stats = filled("1")
    with counted_by(SimpleNamespace(count=0)):
        stats.append(["again"], torch.tensor([9.0]))
    assert stats.summarize("max_score") == 1.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MetricStats(max).summarize(), DataError, "nothing to summarize"),
        (
            lambda: MetricStats(torch.mean).append(["a"] * 2, torch.ones(2)),
            DataError,
            r"gave tensor\(\[1.\]\) for 2 samples",
        ),
        (lambda: MetricStats(lambda: 3).append(["a"]), DataError, "gave 3 for 1 samples"),
        (
            lambda: MetricStats(lambda: [1]).append(["a", "b"]),
            DataError,
            (
                r"gave \[1\] for 2 "
                r"samples"
            ),
        ),
    ],
)
def test_what_cannot_be_scored_is_told(call, error, message):
    with pytest.raises(error, match=message):
        call()
