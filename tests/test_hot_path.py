"""What a step costs where the machine does not matter: calls of Python and reads by the host, against a loop by hand.

The loops are those of ``benchmarks/loop_overhead.py``. Counted is what a pass has more than one of half its length, so
that what belongs to a pass counts nothing. The collectives of a step are counted in ``tests/ranks/test_brain.py``.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from ddpkit.types import Stage
from tests.host_reads import HostReads

STEPS = 128
# A bound is a little above the figure of torch 2.13. It goes down when the figure does.
MOST_OF_BY_HAND = 0.75  # training: 252 calls of 345
MOST_MORE_IN_VALIDATION = 38  # 100 calls, 64 by hand; without loader workers, which look after random numbers


@pytest.fixture(scope="module")
def loops():
    return runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/loop_overhead.py"), run_name="loaded")


@pytest.fixture
def passes(loops):
    """Passes of a given number of steps: training and validation, of ddpkit and by hand."""
    brain, bare = loops["make_brain"](), loops["Bare"](loops["make_net"]())
    options = {"batch_size": loops["BATCH"], "collate_fn": loops["OneBatch"]()}
    brain.fit([1], range(8 * loops["BATCH"]), train_loader_kwargs=options)

    def passes_of(steps):
        data = range(steps * loops["BATCH"])
        train, valid = (brain.make_dataloader(data, stage, **options) for stage in (Stage.TRAIN, Stage.VALID))
        by_hand = DataLoader(data, **options)
        return {
            "train": lambda: brain._fit_train(train, 1, enable=False),
            "valid": lambda: brain._fit_valid(valid, 1, enable=False),
            "train by hand": lambda: bare.train(by_hand),
            "valid by hand": lambda: bare.evaluate(by_hand),
        }

    return passes_of


def test_calls_of_python_per_step(loops, passes):
    long, short = passes(2 * STEPS), passes(STEPS)
    calls = {}
    for name in long:
        for run in (long[name], short[name]):
            run()
        more = loops["count_calls"](long[name], 1) - loops["count_calls"](short[name], 1)
        calls[name] = more / STEPS
    assert calls["train"] <= MOST_OF_BY_HAND * calls["train by hand"], calls
    assert calls["valid"] <= calls["valid by hand"] + MOST_MORE_IN_VALIDATION, calls


@pytest.mark.parametrize(("stage", "per_step"), [("train", 1), ("valid", 0)])
def test_reads_by_the_host_per_step(passes, stage, per_step):
    """One in training: the norm, for clipping and for the finite check."""
    found = []
    for steps in (2 * STEPS, STEPS):
        with HostReads() as reads:
            passes(steps)[stage]()
        found.append(reads.count)
    assert found[0] - found[1] <= per_step * STEPS
