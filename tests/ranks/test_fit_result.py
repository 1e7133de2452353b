"""What `fit` returns is the same on every rank, and on any number of them."""

from __future__ import annotations

import pytest

from ddpkit.distributed import if_main_process
from ddpkit.epoch_loop import EpochCounter
from tests.contract.test_fit_result import Saving, fit, saving

STEPS = {"global_batch_size": 4, "shard_evaluation": True}


def train(folder, options, main_alone):
    counter = EpochCounter(3)
    brain = saving(folder, counter, **options)
    if main_alone:
        brain.on_stage_end = lambda *where: (
            Saving.on_stage_end(brain, *where) if if_main_process() else None
        )
    return fit(brain, counter)


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize("main_alone", [False, True])
@pytest.mark.parametrize(
    "options",
    [STEPS, {**STEPS, "optimizer_step_limit": 8}, {**STEPS, "test_only": True}],
)
def test_what_fit_returns_is_the_same_on_every_rank(ranks, options, main_alone, tmp_path):
    [alone] = ranks.run(train, tmp_path / "1", options, main_alone, world_size=1)
    for world in (2, 3):
        results = ranks.run(train, tmp_path / str(world), options, main_alone, world_size=world)
        assert all(one == results[0] for one in results)
        found = results[0]
        for name in ("reason", "epochs", "optimizer_steps"):
            assert getattr(found, name) == getattr(alone, name)
        for name in ("train_loss", "valid_loss"):
            loss = getattr(alone, name)
            assert getattr(found, name) == (
                None if loss is None else pytest.approx(loss, abs=1e-12)
            )
        assert (found.newest_checkpoint is None) == ("test_only" in options)
        if found.newest_checkpoint is not None:
            assert found.newest_checkpoint.parent == tmp_path / str(world)
