"""A run that goes on on several ranks: nothing is said of data that has not changed, on any number
of them.
"""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler

from ddpkit.checkpoints import Checkpointer
from ddpkit.dataloader import LoopedLoader, make_dataloader
from ddpkit.epoch_loop import EpochCounter

from .test_exact_resume import QUIET, Killed, Learner, Stream, numbered

SAMPLES = 26


def data(kind):
    by_two = BatchSampler(SequentialSampler(range(SAMPLES)), 2, drop_last=False)
    if kind == "sampler":
        return numbered(SAMPLES), {"batch_sampler": by_two}
    if kind == "stream":
        return Stream(SAMPLES), {"batch_size": 2}
    if kind == "looped stream":
        return LoopedLoader(make_dataloader(Stream(SAMPLES), batch_size=2), 6), {}
    if kind == "looped":
        return LoopedLoader(make_dataloader(numbered(SAMPLES), batch_size=2, shuffle=True), 6), {}
    return numbered(SAMPLES), {"batch_size": 2, "shuffle": True, "drop_last": True}


class Kept(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.words = []

    def emit(self, record):
        self.words.append(record.getMessage())


def train(folder, kind, dies_at, factor):
    """Run as a script does; return what the ranks were warned of, and the samples of each."""
    torch.manual_seed(3)
    net = nn.Linear(3, 1).double()
    counter = EpochCounter(1)
    kept = Kept()
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    options = {**QUIET, "ckpt_interval_steps": 1, "grad_accumulation_factor": factor}
    brain = Learner(
        {"net": net},
        lambda each: torch.optim.SGD(each, lr=0.01),
        None,
        options,
        checkpointer,
    )
    brain.dies_at = dies_at
    brain.seen = []
    brain.losses = []
    brain.noisy = False
    train_set, kwargs = data(kind)
    logging.getLogger("ddpkit").addHandler(kept)
    try:
        brain.fit(counter, train_set, train_loader_kwargs=kwargs)
    except Killed:
        pass
    finally:
        logging.getLogger("ddpkit").removeHandler(kept)
    return [text for text in kept.words if "checkpoint" in text], brain.seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "plan",
        "stream",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("looped", "sampler", ("looped stream"))
        ),
    ],
)
def test_an_unchanged_recipe_is_told_nothing_on_any_number_of_ranks(ranks, tmp_path, kind):
    ranks.run(train, tmp_path / "2", kind, (1, 5), 3, world_size=2)
    assert list((tmp_path / "2").glob("*/brain.ckpt"))
    for world_size in (1, 2, 3):
        folder = shutil.copytree(tmp_path / "2", tmp_path / f"on {world_size}", symlinks=True)
        found = ranks.run(train, folder, kind, None, 3, world_size=world_size)
        assert [words for words, _ in found] == [[]] * world_size
        assert all(seen for _, seen in found)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "now"), [(1, 3), (3, 1)])
def test_dealt_batches_come_once_each_with_another_accumulation(ranks, tmp_path, before, now):
    first = ranks.run(train, tmp_path, "sampler", (1, 5), before, world_size=2)
    rest = ranks.run(train, tmp_path, "sampler", None, now, world_size=2)
    assert any(
        f"{2 * now} batches per optimizer step, before {2 * before}" in text for text in rest[0][0]
    )

    def samples(found):
        return sorted(number for _, seen in found for *_, numbers in seen for number in numbers)

    done = [
        number
        for _, seen in first
        for *_, numbers in seen[: 3 if before == 3 else 4]
        for number in numbers
    ]
    assert sorted(done + samples(rest)) == list(range(SAMPLES))
