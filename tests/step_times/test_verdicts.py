"""What measured seconds tell of a run, said once each, and nothing of a run that has no fault."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace

import numpy as np
import pytest

from ddpkit.step_times.verdicts import KINDS, Verdict, VerdictFinder
from ddpkit.step_times.verdicts.history import above_others
from ddpkit.step_times.verdicts.memory_record import MOST_POINTS, MemoryRecord
from ddpkit.step_times.verdicts.wording import PHASE_WORDS
from tests.step_times.seconds_of_runs import Run, without_windows

#: To look at a second without a fault, by number of ranks: 350 and 680 with numpy 2.4.
MOST_CALLS = {1: 600, 2: 1000, 4: 1000}
OWN = ["data", "move", "forward", "backward", "optimizer", "other"]


def verdicts_of(seconds, finder=None):
    finder = finder or VerdictFinder()
    return [verdict for second in seconds for verdict in finder.note(second)]


def subjects(verdicts):
    return [verdict.subject for verdict in verdicts]


@pytest.mark.parametrize("phase", OWN)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_late_rank_is_named_with_its_phase_once(phase, world_size):
    rank = world_size - 1
    run = Run(world_size, late={(rank, phase): 0.03}, seed=world_size)
    found = verdicts_of(
        run.seconds(15),
        VerdictFinder([f"host{number}" for number in range(world_size)]),
    )
    assert subjects(found) == [("late_rank", rank, phase)]
    verdict = found[0]
    assert verdict.seconds == pytest.approx(0.03, rel=0.2)
    assert verdict.share == pytest.approx(0.03 / 0.137, rel=0.2)
    assert verdict.host == f"host{rank}"
    assert verdict.what == f"Rank {rank} (host{rank}) is late in {PHASE_WORDS[phase]}."


def test_two_hundred_milliseconds_in_the_backward_pass_of_one_of_four_ranks():
    found = verdicts_of(Run(4, late={(2, "backward"): 0.2}).seconds(10))
    assert subjects(found) == [("late_rank", 2, "backward")]
    assert found[0].how_much.startswith("It needs 20")
    assert found[0].how_much.endswith("and the other 3 ranks wait.")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_a_run_without_a_fault_has_no_verdict(world_size):
    seconds = Run(world_size, noise=0.3, seed=world_size).seconds(40)
    assert verdicts_of(seconds) == []
    assert verdicts_of([without_windows(second) for second in seconds]) == []


@pytest.mark.parametrize(
    ("world_size", "waits"),
    [(1, "2 % of it waited for data."), (2, "2 % of it waited for data, 4 % for the other ranks.")],
)
def test_a_run_without_a_verdict_says_so_and_on_what_figures_that_rests(world_size, waits):
    finder = VerdictFinder()
    assert verdicts_of(Run(world_size, noise=0.01).seconds(3), finder) == []
    assert finder.words_if_nothing_found() == "", "too little to look at"
    assert verdicts_of(Run(world_size, noise=0.01).seconds(22), finder) == []
    step = {1: "100 ms", 2: "105 ms"}[world_size]
    assert finder.words_if_nothing_found() == (
        f"No verdict: nothing stood out in 22 s of training. A step took {step}; {waits}"
    )
    assert finder.words_if_nothing_found() == "", "it is said once"


def test_after_a_verdict_it_is_not_said_that_nothing_stood_out():
    finder = VerdictFinder()
    assert verdicts_of(Run(2, late={(1, "forward"): 0.1}).seconds(10), finder)
    assert finder.words_if_nothing_found() == ""


def test_a_rank_that_is_late_now_and_then_is_not_named():
    run = Run(2)
    seconds = []
    for number in range(40):
        run.late = {(number % 3 % 2, "forward"): 0.1}
        seconds.append(run.second())
    assert verdicts_of(seconds) == []


def test_a_rank_that_waits_for_a_core_is_not_named():
    late = {(1, "forward"): 0.04}
    assert subjects(verdicts_of(Run(2, late=late).seconds(10))) == [("late_rank", 1, "forward")]
    more = {"core_waits": [0.05, 0.35]}
    assert verdicts_of(Run(2, late=late, more=more).seconds(10)) == []


def test_a_rank_is_late_though_the_others_wait_for_cores():
    run = Run(2, late={(1, "forward"): 0.012})
    assert verdicts_of(run.seconds(10)) == []
    busy = Run(2, late={(1, "forward"): 0.012}, more={"core_waits": [0.35, 0.15]})
    assert subjects(verdicts_of(busy.seconds(10))) == [("late_rank", 1, "forward")]


def test_a_machine_that_others_keep_busy_is_named_with_its_rank():
    hosts = ("a", "a", "b")
    more = {"core_waits": [0.05, 0.05, 0.35], "host_names": hosts}
    found = verdicts_of(Run(3, late={(2, "forward"): 0.04}, more=more).seconds(10))
    assert subjects(found) == [("late_rank", 2, "forward")]
    assert found[0].host == "b"
    assert "waits for a core 35 % of the time" in found[0].advice
    alike = {"core_waits": [0.05, 0.3, 0.0], "host_names": hosts}
    assert verdicts_of(Run(3, late={(1, "forward"): 0.03}, more=alike).seconds(10)) == []


def test_a_rank_that_another_follows_is_said_again():
    finder = VerdictFinder()
    run = Run(4, late={(1, "data"): 0.1})
    assert subjects(verdicts_of(run.seconds(10), finder)) == [("late_rank", 1, "data")]
    run.late = {(3, "data"): 0.1}
    assert subjects(verdicts_of(run.seconds(20), finder)) == [("late_rank", 3, "data")]


@pytest.mark.costly
def test_of_many_late_ranks_the_first_are_enough():
    finder = VerdictFinder()
    run = Run(24, windows=2)
    found = []
    for rank in range(12):
        run.late = {(rank, "data"): 0.1}
        found += verdicts_of(run.seconds(8), finder)
    assert [verdict.rank for verdict in found] == list(range(8))


def test_two_late_ranks_of_four_are_both_named():
    found = verdicts_of(Run(4, late={(0, "forward"): 0.1, (1, "forward"): 0.1}).seconds(10))
    assert subjects(found) == [("late_rank", 0, "forward"), ("late_rank", 1, "forward")]


def test_a_slow_loader_of_all_ranks_is_no_late_rank():
    run = Run(2, late={(0, "data"): 0.1, (1, "data"): 0.11}, noise=0.01)
    found = verdicts_of(run.seconds(10), VerdictFinder(num_workers=2))
    assert subjects(found) == [("slow_data", None, "data")]
    assert found[0].share == pytest.approx(0.112 / 0.216, rel=0.05)
    assert "with num_workers=2" in found[0].how_much
    assert "more than num_workers=2" in found[0].advice
    assert "doctor --recipe SCRIPT [YAML]` measures the loader alone" in found[0].advice
    delivered = 16 / 0.216
    possible = 16 / 0.104
    assert f"delivers {delivered:.3g}"[:-1] in found[0].how_much
    assert f"could take {possible:.0f}"[:-1] in found[0].how_much


def test_a_loader_without_workers_delivers_in_its_wait_alone():
    found = verdicts_of(Run(1, late={(0, "data"): 0.098}).seconds(10), VerdictFinder(num_workers=0))
    assert subjects(found) == [("slow_data", None, "data")]
    assert "its loader delivers 160 samples/s" in found[0].how_much
    assert "Try num_workers=2" in found[0].advice


def test_an_exchange_that_takes_long_is_the_limit():
    found = verdicts_of(Run(2, exchange=0.25).seconds(10))
    assert subjects(found) == [("communication", None, None)]
    assert found[0].seconds == pytest.approx(0.25, rel=0.05)
    assert "50.4 MB a step at 0.202 GB/s" in found[0].how_much
    assert "--ddp_comm_hook=bf16" in found[0].advice


def test_waits_for_a_late_rank_are_no_communication():
    assert subjects(verdicts_of(Run(2, late={(1, "backward"): 0.3}).seconds(10))) == [
        ("late_rank", 1, "backward")
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_batches_that_differ_from_window_to_window_are_named_though_medians_are_alike(world_size):
    found = verdicts_of(Run(world_size, spread=0.6).seconds(10))
    assert subjects(found) == [("uneven_batches", None, None)]
    assert found[0].share > 0.08
    assert "correlate by 0.9" in found[0].how_much or "correlate by 1.0" in found[0].how_much


def test_batches_that_differ_are_not_named_where_times_hardly_follow_them():
    """In half of the windows the sizes are those of other windows."""
    seconds = [
        replace(second, single_sizes=[[*sizes[1:4], sizes[0], *sizes[4:]] for sizes in found])
        for second in Run(4, spread=0.9).seconds(10)
        for found in [second.single_sizes]
    ]
    assert verdicts_of(seconds) == []


def test_the_samples_of_a_second_are_those_of_all_ranks():
    second = Run(2).seconds(1)[0]
    other = replace(second, samples=[6.0, 2.0], tokens=[30.0, 10.0])
    assert other.samples_per_second == pytest.approx(8.0 / second.step_seconds)
    assert other.tokens_per_second == pytest.approx(40.0 / second.step_seconds)


def test_a_rank_whose_batches_are_always_larger_is_no_late_rank():
    run = Run(3)
    seconds = []
    for second in run.seconds(10):
        factor = 1.6
        sizes = [*second.single_sizes[:2], [factor * size for size in second.single_sizes[2]]]
        own = [*second.single_own[:2], [factor * time for time in second.single_own[2]]]
        phases = [dict(times) for times in second.phases]
        for rank, times in enumerate(phases):
            extra = 0.6 * times["backward"] + 0.6 * times["forward"]
            times["exchange" if rank < 2 else "backward"] += extra
            times["step"] += extra
        seconds.append(replace(second, single_sizes=sizes, single_own=own, phases=phases))
    found = verdicts_of(seconds)
    assert subjects(found) == [("uneven_batches", 2, None)]
    assert "Rank 2 has it in nearly all steps" in found[0].what


def test_memory_that_grows_evenly_is_named_and_memory_that_warms_up_is_not():
    found = verdicts_of(Run(2, leak={1: 1e7}).seconds(40))
    assert subjects(found) == [("memory_grows", 1, None)]
    assert "by 1.2 MB a step" in found[0].how_much
    assert subjects(verdicts_of(Run(2, leak={0: 1e7, 1: 1e7}).seconds(40))) == [
        ("memory_grows", None, None)
    ]
    warm = [
        replace(second, memory=[{"rss": 1e9 + 1e9 * (1 - 0.7**number)}])
        for number, second in enumerate(Run(1).seconds(60))
    ]
    assert verdicts_of(warm) == []


def test_memory_that_rises_once_is_none_that_grows():
    once = [
        replace(second, memory=[{"rss": 1e9 if number < 30 else 2e9}])
        for number, second in enumerate(Run(1).seconds(60))
    ]
    assert verdicts_of(once) == []


# Megabytes of two ranks that trained three layers of 2048 by hand with DDP, at every twentieth
# step.
BY_HAND = [
    (594, 666, 666, 666, 704, 670, 670, 670, 670, 670, 754, 737, 737, 720),
    (594, 601, 635, 634, 652, 719, 688, 738, 721, 705, 721, 739, 705, 739),
]


def test_memory_that_an_allocator_takes_and_gives_back_is_none_that_grows():
    seconds = [
        replace(second, memory=[{"rss": 1e6 * rank[number // 3]} for rank in BY_HAND])
        for number, second in enumerate(Run(2).seconds(3 * len(BY_HAND[0])))
    ]
    assert verdicts_of(seconds) == []


def test_on_a_gpu_the_memory_of_the_allocator_counts():
    run = Run(1)
    seconds = [
        replace(second, memory=[{"rss": 1e9 + 5e7 * number, "allocated": 4e9}])
        for number, second in enumerate(run.seconds(40))
    ]
    assert verdicts_of(seconds) == []
    grows = [
        replace(second, memory=[{"rss": 1e9, "allocated": 4e9 + 2e7 * number}])
        for number, second in enumerate(run.seconds(40))
    ]
    found = verdicts_of(grows)
    assert subjects(found) == [("memory_grows", 0, None)]
    assert "the GPU memory grows" in found[0].what


def test_a_long_run_keeps_few_points_of_its_memory():
    record = MemoryRecord()
    for second in Run(1, windows=1).seconds(1000):
        record.note(second)
    steps = np.array([point.optimizer_step for point in record.points])
    assert len(steps) <= MOST_POINTS
    assert len(set(np.diff(steps))) == 1
    assert steps[-1] > 900


def test_a_gpu_that_waits_for_the_host():
    found = verdicts_of(Run(2, more={"is_host_bound": [0.9, 0.8]}).seconds(10))
    assert subjects(found) == [("host_bound", None, None)]
    assert "In 85 % of the steps" in found[0].how_much
    loader = {(0, "data"): 0.2, (1, "data"): 0.2}
    waits = verdicts_of(Run(2, late=loader, more={"is_host_bound": [0.9, 0.8]}).seconds(10))
    assert subjects(waits) == [("slow_data", None, "data")]


@pytest.mark.parametrize(
    ("bound", "step", "kinds"),
    [(1.0, 0.0083, ["host_bound"]), (0.0, 0.51, [])],
)
def test_a_gpu_with_little_and_one_with_much_to_do(bound, step, kinds):
    """As an H200 told it of forty layers of width 64, and of eight of width 8192."""
    times = {
        "data": 0.02,
        "move": 0.01,
        "forward": 0.27,
        "backward": 0.5,
        "optimizer": 0.16,
        "other": 0.04,
    }
    phases = [
        {**{name: share * step for name, share in times.items()}, "exchange": 0.0, "step": step}
    ]
    seconds = [
        replace(second, phases=phases, is_host_bound=[bound], single_own=None, single_exchange=None)
        for second in Run(1).seconds(10)
    ]
    assert [verdict.kind for verdict in verdicts_of(seconds)] == kinds


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x20, "because it is too hot"),
        (0x44, "because its hardware is too hot"),
        (0x04, "at its power limit"),
        (0x80, "the machine's power brake is on"),
    ],
)
def test_a_throttled_gpu_is_named_with_the_reason(bits, words):
    clocks = [{"share": 1.0, "reasons": 0.0}, {"share": 0.6, "reasons": float(bits)}]
    found = verdicts_of(Run(2, more={"gpu_clocks": clocks}).seconds(10))
    assert subjects(found) == [("throttled", 1, None)]
    assert words in found[0].what
    assert found[0].how_much == "It runs at 60 % of its highest clock."


@pytest.mark.parametrize("clock", [{"share": 0.95, "reasons": 4.0}, {"share": 0.3, "reasons": 1.0}])
def test_a_gpu_at_its_power_limit_with_a_high_clock_or_an_idle_one_is_not_throttled(clock):
    assert verdicts_of(Run(1, more={"gpu_clocks": [clock]}).seconds(10)) == []


def test_nothing_is_said_of_the_first_seconds():
    finder = VerdictFinder()
    run = Run(2, late={(1, "data"): 1.0})
    said = [len(finder.note(second)) for second in run.seconds(12)]
    assert said.index(1) in range(5, 8)
    assert sum(said) == 1


def test_short_epochs_are_no_excuse():
    run = Run(2, late={(1, "data"): 1.0})
    seconds = [replace(second, epoch=number) for number, second in enumerate(run.seconds(12))]
    assert subjects(verdicts_of(seconds)) == [("late_rank", 1, "data")]


def test_the_first_steps_of_an_epoch_do_not_count_alone():
    run = Run(2, late={(1, "data"): 1.0}, windows=3)
    seconds = [replace(second, epoch=number) for number, second in enumerate(run.seconds(30))]
    assert verdicts_of(seconds) == []


def test_short_seconds_at_the_beginning_of_epochs_count_together():
    run = Run(2, late={(1, "data"): 0.1})
    seconds = [
        replace(second, epoch=number // 8, seconds=0.1)
        for number, second in enumerate(run.seconds(120))
    ]
    assert subjects(verdicts_of(seconds)) == [("late_rank", 1, "data")]


def test_the_event_has_the_fields_of_the_log_without_what_is_not_known():
    verdict = Verdict(
        kind="slow_data",
        what="W.",
        how_much="H.",
        advice="A.",
        phase="data",
        seconds=0.5,
    )
    assert verdict.event() == {
        "kind": "slow_data",
        "phase": "data",
        "seconds": 0.5,
        "what": "W.",
        "how_much": "H.",
        "try": "A.",
    }
    assert verdict.line() == "W. H. A."


def test_the_kinds_have_an_order():
    assert sorted(KINDS) == sorted(
        [
            "slow_data",
            "communication",
            "late_rank",
            "uneven_batches",
            "memory_grows",
            "host_bound",
            "throttled",
        ]
    )
    assert KINDS[0] == "late_rank"


def test_a_second_of_256_ranks_takes_little_time_to_look_at():
    run = Run(256, windows=2, late={(7, "forward"): 0.05})
    assert subjects(verdicts_of(run.seconds(8))) == [("late_rank", 7, "forward")]


@pytest.mark.parametrize(("world_size", "most"), MOST_CALLS.items())
def test_a_second_without_a_fault_takes_few_calls_to_look_at(world_size, most):
    finder = VerdictFinder()
    seconds = Run(world_size).seconds(60)
    calls = []
    verdicts_of(seconds[:40], finder)
    sys.setprofile(lambda frame, event, _: calls.append(event) if "call" in event else None)
    try:
        found = verdicts_of(seconds[40:], finder)
    finally:
        sys.setprofile(None)
    assert not found
    assert len(calls) <= 20 * most


@pytest.mark.parametrize("count", range(1, 9))
def test_each_value_is_compared_with_the_median_of_the_others(count):
    values = np.random.default_rng(count).permutation(count).astype(float) ** 2
    expected = [
        value - statistics.median([*values[:place], *values[place + 1 :]]) if count > 1 else 0.0
        for place, value in enumerate(values)
    ]
    assert above_others(values).tolist() == pytest.approx(expected)
