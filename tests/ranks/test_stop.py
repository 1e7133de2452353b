"""Several ranks and several Brains: who is asked to stop in predict, and whose limits of time
count.
"""

from __future__ import annotations

import re
import signal
import time

import pytest
import torch.distributed as dist

from ddpkit.comm import get_runtime, shorten_timeout
from ddpkit.distributed import ddp_init_group
from ddpkit.errors import RunStopped
from ddpkit.run import stop_control
from ddpkit.types import Stage
from tests.recipes import Regression, make, points


class Predicting(Regression):
    """Rank 1 is asked to stop in its third batch."""

    def predict_batch(self, batch):
        time.sleep(0.01)
        if self.rank == 1 and self.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return super().predict_batch(batch)


def stop_predicting(size):
    brain = make(Predicting)
    try:
        brain.predict(points(size), loader_kwargs={"batch_size": 1})
    except RunStopped as stopped:
        return stopped.code, int(re.search(r"at step (\d+)", stopped.words)[1])
    return "not stopped"


def test_if_one_rank_is_asked_predict_stops_on_all_at_one_step(ranks):
    (code, step), other = ranks.run(stop_predicting, 801)
    assert (code, step) == other
    assert code == 143
    assert 3 <= step <= 8


# ----------------------------------------------------------------------------------- limits of time


def limits():
    watch = get_runtime().watchdog
    return watch.hang_warning, watch.hang_timeout


class Limited(Regression):
    """Notes the limits that count in its stages, and may have another evaluate in its own
    validation.
    """

    other = None

    def on_stage_start(self, stage, epoch=None):
        self.found = [*getattr(self, "found", []), limits()]

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is Stage.VALID and self.other is not None:
            self.other.evaluate(points(2))
            self.found.append(limits())


def each_its_own():
    asr = make(Limited, hang_warning=0.0, hang_timeout=0.0)
    asr.other = teacher = make(Limited, hang_warning=20.0, hang_timeout=40.0)
    before = limits()
    asr.fit([1], points(4), points(2), train_loader_kwargs={"batch_size": 2})
    between = limits()
    teacher.evaluate(points(2))
    return before, asr.found, between, teacher.found, limits()


def test_the_limits_of_the_brain_that_works_count_not_of_the_one_made_last(ranks):
    none = (0.0, 0.0)
    teachers = (20.0, 40.0)
    assert ranks.run(each_its_own, world_size=1, init=False) == [
        (none, [none] * 3, none, [teachers] * 2, none)
    ]


kept = []


def keep_one():
    kept[:] = [make(Limited, hang_warning=20.0, hang_timeout=40.0)]


def evaluate_kept():
    ddp_init_group({})
    kept[0].evaluate(points(2))
    return kept.pop().found


def test_a_brain_that_outlives_its_group_has_its_limits_in_the_next(ranks):
    ranks.run(keep_one, world_size=1, init=False)
    assert ranks.run(evaluate_kept, world_size=1, init=False) == [[(20.0, 40.0)]]


def waiting_seconds():
    """How long the collectives of the default group wait."""
    seconds = []

    def shorten(limit):
        if seconds[-1:] != [limit]:
            seconds.append(limit)
        shorten_timeout(limit)

    class Nested(Regression):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            seconds.append(stage.name)
            if stage is Stage.TRAIN and self.other is not None:
                self.other.fit([1], points(4), train_loader_kwargs={"batch_size": 2})

    stop_control.shorten_timeout = shorten
    try:
        options = {"distributed_timeout_minutes": 5}
        outer, inner = (make(Nested, hang_timeout=limit, **options) for limit in (100.0, 10.0))
        patient = make(Nested, hang_timeout=0.0, **options)
        outer.other = inner
        inner.other = None
        patient.other = None
        for brain in (outer, patient):
            brain.fit([1], points(4), train_loader_kwargs={"batch_size": 2})
    finally:
        stop_control.shorten_timeout = shorten_timeout
    return seconds


@pytest.mark.costly
def test_collectives_wait_as_long_as_the_brain_that_works_wants(ranks):
    """A short while in a Brain's steps, the whole time when another starts, and until its next
    step.
    """
    outer = [300.0, 130.0, "TRAIN"]
    inner = [300.0, 40.0, "TRAIN"]
    patient = [300.0, "TRAIN", 300.0]
    assert ranks.run(waiting_seconds, world_size=2) == [[*outer, *inner, *patient]] * 2
    assert not dist.is_initialized()
