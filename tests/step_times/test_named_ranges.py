"""``--profile_training``: the phases of each step are named ranges in the trace, and nothing is
marked without it.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch.profiler import profile, schedule

from ddpkit.step_times import RANGE, named_ranges
from tests.needs import needs_torch
from tests.recipes import Failing, OwnFitBatch, Regression, make, points

pytestmark = [
    pytest.mark.filterwarnings("ignore:Profiler won't be using warmup"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle"),
]


def events_of(path):
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [one for one in events if one.get("ph") == "X"]


def ranges_in(events):
    return [one for one in events if one["name"].startswith(RANGE)]


def times(one):
    return one["ts"], one["ts"] + one["dur"]


def inside(events, name, outer):
    """Return how often an operation runs inside of a range."""
    begin, end = times(outer)
    return sum(
        one["name"] == name and begin <= times(one)[0] and times(one)[1] <= end for one in events
    )


def profiled(folder, cls=Regression, batches=8, **options):
    given = {"profile_warmup": 1, "profile_steps": 3, **options}
    brain = make(cls, hparams={"output_folder": str(folder)}, profile_training=True, **given)
    brain.fit([1], points(batches))
    (trace,) = (folder / "profiler_logs").iterdir()
    return brain, events_of(trace)


@pytest.mark.parametrize("cls", [Regression, OwnFitBatch])
@pytest.mark.corner
@pytest.mark.parametrize("options", [{}, {"measure_steps": "off"}, {"profile_warmup": 0}], ids=str)
def test_each_recorded_batch_has_its_ranges_with_the_operations_in_them(
    cls,
    options,
    tmp_path,
    caplog,
):
    caplog.set_level("INFO")
    _, events = profiled(tmp_path, cls, **options)
    by_name = {}
    for one in ranges_in(events):
        by_name.setdefault(one["name"].removeprefix(RANGE), []).append(one)
    assert len(by_name["forward"]) == len(by_name["backward"]) == len(by_name["optimizer"]) == 3
    assert {"data", "move", "other"} < set(by_name)
    for one in by_name["forward"]:
        assert inside(events, "aten::linear", one) == 1
    for one in by_name["backward"]:
        assert inside(events, "AddmmBackward0", one) == 1
    for one in by_name["optimizer"]:
        assert inside(events, "Optimizer.step#SGD.step", one) == 1
    assert "\nA batch, on the host: data " in caplog.text


def test_ranges_lie_side_by_side_and_inside_of_a_step(tmp_path):
    _, events = profiled(tmp_path)
    steps = [times(one) for one in events if one["name"].startswith("ProfilerStep#")]
    ends = 0.0
    for begin, end in sorted(map(times, ranges_in(events))):
        assert begin >= ends
        assert any(first <= begin and end <= last for first, last in steps)
        ends = end


def test_with_accumulation_each_batch_is_marked_and_the_step_once(tmp_path):
    _, events = profiled(
        tmp_path,
        batches=9,
        profile_steps=6,
        profile_warmup=0,
        grad_accumulation_factor=3,
    )
    found = Counter(one["name"].removeprefix(RANGE) for one in ranges_in(events))
    assert (found["forward"], found["backward"], found["optimizer"]) == (6, 6, 2)


class Counted(Regression):
    """Counts the ranges that are open as batches begin, and what was opened in all."""

    opened = ()

    def on_fit_batch_start(self, batch, should_step):
        self.opened = (*self.opened, len(OPENED))


OPENED = []


@pytest.fixture
def _counts_ranges(monkeypatch):
    OPENED.clear()

    def note(name):
        OPENED.append(name)
        return torch.profiler.record_function(name)

    monkeypatch.setattr(named_ranges, "record_function", note)


@pytest.mark.usefixtures("_counts_ranges")
def test_nothing_is_marked_before_the_profile_and_after_it(tmp_path):
    brain, _ = profiled(tmp_path, Counted, profile_warmup=2, profile_steps=2)
    assert brain.opened[:2] == (0, 0)
    assert brain.opened[1] < brain.opened[2] < brain.opened[3] <= brain.opened[4]
    assert len(set(brain.opened[4:])) == 1


@pytest.mark.usefixtures("_counts_ranges")
def test_without_a_profile_nothing_is_marked():
    make(Counted, measure_steps="all").fit([1], points(8))
    assert not OPENED


@needs_torch("2.13", "a profiler that has begun cannot be entered again")
def test_a_profiler_of_the_recipe_gets_the_ranges_too():
    found = []
    plan = schedule(wait=0, warmup=1, active=2, repeat=1)

    def keep(profiler):
        found.extend(one.name for one in profiler.events() if one.name.startswith(RANGE))

    brain = make()
    brain.profiler = profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=plan,
        on_trace_ready=keep,
    )
    with brain.profiler:
        brain.fit([1], points(6))
    assert found.count("ddpkit: forward") == 2


def test_an_error_in_a_batch_leaves_the_trace_and_no_range_open(tmp_path):
    class Fails(Failing):
        fails_at = 4

    with pytest.raises(RuntimeError, match="planted"):
        profiled(tmp_path, Fails)
    (trace,) = (tmp_path / "profiler_logs").iterdir()
    assert ranges_in(events_of(trace))
    with profile() as profiler:
        torch.ones(1)
    assert not [one for one in profiler.events() if one.name.startswith(RANGE)]
