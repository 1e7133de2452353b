"""What the wall time of a run went into. The numbers are those of the comments, to the second."""

from __future__ import annotations

import json

import pytest

from ddpkit.see.report.goodput import (
    AGAIN,
    COUNTED,
    DOWN,
    EVALUATION,
    OTHER,
    SAVING,
    STARTING,
    goodput_of,
)
from ddpkit.see.report.history import RunHistory
from tests.see.report.made_runs import Writer


def history_of(*records):
    history = RunHistory()
    for time, event, fields in records:
        history.add({"event": event, "time": time, **fields})
    return history


def trained(steps, seconds):
    return {"stage": "TRAIN", "epoch": 1, "optimizer_step": steps, "seconds": seconds}


def second(steps, seconds=10.0):
    return {"optimizer_step": steps, "seconds": seconds}


def test_a_run_without_a_restart(tmp_path):
    # 10 s to start, 60 s of training with a save of 5 s inside, 20 s of validation, 5 s of saving,
    # 5 s of else
    goodput = goodput_of(
        history_of(
            (0.0, "start", {}),
            (40.0, "checkpoint", {"path": "a", "seconds": 5.0, "optimizer_step": 50}),
            (70.0, "stage", trained(100, 60.0)),
            (90.0, "stage", {"stage": "VALID", "epoch": 1, "seconds": 20.0}),
            (95.0, "checkpoint", {"path": "b", "seconds": 5.0, "optimizer_step": 100}),
            (100.0, "fit_end", {}),
        )
    )
    assert goodput.parts == {
        COUNTED: 55.0,
        AGAIN: 0.0,
        EVALUATION: 20.0,
        SAVING: 10.0,
        STARTING: 10.0,
        DOWN: 0.0,
        OTHER: 5.0,
    }
    assert goodput.share == 0.55
    assert goodput.restarts == ()


KILLED = [
    (0.0, "start", {}),
    (60.0, "stage", trained(100, 50.0)),
    (60.0, "checkpoint", {"path": "x/CKPT+a", "seconds": 0.0, "optimizer_step": 100}),
    (70.0, "speed", second(120)),
    (80.0, "speed", second(140)),
]
# killed at 140 steps; 40 s later it starts, needs 10 s and goes on from 100 steps
RESUMED = [
    (130.0, "speed", second(110, 0.0)),
    (140.0, "speed", second(130)),
    (150.0, "stage", trained(200, 20.0)),
]


@pytest.mark.parametrize(
    "told",
    [
        {"resumed_from": "y/CKPT+a"},  # the checkpoint is known, whatever folder it is in now
        {},  # of all checkpoints before, the last that is below the first step
    ],
)
def test_steps_that_were_done_again_after_a_kill_do_not_count(told):
    goodput = goodput_of(history_of(*KILLED, (120.0, "start", told), *RESUMED))
    assert goodput.wall == 150.0
    assert goodput.parts[AGAIN] == 20.0
    assert goodput.parts[COUNTED] == 50.0 + 20.0
    assert goodput.parts[DOWN] == 40.0
    assert goodput.parts[STARTING] == 10.0 + 10.0
    assert goodput.limits == (100.0, float("inf"))
    (restart,) = goodput.restarts
    assert (restart.steps, restart.again, restart.down, restart.starting) == (40, 20.0, 40.0, 10.0)
    assert restart.cost == 70.0
    assert restart.reason == "ended without a word"


def test_a_call_of_fit_tells_where_it_goes_on():
    fit = (121.0, "fit", {"optimizer_step": 120, "resumed_from": "CKPT+b"})
    goodput = goodput_of(history_of(*KILLED, (120.0, "start", {}), fit, *RESUMED))
    assert goodput.restarts[0].steps == 20
    assert goodput.parts[AGAIN] == 10.0


