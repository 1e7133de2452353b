"""What can be told from the first items of every rank: the same, different, or nobody knows."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddpkit.data.sample_comparison import compare_summaries, summarize


def read(items):
    return [summarize(item) for item in items]


SAME = "the same"
DIFFERENT = "different"
OPEN = "nobody can tell"


def verdict(*ranks):
    difference, is_certain = compare_summaries([read(items) for items in ranks])
    return (DIFFERENT if is_certain else OPEN) if difference else SAME


def noisy(items, seed):
    generator = torch.Generator().manual_seed(seed)
    return [add(item, torch.randn(20, generator=generator)) for item in items]


def add(item, noise):
    return {
        "x": 0.1 * noise + item["x"],
        **{name: value for name, value in item.items() if name != "x"},
    }


def samples(first, step=1, number=8):
    return [
        {"x": torch.full((20,), float(k)), "id": f"s{k}", "label": k % 2}
        for k in range(first, 99, step)
    ][:number]


@dataclass
class Batch:
    wave: torch.Tensor
    names: list


@pytest.mark.parametrize(
    "item",
    [
        3,
        2.5,
        "text",
        b"bytes",
        None,
        Path("a/b"),
        np.float32(2),
        np.arange(6).reshape(2, 3)[:, ::2],
        torch.arange(6.0),
        torch.zeros(0),
        torch.tensor(float("nan")),
        torch.tensor([1.0, float("inf")]),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.ones(2, 2).to_sparse(),
        torch.zeros(3, device="meta"),
        {"b": 1, "a": [2, (3.0, "x")], ("a", "tuple"): 4},
        Batch(torch.ones(3), ["a"]),
        SimpleNamespace(lock=threading.Lock(), number=3),
        np.array(["a", "b"]),
        np.array([object(), None]),
        {"set": {"a", "b", "c"}},
    ],
    ids=lambda item: type(item).__name__,
)
def test_an_item_of_any_kind_is_like_itself(item):
    assert verdict([item] * 3, [item] * 3) == SAME


@pytest.mark.parametrize(
    "make",
    [
        int,
        float,
        str,
        lambda k: f"{k} " * 100,
        lambda k: str(k).encode(),
        torch.tensor,
        lambda k: torch.full((30,), float(k)),
        lambda k: torch.arange(5) + k,
        lambda k: np.full(3, k, dtype=np.uint8),
        lambda k: (torch.tensor([float(k)]), torch.tensor(0)),
        lambda k: {"x": torch.tensor([float(k)]), "rate": 16000},
        lambda k: Batch(torch.full((3,), float(k)), ["a"]),
        lambda k: SimpleNamespace(inner=[SimpleNamespace(number=k)]),
    ],
)
def test_ranks_that_read_parts_of_their_own_differ(make):
    halves = [[make(k) for k in range(rank, 16, 2)] for rank in range(2)]
    assert verdict(*halves) == DIFFERENT
    assert (
        verdict(*[[make(k) for k in range(8 * rank, 8 * rank + 8)] for rank in range(2)])
        == DIFFERENT
    )


def test_a_part_is_warned_of_though_labels_agree_by_chance():
    """Every second sample, of which the labels are the same on both ranks."""
    ranks = [
        [{"x": torch.full((3,), float(k)), "label": k // 2 % 2} for k in range(rank, 16, 2)]
        for rank in range(2)
    ]
    assert verdict(*ranks) == OPEN


def test_noise_that_nobody_seeded_is_warned_of():
    assert verdict(noisy(samples(0), 1), noisy(samples(0), 2)) == OPEN
    assert verdict(noisy(samples(0), 1), noisy(samples(8), 2)) == DIFFERENT, (
        "other samples, noise or not"
    )


def test_noise_that_hides_everything_is_a_difference():
    """Nothing tells the samples but what is drawn: it may be noise, or another order."""
    bare = [{"x": one["x"], "rate": 16000} for one in samples(0)]
    assert verdict(noisy(bare, 1), noisy(bare, 2)) == DIFFERENT


def test_an_order_that_nobody_seeded_is_a_difference():
    def shuffled(seed):
        return random.Random(seed).sample(samples(0, number=20), 8)

    assert verdict(shuffled(1), shuffled(2)) == DIFFERENT


def test_what_rounds_in_another_way_is_the_same():
    wave = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert verdict([{"x": wave}] * 2, [{"x": wave.float().double() * (1 + 1e-6)}] * 2) == SAME


def test_a_folder_of_each_machines_own_is_no_difference():
    ranks = [
        [{**one, "path": f"/scratch/node{rank}/{one['id']}"} for one in samples(0)]
        for rank in range(2)
    ]
    assert verdict(*ranks) == SAME


@pytest.mark.parametrize(
    ("ranks", "answer"),
    [
        ([samples(0, 2), samples(1, 2)], DIFFERENT),
        ([[torch.ones(3)], [torch.zeros(3)]], DIFFERENT),
        ([[1, 2, 3], [1, 2]], DIFFERENT),
        ([[1, 2, 3], []], DIFFERENT),
        ([[], []], SAME),
    ],
)
def test_what_is_the_same(ranks, answer):
    assert verdict(*ranks) == answer


def test_what_differs_each_time_it_is_read_is_not_compared():
    """Images in bytes, cut at random by a generator of their own: nothing tells the items apart."""
    ranks = [[summarize(torch.randint(9, (20,)).byte()) for _ in range(3)] for _ in range(2)]
    assert compare_summaries(ranks)[1]
    assert not compare_summaries(ranks, noise={""})[1]


def test_floats_that_are_the_same_each_time_are_no_noise():
    ranks = [[summarize((torch.full((3,), 5.0 * rank), k)) for k in range(3)] for rank in range(2)]
    assert not compare_summaries(ranks)[1]
    assert compare_summaries(ranks, noise=set())[1]
