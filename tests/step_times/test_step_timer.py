"""Which steps are measured, and that the batches between them come as the feed yields them."""

from __future__ import annotations

import itertools
import sys
from collections import Counter

import pytest

from ddpkit.step_times import StepTimer
from ddpkit.step_times.sampled_windows import MOST_PER_SECOND, SampledWindows

LENGTH = 500
PER_SECOND = 4 * MOST_PER_SECOND


class Loop:
    """Trains on a feed as the loop does: it counts batches, and syncs at the end of a step when
    that is due.
    """

    def __init__(self, factor=1, *, every=False, start=0):
        self.step = start
        self.factor = factor
        self.closes = True
        self.count = 1
        self.sync_due = 0
        self.timer = StepTimer(self, list, every=every)
        self.measured = []
        self.seen = []
        self.windows = 0

    def batches(self, window):
        """Yield the batches of a pass, as the feed."""
        for number in range(self.step, LENGTH):
            window.closes = (number + 1) % self.factor == 0 or number == LENGTH - 1
            yield number

    def train(self, until=LENGTH):
        """Train, and leave the pass at a batch."""
        self.sync_due = self.step + 1
        apart = 1
        for batch in self.timer.batches(self, self):
            if self.timer.measures:
                self.measured.append(batch)
            self.seen.append(batch)
            self.step += 1
            if self.closes and self.step >= self.sync_due:
                self.windows += len(self.timer.taken())
                apart = min(2 * apart, PER_SECOND)
                self.sync_due = self.step + apart
                self.timer.plan(self.step, self.sync_due, PER_SECOND)
            if self.step == until:
                break
        return self


def chosen_steps(factor, *, every=False, start=0):
    """Return the batches that are measured by the rule alone, batch by batch."""
    chosen = SampledWindows(every=every)
    found = []
    is_measured = False
    apart = 1
    sync_due = start + 1
    for step in range(start, LENGTH):
        if is_measured:
            found.append(step)
        if (step + 1) % factor and step != LENGTH - 1:
            continue
        if step + 1 >= sync_due:
            is_measured = False
            apart = min(2 * apart, PER_SECOND)
            sync_due = step + 1 + apart
            chosen.plan(step + 1, sync_due, PER_SECOND)
        is_measured = step + 1 >= chosen.due
        if is_measured:
            chosen.begin(step + 1)
    return found


@pytest.mark.parametrize("factor", [1, 3, 8])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("start", [0, 101])
def test_the_steps_are_measured_that_the_ranks_agree_on(factor, every, start):
    loop = Loop(factor, every=every, start=start - start % factor).train()
    assert loop.seen == list(range(start - start % factor, LENGTH))
    expected = chosen_steps(factor, every=every, start=start - start % factor)
    assert loop.measured == expected
    assert len(expected) >= (LENGTH - start) // (4 * factor) / 2
    steps = len({batch // factor for batch in expected})
    assert loop.windows + len(loop.timer.taken()) == steps


def test_a_pass_that_ends_early_is_followed_by_one_that_begins_anew():
    loop = Loop().train(until=333)
    assert loop.seen == list(range(333))
    loop.measured.clear()
    loop.seen.clear()
    loop.step = 0
    loop.train()
    assert loop.seen == list(range(LENGTH))
    assert loop.measured == chosen_steps(1)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_of_the_feed_ends_the_pass_wherever_it_comes(error):
    for last in range(1, 60):
        loop = Loop()

        def failing(window, loop=loop, last=last):
            yield from itertools.islice(Loop.batches(loop, window), last)
            raise error

        loop.batches = failing
        with pytest.raises(error):
            loop.train()
        assert loop.seen == list(range(last))


def test_a_feed_that_ends_is_not_asked_for_ever():
    for length in range(60):
        loop = Loop()
        loop.batches = lambda window, loop=loop, length=length: itertools.islice(
            Loop.batches(loop, window),
            length,
        )
        assert loop.train().seen == list(range(length))


def test_a_feed_is_left_when_its_pass_is_left():
    loop = Loop()
    ended = []

    def batches(window):
        try:
            yield from Loop.batches(loop, window)
        finally:
            ended.append(loop.step)

    loop.batches = batches
    loop.train(until=150)
    assert ended == [150]


def test_between_measured_steps_a_batch_costs_no_call_of_the_timer_but_one():
    loop = Loop()
    calls = Counter()

    def count(frame, event, _):
        if event == "call" and "ddpkit/step_times" in frame.f_code.co_filename:
            calls[loop.timer.measures, frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        loop.train()
    finally:
        sys.setprofile(None)
    unmeasured = {name: number for (measures, name), number in calls.items() if not measures}
    assert unmeasured.pop("batches") <= LENGTH + 1
    syncs_and_steps = 10 + len(loop.measured)
    assert max(unmeasured.values()) <= 3 * syncs_and_steps, unmeasured
