"""The table of late ranks: by how much a rank was behind the others."""

from __future__ import annotations

import pytest

from ddpkit.see.report.history import RunHistory
from ddpkit.see.report.late_ranks import late_phases, late_rows


@pytest.mark.parametrize(
    ("times", "median", "behind"),
    [
        ((1.0, 31.0), 16.0, 30.0),
        ((1.0, 3.0, 32.0), 3.0, 30.0),
        ((1.0, 2.0, 2.0, 2.0, 32.0), 2.0, 30.0),
    ],
)
def test_a_rank_is_behind_the_median_of_the_others(times, median, behind):
    rank = len(times) - 1
    spread = {"min": min(times), "median": median, "max": max(times), "max_rank": rank}
    history = RunHistory()
    history.add(
        {
            "event": "speed",
            "optimizer_step": 1,
            "world_size": len(times),
            "phases": {"forward": spread},
        }
    )
    [row] = late_rows(history)
    assert (row.rank, row.behind) == (rank, behind)
    assert row.cells[late_phases().index("forward")].behind == behind


def test_a_spread_without_a_least_value_is_held_against_its_median():
    history = RunHistory()
    spread = {"median": 16.0, "max": 31.0, "max_rank": 1}
    history.add(
        {"event": "speed", "optimizer_step": 1, "world_size": 2, "phases": {"forward": spread}}
    )
    assert [row.behind for row in late_rows(history)] == [15.0]
