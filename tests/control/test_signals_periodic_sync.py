"""The sync, with a clock that the test moves, and with simulated ranks."""

from __future__ import annotations

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from ddpkit.control.periodic_sync import PeriodicSync, Requests
from ddpkit.control.signals import CAUSES, TIME_LIMIT


class Clock(threading.local):
    """A clock per thread: each simulated rank has its own."""

    now = 1000.0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(
        "ddpkit.control.periodic_sync.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    return clock


class Ranks:
    """Adds up what the threads of a pool bring, as an all-reduce would."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size)
        self.brought = [None] * world_size
        self.calls = 0

    def add_up(self, rank, values):
        self.brought[rank] = values
        self.calls += rank == 0
        self.barrier.wait(60)
        sums = [sum(column) for column in zip(*self.brought, strict=True)]
        self.barrier.wait(60)
        return sums

    def run(self, work):
        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(work, range(self.world_size)))


def steps_of_syncs(clock, sync, seconds_per_step, steps, first=1):
    """Take steps of a given length, and return at which of them the ranks conferred, and when."""
    found = []
    for step in range(first, first + steps):
        clock.now += seconds_per_step(step)
        if step >= sync.due:
            sync(step, 0.0, 1.0, 1, Requests())
            found.append((step, clock.now))
    return found


def test_the_interval_doubles_up_to_a_second(clock):
    sync = PeriodicSync(list, 1, is_main=True)
    sync.start(0)
    assert sync.due == 1
    found = steps_of_syncs(clock, sync, lambda step: 0.01, 1000)
    steps = [step for step, _ in found]
    apart = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert steps[0] == 1
    assert apart[:6] == [2, 4, 8, 16, 32, 64]
    assert set(apart[6:]) <= {99, 100}, "a hundred steps of ten milliseconds are a second"
    assert len(found) < 20


def test_the_interval_follows_the_steps_as_they_get_longer_and_shorter(clock):
    sync = PeriodicSync(list, 1, is_main=True)
    sync.start(0)
    steps_of_syncs(clock, sync, lambda step: 0.001, 3000)
    slow = steps_of_syncs(clock, sync, lambda step: 0.5, 5000, first=3001)
    times = [when for _, when in slow]
    assert all(later - earlier <= 1.01 for earlier, later in itertools.pairwise(times[2:]))
    fast = steps_of_syncs(clock, sync, lambda step: 0.001, 20_000, first=8001)
    times = [when for _, when in fast]
    assert all(0.9 < later - earlier < 1.1 for earlier, later in itertools.pairwise(times[12:]))


def test_steps_longer_than_the_interval_beat_each_time(clock):
    sync = PeriodicSync(list, 1, is_main=True, interval=1.0)
    sync.start(0)
    assert [step for step, _ in steps_of_syncs(clock, sync, lambda step: 3.0, 5)] == [1, 2, 3, 4, 5]


def test_a_stopped_clock_only_doubles(clock):
    sync = PeriodicSync(list, 1, is_main=True)
    sync.start(0)
    found = steps_of_syncs(clock, sync, lambda step: 0.0, 70)
    assert [step for step, _ in found] == [1, 3, 7, 15, 31, 63]


def test_an_epoch_begins_with_a_beat_and_keeps_the_pace(clock):
    sync = PeriodicSync(list, 1, is_main=True)
    sync.start(0)
    steps_of_syncs(clock, sync, lambda step: 0.1, 100)
    clock.now += 500  # an evaluation
    sync.start(0)
    assert sync.due == 1
    steps = [step for step, _ in steps_of_syncs(clock, sync, lambda step: 0.1, 40)]
    assert steps in ([1, 3, 7, 15, 24, 33], [1, 3, 7, 15, 25, 35])
    sync.start(17)  # an epoch that goes on after a recovery
    assert sync.due == 18


def test_an_epoch_whose_first_step_waits_for_the_loader_keeps_most_of_the_pace(clock):
    sync = PeriodicSync(list, 1, is_main=True)
    sync.start(0)
    steps_of_syncs(clock, sync, lambda step: 0.001, 3000)
    sync.start(0)
    found = steps_of_syncs(clock, sync, lambda step: 0.001 if step > 1 else 0.2, 3000)
    assert len(found) <= 6, "from one step on it would be eleven"
    assert found[1][0] <= 1 + 1000 // 4


def test_an_epoch_of_slow_steps_after_one_of_quick_steps_confers_each_second_at_once(clock):
    """As with longer sequences, or in a second fit: a preempted run has seconds to save."""
    sync = PeriodicSync(list, 1, is_main=True)
    sync.start(0)
    steps_of_syncs(clock, sync, lambda step: 0.001, 3000)
    sync.start(0)
    assert [step for step, _ in steps_of_syncs(clock, sync, lambda step: 1.0, 5)] == [1, 2, 3, 4, 5]


def test_one_quick_step_before_slow_ones_does_not_put_off_the_next_sync(clock):
    """As in an evaluation whose data is sorted by length, after one of the same data that was
    quick.
    """
    sync = PeriodicSync(list, 1, is_main=True)
    sync.start(0)
    steps_of_syncs(clock, sync, lambda step: 0.0001, 6000)
    sync.start(0)
    steps = [
        step
        for step, _ in steps_of_syncs(clock, sync, lambda step: 0.0001 if step == 1 else 0.1, 40)
    ]
    assert steps[:2] == [1, 3]
    assert steps[2] in {12, 13}, "a second later"


def test_what_a_beat_costs_is_not_taken_for_a_step(clock):
    def slow_sum(values):
        clock.now += 5.0
        return list(values)

    sync = PeriodicSync(slow_sum, 1, is_main=True)
    sync.start(0)
    found = steps_of_syncs(clock, sync, lambda step: 0.01, 500)
    assert len(found) < 15


def test_reports(clock):
    sync = PeriodicSync(list, 1, is_main=True)
    sync.start(0)
    report = sync(4, 6.0, 3.0, 5, Requests(2.5))
    assert (report.step, report.loss, report.samples, report.main_seconds) == (4, 2.0, 5, 2.5)
    nothing = sync(5, 0.0, 0.0, 0, Requests())
    assert math.isnan(nothing.loss)
    assert nothing.samples == 0
    assert PeriodicSync(list, 1, is_main=False)(1, 0.0, 1.0, 1, Requests(7.0)).main_seconds == 0.0


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_learn_the_same_at_the_same_steps(clock, world_size):
    """Each has a clock of its own, which runs differently; the steps of the syncs must not depend
    on it.
    """
    ranks = Ranks(world_size)

    def work(rank):
        sync = PeriodicSync(
            lambda values: ranks.add_up(rank, values),
            world_size,
            is_main=rank == 0,
        )
        clock.now = 10_000.0 * rank
        reports = []
        for _ in range(2):
            sync.start(0)
            for step in range(1, 400):
                clock.now += 0.002 * (rank + 1) + 0.00001 * step
                if step >= sync.due:
                    report = sync(
                        step,
                        float(step * rank),
                        float(step),
                        step,
                        Requests(60.0 + step + rank),
                    )
                    reports.append((report, sync.due))
        return reports

    results = ranks.run(work)
    assert all(result == results[0] for result in results)
    assert len(results[0]) == ranks.calls > 8
    for report, _ in results[0]:
        assert report.samples == report.step * world_size
        assert report.loss == pytest.approx((world_size - 1) / 2)
        assert report.main_seconds == 60.0 + report.step, "the main process's own answer"


def test_the_slowest_rank_does_not_decide_alone(clock):
    """The pace is that of the mean: ranks that wait for each other take equal steps anyway."""
    ranks = Ranks(2)

    def work(rank):
        sync = PeriodicSync(lambda values: ranks.add_up(rank, values), 2, is_main=rank == 0)
        sync.start(0)
        syncs = 0
        for step in range(1, 1001):
            clock.now += 0.01
            if step >= sync.due:
                sync(step, 0.0, 1.0, 1, Requests())
                syncs += 1
        return syncs

    one, other = ranks.run(work)
    assert one == other < 20


def test_a_wish_of_any_rank_is_told_to_all():
    others = [0.0] * 5 + [1.0] + [0.0] * len(CAUSES)
    sync = PeriodicSync(
        lambda numbers: [mine + other for mine, other in zip(numbers, others, strict=True)],
        2,
        is_main=True,
    )
    sync.start(0)
    report = sync(1, 1.0, 1, 1, Requests())
    assert report.save_wanted
    assert not report.stop
    others[6 + CAUSES.index("SIGUSR1")] = 1.0
    assert sync(2, 1.0, 1, 1, Requests(stop=TIME_LIMIT)).stop == "SIGUSR1", (
        "the first of the causes, on all ranks"
    )
    assert not PeriodicSync(list, 1, is_main=True)(1, 1.0, 1, 1, Requests()).save_wanted
    assert (
        PeriodicSync(list, 1, is_main=True)(1, 1.0, 1, 1, Requests(stop="SIGINT")).stop == "SIGINT"
    )
