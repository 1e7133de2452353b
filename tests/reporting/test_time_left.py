"""The time left of a call of fit, from a clock that the test sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddpkit.reporting import Estimate, TimeLeft


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    stand_in = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("ddpkit.reporting.time_left.time", stand_in)
    return clock


def run_epoch(clock, left, epoch, training, validation=0.0, rest=0.0):
    """Let an epoch go by."""
    left.begin_training(epoch)
    clock.now += training
    if validation:
        left.begin_validation()
    clock.now += validation + rest


def near(seconds, *, is_least=False):
    return Estimate(pytest.approx(seconds), is_least)


def test_the_first_epoch_tells_of_training_alone_until_it_is_validated(clock):
    left = TimeLeft(last=4, validates=True)
    left.begin_training(1)
    assert left.estimate(0.0) is None, "nothing is done"
    clock.now += 10
    assert left.estimate(0.25) == near(30 + 3 * 40, is_least=True)
    clock.now += 30
    left.begin_validation()
    clock.now += 5
    assert left.estimate(0.5) == near(5 + 3 * (40 + 10))


def test_without_a_validation_the_first_epoch_tells_all(clock):
    left = TimeLeft(last=2)
    left.begin_training(1)
    clock.now += 10
    assert left.estimate(0.5) == near(10 + 20)


def test_finished_epochs_count_with_validations_hooks_and_saves(clock):
    left = TimeLeft(last=3, validates=True)
    run_epoch(clock, left, 1, training=40, validation=10, rest=2)
    left.begin_training(2)
    clock.now += 10
    assert left.estimate(0.25) == near(30 + 12 + 52)
    clock.now += 30
    left.begin_validation()
    clock.now += 5
    assert left.estimate(0.5) == near(5 + 52)


def test_a_slow_first_epoch_is_left_out_once_there_are_others(clock):
    left = TimeLeft(last=10)
    for epoch, seconds in ((1, 500), (2, 20), (3, 40)):
        run_epoch(clock, left, epoch, training=seconds)
    left.begin_training(4)
    clock.now += 15
    assert left.estimate(0.5) == near(15 + 6 * 30)


def test_the_last_batch_of_the_last_epoch_leaves_nothing(clock):
    left = TimeLeft(last=1)
    left.begin_training(1)
    clock.now += 10
    assert left.estimate(1.0) == near(0)


def test_an_epoch_that_a_restart_has_cut_counts_by_its_own_part_and_not_as_finished(clock):
    left = TimeLeft(last=6, validates=True)
    left.begin_training(5, done=0.75)
    clock.now += 10
    assert left.estimate(0.875) == near(10 + 80, is_least=True)
    clock.now += 10
    left.begin_validation()
    clock.now += 8
    assert left.estimate(1.0) == near(80 + 8)
    left.begin_training(6)
    clock.now += 40
    assert left.estimate(0.5) == near(40, is_least=True), "no epoch has been made as a whole"


def test_of_data_of_unknown_length_the_finished_epochs_tell(clock):
    left = TimeLeft(last=3)
    left.begin_training(1)
    clock.now += 5
    assert left.estimate(None) is None
    clock.now += 25
    left.begin_training(2)
    clock.now += 10
    assert left.estimate(None) == near(20 + 30)
    clock.now += 50
    assert left.estimate(None) == near(30), "longer than the one before"
    left.begin_training(3, done=None)
    assert left.estimate(None) is not None


def test_without_a_known_end_there_is_no_estimate(clock):
    left = TimeLeft()
    run_epoch(clock, left, 1, training=10)
    left.begin_training(2)
    clock.now += 5
    assert left.estimate(0.5) is None
    assert TimeLeft(last=3).estimate(0.5) is None, "no epoch has begun"


def test_more_epochs_than_were_known_leave_no_negative_time(clock):
    left = TimeLeft(last=1)
    run_epoch(clock, left, 1, training=10)
    left.begin_training(2)
    clock.now += 5
    assert left.estimate(0.5) == near(5)
