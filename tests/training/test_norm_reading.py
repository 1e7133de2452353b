"""A run on a GPU tries both ways to read the gradients' norm, and keeps the quicker one; on a CPU,
whose fused kernels skip by themselves as a GPU's do.
"""

from __future__ import annotations

import functools
import math
from unittest import mock

import pytest

from ddpkit import optim
from ddpkit.brain import run_of
from ddpkit.distributed import get_rank
from ddpkit.optim import making
from ddpkit.training import norm_reading
from ddpkit.training.norm_reading import (
    CHANGING_STEPS,
    SETTLING_STEPS,
    STEPS_OF_A_TURN,
    TRIED_STEPS,
    TURNS,
    NormReading,
)
from tests.training.test_late_steps import ADAMW, BATCHES, SGD, data, make, told

COPIES = TRIED_STEPS // BATCHES + 2  # of the data: steps enough to choose, and to go on
TURNS_OF_STEPS = [is_later for is_later in TURNS for _ in range(STEPS_OF_A_TURN)]


class Clock:
    """Gives each step so many seconds, by how it is read; and more to those of some numbers."""

    def __init__(self, later, first, long_steps=()):
        self.reading = NormReading(self)
        self.seconds = {True: later, False: first}
        self.long_steps = long_steps
        self.now = 0.0
        self.steps = 0

    def __call__(self):
        if self.steps:
            self.now += self.seconds[self.reading.is_later] + 9.0 * (self.steps in self.long_steps)
        self.steps += 1
        return self.now


def tried(clock, count=TRIED_STEPS + 20, *, can_be_late=True):
    """Return how each step was read."""
    clock.reading.has_read_later = can_be_late
    return [clock.reading.begin_step() for _ in range(count)]


@pytest.fixture
def on_gpu(monkeypatch):
    for module in (optim, making):
        monkeypatch.setattr(module, "GPUS", ("cpu",))


def train(clock=None, opt=ADAMW, world_size=1):
    brain = make(functools.partial(opt, lr=0.05), max_grad_norm=0.7, nonfinite_patience=99)
    if clock is not None:
        run_of(brain).train_step.norm_reading = clock.reading
    samples = data((5,)) * (COPIES * world_size)
    brain.fit([1], samples, train_loader_kwargs={"batch_size": 4})
    return brain


@pytest.mark.parametrize(("later", "first"), [(1.0, 1.2), (1.2, 1.0), (1.0, 1.0)])
def test_the_quicker_way_is_kept(later, first):
    steps = tried(Clock(later, first))
    assert steps[:SETTLING_STEPS] == [True] * SETTLING_STEPS
    assert steps[SETTLING_STEPS:TRIED_STEPS] == TURNS_OF_STEPS
    assert set(steps[TRIED_STEPS:]) == {later <= first}


def test_a_few_long_steps_change_nothing():
    """As saves, validations, and the first steps of a turn are."""
    long_steps = {SETTLING_STEPS + 2 * STEPS_OF_A_TURN + offset for offset in (4, 9, 11, 13)}
    assert tried(Clock(1.2, 1.0, long_steps))[-1] is False
    changing = set()
    for turn in range(len(TURNS)):
        begin = SETTLING_STEPS + turn * STEPS_OF_A_TURN
        changing |= set(range(begin + 1, begin + 1 + CHANGING_STEPS))
    slow = Clock(1.0, 1.0, changing)
    tried(slow, TRIED_STEPS)
    assert {second for seconds in slow.reading._seconds.values() for second in seconds} == {1.0}


def test_the_settling_steps_are_not_counted():
    assert tried(Clock(1.0, 1.2, range(SETTLING_STEPS)))[-1] is True


def test_where_nothing_can_be_read_later_the_run_goes_on_as_it_began():
    """An optimizer may come to be able to, as when each of its parameters has a state."""
    assert tried(Clock(1.2, 1.0), can_be_late=False)[-1] is True


@pytest.mark.costly
@pytest.mark.parametrize("opt", [ADAMW, functools.partial(SGD, momentum=0.9)])
def test_both_ways_are_taken_and_give_the_same_bits(on_gpu, opt):
    quick, slow = Clock(1.0, 2.0), Clock(2.0, 1.0)
    kept_later, kept_first = train(quick, opt), train(slow, opt)
    assert told(kept_later) == told(kept_first)
    assert kept_first.progress.nonfinite == COPIES
    # a step that is looked at first is closed in its hook
    expected = [True] * SETTLING_STEPS + TURNS_OF_STEPS
    for brain, is_later in ((kept_later, True), (kept_first, False)):
        left = len(brain.open) - TRIED_STEPS
        # the first makes the optimizer's state
        assert brain.open == [False, *expected[1:], *[is_later] * left]
        assert left >= BATCHES


@pytest.mark.costly
def test_the_bits_are_those_of_a_run_that_never_tries(on_gpu, monkeypatch):
    tried_both = told(train(Clock(2.0, 1.0)))
    for module in (optim, making):
        monkeypatch.setattr(module, "GPUS", ())
    assert told(train()) == tried_both


@pytest.mark.costly
def test_a_cpu_tries_nothing():
    clock = Clock(1.0, math.inf)
    train(clock)
    assert clock.steps == 0


def choose(seconds_of_rank):
    """Train until the run has chosen how the norm is read, and on, by a clock of each rank.

    Returns:
        How the steps after the trial were read, all that the training ends with, and how often the
        ranks have agreed on it.
    """
    clock = Clock(*seconds_of_rank[get_rank()])
    with pytest.MonkeyPatch.context() as patch:
        for module in (optim, making):
            patch.setattr(module, "GPUS", ("cpu",))
        asked = mock.Mock(wraps=norm_reading.sum_over_ranks)
        patch.setattr(norm_reading, "sum_over_ranks", asked)
        brain = train(clock, world_size=2)
    return set(brain.open[TRIED_STEPS:]), told(brain), asked.call_count


@pytest.mark.costly
def test_ranks_choose_one_way_together_and_agree_once(ranks):
    """What is quicker on rank 0 is slower on rank 1, and there by more."""
    later = ranks.run(choose, [(1.1, 1.0), (1.0, 2.0)], world_size=2)
    first = ranks.run(choose, [(1.0, 1.1), (2.0, 1.0)], world_size=2)
    assert [found[0] for found in later] == [{True}] * 2
    assert [found[0] for found in first] == [{False}] * 2
    assert later[0][1] == first[0][1]
    assert [found[2] for found in later + first] == [1] * 4
