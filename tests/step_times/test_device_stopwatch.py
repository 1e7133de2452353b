"""Times of a step on a GPU, with events that stand in for CUDA's."""

from __future__ import annotations

import pytest

from ddpkit.step_times import StepTimer
from ddpkit.step_times.device_stopwatch import MOST_WAITS, DeviceStopwatch


class Gpu:
    """A GPU that does one thing after another, later than the host says so."""

    def __init__(self):
        self.end = 0.0  # of all that was queued, in milliseconds
        self.reached = 0.0
        self.is_capturing = False
        self.recorded = 0

    def queue(self, milliseconds):
        self.end += milliseconds

    def record(self):
        self.recorded += 1
        return None if self.is_capturing else Mark(self, self.end)


class Mark:
    def __init__(self, gpu, at):
        self.gpu = gpu
        self.at = at

    def query(self):
        return self.gpu.reached >= self.at

    def elapsed_time(self, end_event):
        return end_event.at - self.at


def run(watch, gpu, reached=0.0):
    """Go through a step of 1 + 2 + 4 + 8 + 16 milliseconds on the GPU."""
    watch.switch("move")
    gpu.queue(1)
    watch.note_call()
    gpu.queue(2)
    watch.begin_backward()
    gpu.queue(4)
    watch.switch("exchange")
    gpu.queue(8)
    watch.switch("optimizer")
    gpu.queue(16)
    watch.switch("other")
    gpu.reached = reached
    watch.finish()


def test_phases_take_what_they_take_on_the_gpu():
    gpu = Gpu()
    watch = DeviceStopwatch(gpu.record)
    run(watch, gpu)
    gpu.reached = gpu.end
    expected = {
        "data": 0,
        "move": 1,
        "forward": 2,
        "backward": 4,
        "exchange": 8,
        "optimizer": 16,
        "other": 0,
    }
    assert watch.phase_seconds() == pytest.approx(
        {name: one / 1e3 for name, one in expected.items()}
    )


def test_what_came_before_a_backward_pass_without_a_call_of_a_model_is_its_forward_pass():
    gpu = Gpu()
    watch = DeviceStopwatch(gpu.record)
    watch.switch("move")
    gpu.queue(5)
    watch.begin_backward()
    watch.finish()
    gpu.reached = gpu.end
    assert watch.phase_seconds()["forward"] == pytest.approx(0.005)


def test_a_gpu_that_is_not_there_yet_is_not_waited_for():
    gpu = Gpu()
    watch = DeviceStopwatch(gpu.record)
    run(watch, gpu)
    assert watch.phase_seconds() == watch.seconds  # of the host
    assert sum(watch.seconds.values()) < 1


@pytest.mark.parametrize(("reached", "is_bound"), [(31, True), (30, False)])
def test_the_host_is_the_limit_where_the_gpu_has_done_all_that_it_was_given(reached, is_bound):
    gpu = Gpu()
    watch = DeviceStopwatch(gpu.record)
    run(watch, gpu, reached)
    assert watch.is_host_bound == is_bound


def test_nothing_is_recorded_into_a_graph_that_is_captured():
    gpu = Gpu()
    watch = DeviceStopwatch(gpu.record)
    gpu.is_capturing = True
    run(watch, gpu)
    gpu.reached = gpu.end
    assert watch.phase_seconds() == watch.seconds


def test_a_model_with_many_waits_has_few_of_them_marked():
    gpu = Gpu()
    watch = DeviceStopwatch(gpu.record)
    for _ in range(1000):
        watch.end_wait(watch.begin_wait())
    assert gpu.recorded == 1 + 2 * MOST_WAITS
    assert watch.phase == "data"


class Feed:
    def __init__(self, number):
        self.number = number

    def batches(self, window):
        window.closes = True
        window.count = 1
        yield from range(self.number)


class Position:
    step = 0
    closes = True
    count = 1


def test_the_newest_step_is_told_of_at_the_next_sync(monkeypatch):
    gpu = Gpu()
    taken = []
    place = Position()
    timer = StepTimer(place, list)
    monkeypatch.setattr(timer, "_new_watch", lambda: DeviceStopwatch(gpu.record))
    for _ in timer.batches(Feed(6), place):
        place.step += 1
        gpu.queue(1)
        if place.step in {1, 4, 6}:
            gpu.reached = gpu.end  # the loop has read a loss
            taken.append(timer.taken())
            timer.plan(place.step, place.step + 1, 1)
    assert [len(one) for one in taken] == [0, 2, 2]
    assert [[one.is_cut for one in windows] for windows in taken] == [
        [],
        [False, False],
        [True, False],
    ]
