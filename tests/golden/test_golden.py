"""The numbers of before: every loss and every weight of small trainings, fresh and resumed, on 1, 2 and 3 ranks."""

from __future__ import annotations

import json

import pytest

from tests.golden.cases import CASES
from tests.golden.record import KEPT, TRACES, WORLD_SIZES, machine, traces_of, traces_of_kept

GOLDEN = json.loads(TRACES.read_text())
EXACT = GOLDEN["machine"] == machine()


def compare(found, expected):
    assert found.keys() == expected.keys()
    for part, ranks in found.items():
        for rank, (one, other) in enumerate(zip(ranks, expected[part], strict=True)):
            where = f"{part}, rank {rank}"
            assert (one["steps"], one["losses"]) == (other["steps"], other["losses"]), where
            if EXACT:
                assert one == other, where
            else:
                assert one["last_losses"] == pytest.approx(other["last_losses"], rel=1e-3), where
                assert one["norm"] == pytest.approx(other["norm"], rel=1e-4), where


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.slow if n > 2 else ()) for n in WORLD_SIZES])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "plain" else pytest.mark.slow) for name in CASES]
)
def test_every_number_is_that_of_before(ranks, name, world_size):
    found = traces_of(ranks, name, world_size)
    for fresh, resumed in zip(found["fresh"], found[f"resumed on {world_size}"], strict=True):
        assert resumed["weights"] == fresh["weights"], "a resumed run is the uninterrupted run"
    compare(found, GOLDEN["traces"][f"{name} on {world_size}"])


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_a_checkpoint_of_before_is_resumed_as_it_was(ranks, name):
    compare(traces_of_kept(ranks, name), GOLDEN["traces"][f"{name}: a checkpoint of before"])
