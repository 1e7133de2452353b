"""A rank that comes to a collective past its limit of time is named, and not the rank that has
waited.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ddpkit
from ddpkit.base import POSITION, beat_key, temporarily
from ddpkit.comm import get_runtime
from ddpkit.control import time_outs
from ddpkit.distributed import control_group
from ddpkit.errors import RankFailedError
from tests.recipes import Squares

MINUTES = 0.005  # the limit of each collective
SECONDS = 60 * MINUTES
TOLD = "time-out/told"


def beat_until_told(rank):
    """Tell where this rank is, as its watchdog does."""
    store = get_runtime().store
    beats = 0
    names = [f"{TOLD}/{one}" for one in range(dist.get_world_size()) if one != rank]
    while not store.check(names[-1:]):
        beats += 1
        status = POSITION.own_status(rank, 1.0, look=True)
        status.beats = beats
        store.set(beat_key(rank), status.to_json())
        time.sleep(0.01)


class MainWorksAlone(Squares):
    """Has the main process work at the end of a stage, where the others do not."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if ddpkit.if_main_process() and stage == ddpkit.Stage.VALID:
            beat_until_told(0)


def fits():
    """Return what fit raises, and what is the cause of that."""
    get_runtime().timeout = timedelta(seconds=SECONDS)
    control_group()
    brain = MainWorksAlone(
        {"net": torch.nn.Linear(1, 1)},
        lambda own: torch.optim.SGD(own, lr=0.1),
        run_opts={"device": "cpu", "distributed_timeout_minutes": MINUTES},
    )
    data = torch.ones(8, 1)
    loader = {"batch_size": 2}
    with (
        temporarily(time_outs, FRESH_SECONDS=0.5),
        pytest.raises(RankFailedError) as caught,
    ):
        brain.fit([1, 2], data, data, train_loader_kwargs=loader, valid_loader_kwargs=loader)
    get_runtime().store.set(f"{TOLD}/{dist.get_rank()}", "")
    return str(caught.value), str(caught.value.__cause__)


@pytest.mark.costly
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_rank_that_has_not_come_is_named(ranks, world_size):
    main, *others = ranks.run(fits, world_size=world_size)
    named = [words for words, cause in others if "Timed out waiting 300ms" in cause]
    assert named
    for words in named:
        assert re.match(r"rank \d \(.*, pid \d+\) waited 0.3 s", words)
        assert "(--distributed_timeout_minutes=0.005)" in words
        assert ", at test_time_outs_of_fit.py:" in words
        assert "for rank 0 (" in words
        assert "which is in VALID of epoch 1, at test_time_outs_of_fit.py:" in words
        assert "run_on_main(func)" in words
    assert all("for rank 0 (" in words for words, _ in others)
    assert main[0] in named, "the late rank is told the same"
