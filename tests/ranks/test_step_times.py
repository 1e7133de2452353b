"""Measured steps on real ranks: a late rank is seen in its own phase, and in the others' wait; no
bit changes.
"""

from __future__ import annotations

import functools

import pytest

from tests.ranks.late_recipe import Counted, Own, events, train

SECONDS = 0.02
OWN_PHASES = ("data", "move", "forward", "backward", "optimizer", "other")
STRATEGIES = {
    "ddp": {},
    "many parameters": {
        "hidden": 40_000
    },  # too many for an exchange of two ranks in a hook: DDP averages by itself
    "accumulation": {"grad_accumulation_factor": 2},
    "own fit_batch": {"cls": Own},
    "sums and counts": {"cls": Counted},
    "zero1": {"strategy": "zero1"},
    "unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "local SGD": {"ddp_comm_hook": "post_local_sgd", "local_sgd_period": 2},
    "buffers of rank 0": {"broadcast_buffers": True},
    "fsdp": {"strategy": "fsdp", "fsdp_min_parameters": 30},
}
DIVIDED = {
    "virtual ranks": {"virtual_ranks": 4, "global_batch_size": 16},
}


def measured(ranks, folder, phase, late, *, world=2, **more):
    """Return the last event of several steps in which one rank was late."""
    log = folder / f"{phase}{late}.jsonl"
    ranks.run(functools.partial(train, **more), log, phase, late, SECONDS, world_size=world)
    several = [one for one in events(log) if one["windows"] >= 4]
    assert several, events(log)
    return several[-1]


def assert_late(event, phase, rank):
    """The phase of one rank took longer by what was planted; the others have waited so long."""
    phases = event["phases"]
    excess = {name: phases[name]["max"] - phases[name]["min"] for name in OWN_PHASES}
    assert max(excess, key=excess.get) == phase, event
    assert excess[phase] > 0.7 * SECONDS, event
    assert phases[phase]["max_rank"] == rank
    waits = phases["exchange"]
    assert waits["max_rank"] != rank
    assert waits["max"] > 0.7 * SECONDS, event


@pytest.mark.slow
def test_a_late_rank_is_seen_in_its_own_phase_and_in_the_wait_of_the_other(ranks, tmp_path):
    for phase, rank in [("backward", 1), ("forward", 0)]:
        assert_late(measured(ranks, tmp_path, phase, rank, measure_steps="all"), phase, rank)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["data", "move", "forward", "backward", "optimizer"])
def test_each_phase_on_each_rank(ranks, phase, tmp_path):
    for rank in range(3):
        assert_late(measured(ranks, tmp_path, phase, rank, world=3), phase, rank)


# Gradients are averaged inside of the backward pass, and by some ways elsewhere, too.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "phase"),
    [
        *((way, "backward") for way in STRATEGIES),
        *((way, "forward") for way in ("own fit_batch", "buffers of rank 0", "fsdp")),
        *((way, "optimizer") for way in ("zero1", "local SGD", "fsdp")),
        ("accumulation", "data"),
    ],
)
def test_a_late_rank_whatever_averages_the_gradients(ranks, phase, way, tmp_path):
    event = measured(ranks, tmp_path, phase, 1, measure_steps="all", steps=48, **STRATEGIES[way])
    phases = event["phases"]
    times = 2 if way in {"accumulation", "own fit_batch"} else 1
    excess = {name: phases[name]["max"] - phases[name]["min"] for name in OWN_PHASES}
    assert max(excess, key=excess.get) == phase, event
    assert phases[phase]["max_rank"] == 1
    assert excess[phase] > 0.7 * SECONDS * (1 if phase in {"data", "optimizer"} else times), event


@pytest.mark.costly
def test_a_run_of_a_few_steps_has_an_event_of_all_ranks(ranks, tmp_path):
    log = tmp_path / "few.jsonl"
    ranks.run(
        functools.partial(train, steps=12, measure_steps="all", **DIVIDED["virtual ranks"]),
        log,
    )
    event = events(log)[0]
    assert event["world_size"] == 2
    assert event["loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", DIVIDED)
def test_phases_where_the_work_is_divided(ranks, way, tmp_path):
    event = measured(ranks, tmp_path, "forward", 1, measure_steps="all", steps=48, **DIVIDED[way])
    forward = event["phases"]["forward"]
    assert forward["max"] > 0.7 * SECONDS, event


def weights(ranks, folder, measures, **more):
    log = folder / f"{measures}.jsonl"
    job = functools.partial(train, steps=16, epochs=2, measure_steps=measures, **more)
    found = ranks.run(job, log)
    if measures != "sampled":  # a fast machine is through before enough steps for an event are due
        assert bool(events(log)) == (measures == "all")
    return found


@pytest.mark.slow
def test_no_bit_changes_when_steps_are_measured(ranks, tmp_path):
    usual = weights(ranks, tmp_path, "off")
    assert weights(ranks, tmp_path, "all") == usual
    assert weights(ranks, tmp_path, "sampled") == usual


@pytest.mark.slow
@pytest.mark.parametrize("way", [*STRATEGIES, *DIVIDED])
def test_no_bit_changes_with_any_strategy(ranks, way, tmp_path):
    chosen = {**STRATEGIES, **DIVIDED}[way]
    if way == "many parameters":
        chosen = {"hidden": 4000}  # enough for an average of DDP's own; fewer numbers to send back
    usual = weights(ranks, tmp_path, "off", **chosen)
    assert weights(ranks, tmp_path, "all", **chosen) == usual


@pytest.mark.costly
def test_the_event_says_what_the_ranks_exchange_and_who_has_most_memory(ranks, tmp_path):
    event = measured(ranks, tmp_path, "", 0, measure_steps="all", steps=16)
    numbers = 8 * 16 + 16 + 2 * 16 + 16 + 1
    assert event["exchanged_bytes"] == 4 * numbers
    assert event["world_size"] == 2
    assert event["memory"]["rss"]["max"] > 1e7
    assert event["learning_rate"] == 0.01
    assert event["gradient_norm"] > 0
    total = sum(event["phases"][name]["median"] for name in event["phases"])
    assert total == pytest.approx(event["step_seconds"]["median"], rel=0.5)
