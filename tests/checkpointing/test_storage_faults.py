"""The quick part of what tests/faults does at length: kill -9 in a save, losses of power, random
damage.
"""

from __future__ import annotations

import pytest

from tests.faults.storage_tools import forked
from tests.faults.test_damaged_checkpoints import fuzz
from tests.faults.test_storage_crashes import SCENARIOS, crash_everywhere
from tests.faults.test_storage_power_loss import lost, record

IN_PLACE = "in place, and one deleted"


@pytest.mark.costly
def test_death_at_some_points_of_a_save(ranks, tmp_path):
    [(points, outcomes)] = ranks.run(
        crash_everywhere,
        tmp_path,
        IN_PLACE,
        "async",
        40,
        world_size=1,
        init=False,
    )
    assert len(points) > 100
    assert {steps for steps, _ in outcomes} <= {
        frozenset(steps) for steps in SCENARIOS[IN_PLACE].allowed
    }
    assert frozenset({1, 2}) in {steps for steps, _ in outcomes}


@pytest.mark.costly
def test_a_loss_of_power_at_any_moment_of_two_saves(tmp_path):
    disk = record(tmp_path / "run", "async", saves=((1, "last"), (2, "last")))
    assert len(disk.moments) > 15
    assert lost(disk, tmp_path / "after") == []


@pytest.mark.costly
def test_random_damage_is_detected_or_harmless(ranks):
    [counts] = ranks.run(forked, fuzz, "quick", 40, 10, world_size=1, init=False)
    assert sum(counts.values()) == 40
    assert sum(count for (_, fate), count in counts.items() if fate == "detected") > 35
