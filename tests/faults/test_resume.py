"""A run that is killed and started again is the run that was not: a short campaign, and real
launchers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from tests.launching import Run, python, torchrun, wait_until

from .campaign_moments import STEPPED, STEPPING, TRAIN, VALID, VALID_END, Diary, Kill
from .campaign_ranks import Attempt
from .campaign_verdict import Reference, compare
from .recipes_for_faults import VARIANTS, Setting, text_of

ROOT = Path(__file__).resolve().parents[2]
# What they are without is in "all", and drawn alone by `make faults`.
DRAWN = [
    "augmentation",
    "frozen optimizer",
    "early stopping",
    "stream in workers",
    "loader with state",
    "all",
    "all, stream",
]
KILLS = 10


def campaign(folder, *words):
    """Run the campaign as `make faults` does: in a process that has one thread, so that it may fork
    ranks.
    """
    command = python("-m", "tests.faults.campaign", *words)
    return Run(command, folder, {"PYTHONPATH": str(ROOT)}, warm=True).wait(110)


def test_random_kills_change_nothing(tmp_path):
    table = tmp_path / "table.json"
    words = [word for variant in DRAWN for word in ("--variant", variant)]
    run = campaign(tmp_path, "--kills", str(KILLS), "--seed", "4", "--json", str(table), *words)
    assert run.code == 0, run.out + run.err
    rows = json.loads(table.read_text())
    assert rows.pop("problems") == []
    assert sum(row["kills"] for row in rows.values()) == KILLS
    assert sum(sum(row["places"].values()) for row in rows.values()) == KILLS
    assert {name for name, row in rows.items() if row["kills"]} == set(DRAWN)
    assert len(set().union(*(row["places"] for row in rows.values()))) >= 4, (
        "they fall in many places"
    )


def test_the_campaign_sees_what_is_not_restored(tmp_path):
    setting = Setting("dropout", options=(("ckpt_async", False),))
    # after a save inside the epoch
    killed = text_of(setting), text_of(Kill("train", at=(2, TRAIN, 5, STEPPING)))
    whole = campaign(tmp_path, "--replay", *killed)
    assert whole.code == 0, whole.out + whole.err
    for broken in ("random", "optimizer", "loss"):
        lacking = campaign(tmp_path, "--sabotage", broken, "--replay", *killed)
        assert lacking.code == 1, broken + lacking.out + lacking.err


def test_another_number_of_processes_takes_the_same_steps(tmp_path):
    run = campaign(tmp_path, "--sizes", "2:3")
    assert run.code == 0, run.out + run.err
    assert len(run.out.splitlines()) == 4


# ------------------------------------------------------------------------------- the verdict itself


def batch(epoch, step, numbers, loss="0x1p0", inputs=1):
    return ["TRAIN", epoch, step, numbers, inputs, loss]


WHOLE = [batch(1, 1, [0, 1]), batch(1, 2, [2, 3]), batch(1, 3, [4]), ["stage", "TRAIN", 1, "0x1p0"]]


def judged(tmp_path, *diaries, most_lost=1, result=None):
    (tmp_path / "result.0.0").write_text(json.dumps({"weights/w": "1"}))
    reference = Reference.of(Attempt(diaries=[WHOLE]), tmp_path)
    (tmp_path / f"result.{len(diaries) - 1}.0").write_text(json.dumps(result or {"weights/w": "1"}))
    attempts = [Attempt(killed=True, diaries=[diary]) for diary in diaries]
    return {one.what for one in compare(reference, attempts, tmp_path, most_lost=most_lost)}


def test_a_run_that_goes_on_where_it_was_is_the_same(tmp_path):
    assert judged(tmp_path, WHOLE[:2], WHOLE[1:]) == set()
    assert judged(tmp_path, [], WHOLE) == set()


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ([batch(1, 2, [3, 2]), *WHOLE[2:]], "samples"),
        ([batch(1, 2, [2, 3], inputs=2), *WHOLE[2:]], "inputs"),
        ([batch(1, 2, [2, 3], loss="0x1.1p0"), *WHOLE[2:]], "batch loss"),
        ([WHOLE[1], WHOLE[2], ["stage", "TRAIN", 1, "0x1.1p0"]], "stage loss"),
        ([WHOLE[1], WHOLE[3]], "place"),  # a batch is left out
        (WHOLE[3:], "place"),  # the same, at the start
        (WHOLE[1:3], "place"),  # not to the end
        ([WHOLE[0], batch(2, 1, [0, 1])], "place"),  # what the other run never did
        (WHOLE, "work lost"),
    ],
)
def test_every_kind_of_difference_is_found(tmp_path, second, what):
    assert what in judged(tmp_path, WHOLE[:2], second)


def test_another_end_is_found(tmp_path):
    assert judged(tmp_path, WHOLE[:2], WHOLE[1:], result={"weights/w": "2"}) == {"weights"}


def test_a_sample_that_comes_twice_in_the_uninterrupted_run_is_found(tmp_path):
    size = VARIANTS["plain"].size
    (tmp_path / "result.0.0").write_text("{}")
    for numbers, is_fine in ((list(range(size)), True), ([0, *range(size - 1)], False)):
        reference = Reference.of(Attempt(diaries=[[batch(1, 1, numbers)]]), tmp_path)
        assert (reference.problems(Setting("plain")) == []) == is_fine


# ----------------------------------------------------------------------------------- real launchers

LAUNCHED = Setting("all", 2, options=(("ckpt_async", True),))


def start(folder, *kills, restarts=0, name="run", first=0, warm=True):
    """Start the recipe under torchrun; the n-th kill is for the n-th attempt. Cold, one takes 20 s,
    and not 3.
    """
    script = (
        "-m",
        "tests.faults.recipes_for_faults",
        str(folder),
        text_of(LAUNCHED),
        *map(text_of, kills),
    )
    environment = {"PYTHONPATH": str(ROOT), "FIRST_ATTEMPT": str(first)}
    folder.mkdir(exist_ok=True)
    return Run(
        torchrun(2, f"--max-restarts={restarts}", *script),
        folder,
        environment,
        name=name,
        warm=warm,
    )


def attempts_in(folder, number):
    ranks = range(LAUNCHED.world_size)
    return [
        Attempt(killed=n < number - 1, diaries=[Diary.read(folder, r, n) for r in ranks])
        for n in range(number)
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert start(folder).wait(90).code == 0
    [attempt] = attempts_in(folder, 1)
    reference = Reference.of(attempt, folder)
    assert reference.problems(LAUNCHED) == []
    return reference


def assert_same_run(reference, folder, number):
    most_lost = 2 * (LAUNCHED.interval + VARIANTS[LAUNCHED.variant].factor)
    found = compare(reference, attempts_in(folder, number), folder, most_lost=most_lost)
    assert not found, "\n".join(f"{one.what}: {one.words}" for one in found[:10])


def test_torchrun_restarts_what_was_killed_and_it_is_the_same_run(tmp_path, uninterrupted):
    """Twice in one epoch, once in the validation of the next: each rank, all by itself."""
    kills = [
        Kill("train", who=1, at=(1, TRAIN, 5, STEPPING)),
        Kill("train", who=0, at=(1, TRAIN, 7, STEPPED)),
        Kill("valid", who=1, at=(2, VALID, 2, 0)),
    ]
    run = start(tmp_path / "killed", *kills, restarts=3).wait(150)
    assert run.code == 0, run.err
    for number, kill in enumerate(kills):
        fell = [
            entry
            for entry in Diary.read(tmp_path / "killed", kill.who, number)
            if entry[0] == "kill"
        ]
        assert len(fell) == 1, f"kill {number} missed"
    assert_same_run(uninterrupted, tmp_path / "killed", 4)


@pytest.mark.in_each_check(1)
@pytest.mark.parametrize(
    ("at", "warm"),
    [((1, TRAIN, 6, STEPPED), False), ((2, VALID_END, 0, 0), True)],
)
def test_torchrun_and_all_it_started_is_killed_and_started_by_hand(
    tmp_path,
    uninterrupted,
    at,
    warm,
):
    """kill -9 of the launcher while a rank stands still at the moment that is asked for, then of
    its workers.
    """
    folder = tmp_path / "killed"
    run = start(folder, Kill("stop", who=1, at=at), warm=warm)
    assert wait_until(lambda: any(entry[0] == "kill" for entry in Diary.read(folder, 1, 0)), 60), (
        run.err
    )
    run.signal(signal.SIGKILL)
    for pid in run.alive():
        if pid != run.process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert run.wait(10).code == -signal.SIGKILL
    again = start(folder, name="again", first=1).wait(90)
    assert again.code == 0, again.err
    assert_same_run(uninterrupted, folder, 2)
