"""On a busy machine a rank without a fault comes last for seconds: it is not called late, and one
that is late all the time is.

The figures were measured with `benchmarks.planted_delays` on two cores, beside nine processes that
kept them busy.
"""

from __future__ import annotations

import pytest

from ddpkit.step_times.machine_load import host_load
from ddpkit.step_times.verdicts import VerdictFinder
from ddpkit.step_times.verdicts.history import LOOKED_AT, LOOKED_AT_IF_CROWDED
from ddpkit.step_times.verdicts.late_rank import is_steadily_late
from tests.step_times.seconds_of_runs import Run


def figures(text):
    """Return pairs of numbers: lateness, and the part of the windows."""
    return [tuple(map(float, pair.split(":"))) for pair in text.split()]


# By stretch, of each of two ranks: its lateness as a share of a step, and the part of the single
# windows in which it was late. Until this test the first rank of this run was called late.
NO_FAULT = (
    figures("""
        0.71:0.5 0.31:0.62 0.27:0.25 -0.1:0.5 -0.59:0.25 0.67:0.62
        -0.22:0.12 -0.43:0.0 -0.22:0.25 -0.76:0.12 0.17:0.5 -0.08:0.0
        -0.31:0.12 -0.86:0.25 -0.02:0.5 0.04:0.12 -0.01:0.25 -1.01:0.12
        -0.72:0.5 -0.86:0.25 -0.57:0.25 -0.39:0.38 0.39:0.88 0.57:0.88
        0.73:0.75 0.5:1.0 0.56:0.12 -0.9:0.12 -0.76:0.25 -0.7:0.62
    """),
    figures("""
        -0.78:0.0 -0.57:0.12 -0.27:0.12 -0.03:0.12 0.24:0.62 -0.85:0.12
        0.16:0.5 0.26:0.75 0.1:0.5 0.21:0.38 -0.66:0.12 0.02:0.0
        0.07:0.5 0.65:0.25 -0.16:0.12 -0.22:0.0 -0.03:0.0 0.59:0.75
        0.5:0.5 0.71:0.38 0.56:0.38 0.02:0.25 -0.45:0.12 -0.69:0.0
        -0.8:0.25 -0.68:0.0 -0.85:0.75 0.16:0.75 0.49:0.5 0.34:0.25
    """),
)
# The first rank is late by 30 % of the step that it would take alone.
LATE_BY_A_THIRD = (
    figures("""
        0.08:0.75 -0.07:0.12 0.01:0.5 0.19:0.75 0.12:0.75 0.18:0.38
        0.1:0.38 0.02:0.75 0.16:0.75 0.28:1.0 0.14:0.88 0.16:0.75
        0.2:0.75 0.2:0.62 0.09:0.62 -0.17:0.12 0.14:0.62 0.14:1.0
        0.23:0.75 0.14:0.38 -0.03:0.38 0.18:0.75 0.11:0.62 0.16:0.62
    """),
    figures("""
        -0.13:0.12 -0.04:0.25 -0.17:0.0 -0.28:0.12 -0.16:0.0 -0.3:0.0
        -0.18:0.5 -0.14:0.12 -0.25:0.0 -0.29:0.0 -0.23:0.0 -0.23:0.12
        -0.26:0.0 -0.22:0.0 -0.16:0.0 0.03:0.88 -0.21:0.12 -0.2:0.0
        -0.34:0.12 -0.21:0.12 -0.09:0.25 -0.21:0.0 -0.22:0.0 -0.2:0.0
    """),
)


def called_late(figures, length):
    """Return how often a rank is called late, of all stretches in a row of that length."""
    parts = [figures[begin : begin + length] for begin in range(len(figures) - length + 1)]
    return [is_steadily_late(*zip(*part, strict=True)) for part in parts]


def test_ranks_without_a_fault_are_never_late_for_long():
    for rank in NO_FAULT:
        assert not any(called_late(rank, LOOKED_AT_IF_CROWDED))
    assert any(called_late(NO_FAULT[0], LOOKED_AT)), "six stretches do not tell on such a machine"


def test_a_late_rank_is_late_whenever_one_looks():
    late, other = LATE_BY_A_THIRD
    assert all(called_late(late, LOOKED_AT_IF_CROWDED))
    assert not any(called_late(other, LOOKED_AT_IF_CROWDED))


@pytest.mark.parametrize(
    ("lateness", "windows", "is_late"),
    [
        ([0.2] * 6, [1.0] * 6, True),
        ([0.09] * 6, [1.0] * 6, False),
        ([0.2] * 6, [0.4] * 6, False),
        ([0.2, 0.2, 0.2, 0.2, -0.1, -0.1], [1.0] * 6, False),
        ([1.9, 0.1, 0.2, 1.8, 0.1, 0.2, 1.9, 0.1], [1.0] * 8, False),
    ],
)
def test_late_is_what_is_late_by_enough_mostly_and_more_than_it_differs(
    lateness,
    windows,
    is_late,
):
    assert is_steadily_late(lateness, windows) is is_late


CROWDED = {"core_waits": [0.7, 0.7], "host_loads": [{"load": 9.26, "cores": 2.0}] * 2}


def verdicts_of(run, late_in_second, count=40):
    finder = VerdictFinder()
    found = []
    for number in range(count):
        run.late = late_in_second(number)
        found += finder.note(run.second())
    return found, finder


def by_turns(number):
    return {(number // 6 % 2, "forward"): 0.1}


def test_ranks_that_are_late_by_turns_of_seconds_are_not_named_where_cores_are_short():
    found, finder = verdicts_of(Run(2, more=CROWDED), by_turns)
    assert found == []
    told = finder.words_if_nothing_found()
    assert told.endswith(
        "The machine is busy: load 9.3 on 2 cores. That hides a rank that is a little late."
    )
    quiet, _ = verdicts_of(Run(2), by_turns)
    assert [verdict.rank for verdict in quiet] == [0, 1], "with a core each, that is no chance"


def test_a_rank_that_is_always_late_is_named_with_the_load_of_its_machine():
    found, _ = verdicts_of(Run(2, more=CROWDED), lambda number: {(1, "forward"): 0.04})
    assert [verdict.subject for verdict in found] == [("late_rank", 1, "forward")]
    assert found[0].advice.startswith("The machine is busy: load 9.3 on 2 cores. Look at")


def test_a_rank_alone_on_its_machine_is_named_as_soon_as_ever():
    hosts = {"host_names": ("a", "b")}
    found, _ = verdicts_of(Run(2, more=CROWDED | hosts), lambda _: {(1, "forward"): 0.04}, 10)
    assert [verdict.subject for verdict in found] == [("late_rank", 1, "forward")]


def test_where_the_kernel_counts_no_waits_the_load_tells():
    found, _ = verdicts_of(Run(2, more={"host_loads": CROWDED["host_loads"]}), by_turns)
    assert found == []


def test_the_load_of_this_machine_is_read():
    assert set(host_load()) == {"load", "cores"}
    assert host_load()["cores"] >= 1.0