def test_an_interval_of_which_a_part_counts_is_divided():
    records = [*KILLED, (90.0, "start", {}), (91.0, "fit", {"optimizer_step": 130})]
    goodput = goodput_of(history_of(*records, (100.0, "speed", second(150))))
    assert goodput.parts[AGAIN] == pytest.approx(5.0)


def test_a_clean_stop_costs_no_step():
    stopped = {"reason": "SIGTERM", "optimizer_step": 140, "checkpoint": "x/CKPT+s"}
    saved = {"path": "x/CKPT+s", "seconds": 1.0, "optimizer_step": 140}
    goodput = goodput_of(
        history_of(
            *KILLED,
            (81.0, "checkpoint", saved),
            (81.0, "stopped", stopped),
            (90.0, "start", {"resumed_from": "x/CKPT+s"}),
            (101.0, "speed", second(160)),
        )
    )
    assert goodput.parts[AGAIN] == 0.0
    assert goodput.restarts[0].reason == "stopped by SIGTERM"


def test_a_run_that_was_killed_twice_before_it_saved():
    goodput = goodput_of(
        history_of(
            (0.0, "start", {}),
            (10.0, "speed", second(50, 9.0)),
            (20.0, "start", {"reason": "killed, or ended without a word"}),
            (30.0, "speed", second(60, 9.0)),
            (40.0, "start", {}),
            (50.0, "speed", second(40, 9.0)),
        )
    )
    assert goodput.parts[AGAIN] == 18.0
    assert goodput.parts[COUNTED] == 9.0
    assert [one.steps for one in goodput.restarts] == [50, 60]


def test_a_start_that_never_trained_makes_nothing_undone():
    failed = (95.0, "exception", {"type": "OSError", "message": "no space\nleft"})
    again = (100.0, "start", {"resumed_from": "CKPT+a"})
    goodput = goodput_of(history_of(*KILLED, (90.0, "start", {}), failed, again, *RESUMED))
    assert [one.steps for one in goodput.restarts] == [40, 0]
    assert goodput.restarts[1].reason == "OSError: no space"
    assert goodput.parts[STARTING] == 10.0 + 5.0 + 30.0


def test_an_old_log_without_measured_seconds_and_checkpoints():
    old = [record for record in KILLED if record[1] in {"start", "stage"}]
    goodput = goodput_of(history_of(*old, (120.0, "start", {}), RESUMED[-1]))
    assert goodput.parts[COUNTED] == 70.0
    assert goodput.restarts[0].resumed_at == 100.0


def test_the_start_of_a_process_counts_unless_it_is_a_notebooks():
    for program, begin in (("train.py", 70.0), ("/lib/ipykernel_launcher.py", 100.0)):
        facts = {"arguments": [program], "process_start": 70.0}
        goodput = goodput_of(history_of((100.0, "start", facts), (130.0, "speed", second(10))))
        assert goodput.wall == 130.0 - begin
        assert goodput.parts[STARTING] == 120.0 - begin


def test_the_parts_never_exceed_the_wall_time():
    goodput = goodput_of(history_of((0.0, "start", {}), (1.0, "stage", trained(10, 3.0))))
    assert sum(goodput.parts.values()) == pytest.approx(goodput.wall)
    assert goodput.share == 1.0


def test_a_log_without_any_record_or_with_a_start_alone():
    assert goodput_of(history_of()).wall == 0.0
    alone = goodput_of(history_of((5.0, "start", {})))
    assert alone.wall == 0.0
    assert alone.share != alone.share  # not a number: nothing can be said


def test_curves_leave_out_the_steps_that_were_done_again(tmp_path):
    run = Writer(tmp_path)
    run.start()
    run.epoch(1, until=200)
    run.start()
    run.event("fit", optimizer_step=100)
    run.epoch(1, begin=100)
    history = RunHistory()
    for line in run.lines:
        history.add(json.loads(line))
    steps = history.speed.counted(goodput_of(history).limits)["optimizer_step"]
    assert steps.tolist() == list(range(10, 301, 10))
