"""What moves batches to the device ahead of the step: what it moves, how far it reads, and in which
order it waits.
"""

from __future__ import annotations

import contextlib
from collections import UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import IterableDataset

from ddpkit.batch import PaddedBatch
from ddpkit.brain import Brain
from ddpkit.training import device_prefetch as module, move_ahead
from ddpkit.training.device_prefetch import moved_ahead
from ddpkit.types import Stage

CPU = torch.device("cpu")
META = torch.device("meta")


class Pair(NamedTuple):
    one: Any
    other: Any


class Own:
    """A batch of a recipe's own, which takes nothing but the device."""

    def __init__(self):
        self.x = torch.ones(1)

    def to(self, device):
        self.x = self.x.to(device)
        return self


def test_it_reads_one_batch_ahead_and_no_more():
    read = []
    batches = moved_ahead((read.append(number) or torch.tensor(number) for number in range(4)), CPU)
    seen = [(int(batch), len(read)) for batch in batches]
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)]
    assert list(moved_ahead(iter([]), CPU)) == []


class Named(UserDict):
    """A recipe's own mapping."""

    @property
    def x(self):
        return self["x"]


def test_a_mapping_stays_what_the_loader_gives():
    given = Named(x=torch.ones(1))
    moved, counts = next(moved_ahead(iter([(given, defaultdict(int, y=torch.ones(1)))]), META))
    assert moved.x.device == counts["y"].device == META
    assert counts["z"] == 0
    assert given.x.device == CPU


def test_what_has_tensors_in_it_is_moved_and_the_rest_stays():
    padded = PaddedBatch([{"id": "a", "x": torch.ones(2)}, {"id": "b", "x": torch.ones(1)}])
    batch = {
        "t": (torch.ones(1), "text"),
        "pair": Pair([torch.ones(1)], 3),
        "own": Own(),
        "padded": padded,
    }
    (moved,) = moved_ahead(iter([batch]), META)
    tensors = (
        moved["t"][0],
        moved["pair"].one[0],
        moved["own"].x,
        moved["padded"].x.data,
        moved["padded"].x.lengths,
    )
    assert {one.device for one in tensors} == {META}
    assert (moved["t"][1], type(moved["pair"]), moved["pair"].other, moved["padded"].id) == (
        "text",
        Pair,
        3,
        ["a", "b"],
    )


def test_a_step_waits_for_its_own_batch_and_a_copy_for_what_the_step_was_given(monkeypatch):
    """With fakes in the place of a GPU's streams: the order in which they are told to wait for each
    other.
    """
    told = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            told.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event):
            told.append(f"{self.name} waits for {event}")

        def record_event(self):
            return f"copy {sum(one.startswith('copied') for one in told)}"

    class Batch:
        def to(self, device, non_blocking):
            told.append(f"copied, non_blocking={non_blocking}")
            return self

    step = Stream("step")
    monkeypatch.setattr(
        "ddpkit.training.device_prefetch._copying_stream",
        lambda device: Stream("side"),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: step)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    for number, _ in enumerate(moved_ahead(iter([Batch(), Batch()]), torch.device("cuda:0")), 1):
        told.append(f"step {number}")
    copy = ["side waits for step", "copied, non_blocking=True"]
    assert told == [
        *copy,
        *copy,
        "step waits for copy 1",
        "step 1",
        "step waits for copy 2",
        ("step 2"),
    ]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("data", "workers", "is_moved"),
    [(range(4), 1, True), (range(4), 0, False), (Stream(), 1, False)],
)
def test_only_a_loader_with_workers_reads_ahead(data, workers, is_moved, monkeypatch):
    told = []
    monkeypatch.setattr(
        module.logger,
        "warning_once",
        lambda text, *names: told.append(text % names),
    )
    brain = Brain({}, run_opts={"device": "cpu", "prefetch_to_device": True})
    loader = brain.make_dataloader(data, Stage.TRAIN, batch_size=2, num_workers=workers)
    assert (getattr(loader, "passed_through", None) is not None) == is_moved
    assert [one[:24] for one in told] == ([] if is_moved else ["prefetch_to_device needs"])
    without = Brain({}, run_opts={"device": "cpu"}).make_dataloader(
        range(4),
        Stage.TRAIN,
        num_workers=1,
    )
    assert without.passed_through is None


def test_the_loader_counts_what_it_has_handed_out_and_not_what_was_read():
    brain = Brain({}, run_opts={"device": "cpu"})
    loader = brain.make_dataloader(range(8), Stage.TRAIN, batch_size=2, num_workers=1)
    move_ahead(loader, "cpu")
    batches = iter(loader)
    next(batches)
    assert loader.yielded == 1
    assert len(list(batches)) == 3
    assert loader.yielded == 4
