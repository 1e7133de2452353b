"""F5: kill -9 at every point of a save, and at random moments of saves back to back."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import threading
import time
from dataclasses import dataclass

import pytest

from ddpkit.checkpointing import SnapshotMemory
from ddpkit.distributed import ddp_barrier
from tests.cells import some_of
from tests.faults.storage_tools import (
    MODES,
    CrashingFiles,
    Plan,
    Run,
    WatchedFiles,
    forked,
    leftovers,
    names,
    recovered,
    save,
    steps_of,
    watch_changes,
    watched,
    without_waiting,
)
from tests.rank_pool import RankPool, RankPoolError

KILLS = 40  # of each mode


@pytest.fixture(scope="module")
def zygote():
    """One process that has imported torch and has no threads: what runs in it forks what is
    killed.
    """
    with RankPool(timeout=600) as pool:
        yield lambda function, *args: pool.run(function, *args, world_size=1, init=False)[0]


# -------------------------------------------------------------------------------------- every point


@dataclass(frozen=True)
class Scenario:
    """What was saved and acknowledged before, as (step, name), and how the next step is saved."""

    before: tuple[tuple[int, str | None], ...]
    name: str | None
    num_to_keep: int
    # the steps that may be found whole after a crash, in order of the save's progress
    allowed: tuple[set[int], ...]
    new: int = 3


SCENARIOS = {
    "the first one": Scenario((), None, 2, (set(), {3})),
    "one more": Scenario(((1, None), (2, None)), None, 2, ({1, 2}, {1, 2, 3}, {2, 3})),
    "in place of itself": Scenario(((2, "last"),), "last", 1, ({2}, {3})),
    "in place, and one deleted": Scenario(
        ((1, None), (2, "last")),
        "last",
        1,
        ({1, 2}, {1, 3}, {3}),
    ),
}


def prepare(folder, scenario):
    run = Run()
    checkpointer = run.checkpointer(folder)
    for step, name in scenario.before:
        save(run, checkpointer, step, name, num_to_keep=5)


def crash(folder, scenario, mode, at, files):
    """Save, and die at point ``at``; return the points if there are not so many."""
    run = Run()
    checkpointer = run.checkpointer(folder, mode)
    with watched(Plan(at), files()) as plan:
        watch_changes(folder)
        save(run, checkpointer, scenario.new, scenario.name, scenario.num_to_keep)
    return plan.points


def check(folder, scenario, where):
    """Look at the folder as the next process does; return the steps that it finds."""
    unfinished = leftovers(folder)
    found = steps_of(folder)
    last = max((step for step, _ in scenario.before), default=None)
    assert set(found) in scenario.allowed, f"{where}: found {found}"
    assert recovered(folder) == (scenario.new if scenario.new in found else last), where
    assert set(leftovers(folder)) <= set(unfinished), f"{where}: a reader leaves something behind"
    run = Run()
    save(run, run.checkpointer(folder), 9, num_to_keep=1)
    assert [name for name in names(folder) if not name.startswith("CKPT+")] == [], where
    assert steps_of(folder) == [9], where
    return frozenset(found), bool(unfinished)


def chosen(points, stride, first, pieces):
    """Return the numbers of the points to die at: of those in the midst of a file every so many-th,
    as a checkpoint is written in a hundred pieces, of which no reader sees any.
    """
    numbers = range(first, len(points) + 1, stride)
    inside = [number for number in numbers if points[number - 1].endswith(" bytes")]
    left_out = set(inside) - set(inside[::pieces])
    return [number for number in numbers if number not in left_out]


def crash_everywhere(folder, title, mode, stride=1, files=CrashingFiles, first=1, pieces=1):
    """Die at every point of one save; return the points and what was found after each."""
    scenario = SCENARIOS[title]
    template = folder / "template"
    trial = folder / "trial"

    def points_before(at):
        shutil.copytree(template, trial, symlinks=True)
        return forked(crash, trial, scenario, mode, at, files)

    outcomes = []
    with without_waiting():
        prepare(template, scenario)
        points = points_before(None)
        shutil.rmtree(trial)
        for at in chosen(points, stride, first, pieces):
            assert points_before(at) is None, f"it did not die at point {at}"
            outcomes.append(check(trial, scenario, f"died at point {at}"))
            shutil.rmtree(trial)
    return points, outcomes


# What the others do is in this, too.
WHOLE = "in place, and one deleted"


@pytest.mark.in_each_check(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("title", some_of(SCENARIOS, ["one more", "in place, and one deleted"]))
def test_death_at_every_point_of_a_save(zygote, tmp_path, title, mode):
    stride, pieces = (1, 4) if mode == "sync" and title == WHOLE else (5, 1)
    first = 1 + list(SCENARIOS).index(title) % stride
    words = (tmp_path, title, mode, stride, CrashingFiles, first, pieces)
    points, outcomes = zygote(crash_everywhere, *words)
    assert len(points) > 100
    assert len(outcomes) == len(chosen(points, stride, first, pieces))
    assert {
        f"{when} {name}"
        for when in ("before", "after")
        for name in ("make_directory", "write", "rename")
    } <= set(points)
    assert {
        "before sync_file",
        "after sync_directory",
        "half of a text",
        "half of a folder",
        "open",
    } <= set(points)
    assert sum(point.endswith(" bytes") for point in points) > 20
    found = {steps for steps, _ in outcomes}
    assert found == {frozenset(steps) for steps in SCENARIOS[title].allowed}, (
        "some state of the save was never hit"
    )
    assert sum(unfinished for _, unfinished in outcomes) > len(outcomes) / 2


class CopyingFiles(CrashingFiles):
    """Renames by copying and deleting, as across file systems: what a save must not do."""

    def rename(self, source, target):
        shutil.copytree(source, target, symlinks=True)
        shutil.rmtree(source)


@pytest.mark.exhaustive
def test_a_rename_that_is_not_atomic_would_be_noticed(zygote, tmp_path):
    with pytest.raises(RankPoolError, match="died at point"):
        zygote(crash_everywhere, tmp_path, "in place of itself", "sync", 3, CopyingFiles)


class ChangingFiles(WatchedFiles):
    """Takes note of what is renamed and removed."""

    def __init__(self, changes):
        self.changes = changes

    def around(self, name, operation, args):
        if name in {"rename", "remove_tree"}:
            self.changes.append((name, args[0].name))
        return operation(*args)


def removals_elsewhere(folder):
    """Save where a killed save has left something; return what is left, and what the other rank did
    to files.
    """
    changes = []
    checkpointer = Run().checkpointer(folder)
    with watched(Plan(), ChangingFiles(changes)):
        checkpointer.find_checkpoint()
        seen = leftovers(folder)
        ddp_barrier()
        checkpointer.save_checkpoint(meta={"step": 1})
    return seen, changes, leftovers(folder)


def test_leftovers_are_removed_by_main_alone(ranks, tmp_path):
    for name in (".tmp-0123", ".trash-4567"):
        (tmp_path / name / "deep").mkdir(parents=True)
    main, other = ranks.run(removals_elsewhere, tmp_path)
    assert main[0] == other[0] == [".tmp-0123", ".trash-4567"]
    assert {("rename", ".tmp-0123"), ("rename", ".trash-4567")} <= set(main[1])
    assert (
        sum(change == "remove_tree" and name.startswith(".trash-") for change, name in main[1]) == 2
    )
    assert other[1] == []
    assert main[2] == []


class WaitingFiles(WatchedFiles):
    """Writes in the background only when the training has gone on."""

    def __init__(self):
        self.gone_on = threading.Event()

    def around(self, name, operation, args):
        if name == "write" and threading.current_thread() is not threading.main_thread():
            assert self.gone_on.wait(30)
        return operation(*args)


@pytest.mark.parametrize("copies", [True, False])
def test_what_is_written_in_the_background_is_the_state_of_the_save(
    tmp_path,
    monkeypatch,
    copies,
):
    if not copies:
        monkeypatch.setattr(SnapshotMemory, "_copy", lambda memory, storage, own: storage)
    run = Run()
    checkpointer = run.checkpointer(tmp_path, "async")
    files = WaitingFiles()
    with watched(Plan(), files):
        run.stamp(1)
        checkpointer.save_checkpoint(meta={"unixtime": 1001.0, "step": 1})
        run.stamp(2)
        files.gone_on.set()
        checkpointer.wait()
    if copies:
        assert steps_of(tmp_path) == [1]
    else:
        with pytest.raises(AssertionError, match="torn"):
            steps_of(tmp_path)


# ----------------------------------------------------------------------------------- random moments


def seconds_of_a_save(folder):
    """Say how long a first save takes here and now, from its start to its acknowledgement."""
    run = Run(width=64)
    checkpointer = run.checkpointer(folder)
    started = time.monotonic()
    save(run, checkpointer, 1)
    return time.monotonic() - started


def save_back_to_back(folder, mode, pipe):
    """Save without end; write each step to the pipe as soon as the library has acknowledged it."""
    run = Run(width=64)
    checkpointer = run.checkpointer(folder, mode)
    checkpointer.recover_if_possible()
    step = run.step()
    os.write(pipe, b"0\n")
    while True:
        step = run.stamp(step + 1)  # in the background of which the one before may still be written
        name = "last" if step % 3 == 0 else None
        checkpointer.save_and_keep_only(
            meta={"unixtime": 1000.0 + step, "step": step},
            name=name,
            num_to_keep=2,
        )
        if mode == "async" and step % 4 == 0:
            checkpointer.wait()
        # a save waits for the one before
        sure = step if mode == "sync" or step % 4 == 0 else step - 1
        os.write(pipe, f"{sure}\n".encode())


def kill_once(folder, mode, delay):
    """Kill a saver ``delay`` seconds after its start; return the last step that it was told is
    safe.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            save_back_to_back(folder, mode, writer)
        os._exit(3)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert select.select([pipe], [], [], 120)[0], "the saver does not begin"
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        told = [int(line) for line in pipe.read().split(b"\n") if line]
    assert os.WIFSIGNALED(status), f"the saver ended by itself: {status}"
    return max(told)


def whole_steps(folder):
    run = Run(width=64)
    checkpointer = run.checkpointer(folder)
    newest = checkpointer.recover_if_possible()
    best = run.step() if newest else None
    steps = []
    for found in checkpointer.find_checkpoints() if newest else []:
        checkpointer.load_checkpoint(found)
        assert found.meta["step"] == run.step(), f"{found.path} holds {run.step()}"
        steps.append(run.step())
    return best, steps


def kill_at_random(folder, mode, kills):
    """Return how many kills fell into a save, and the steps that were recovered."""
    draw = random.Random(f"{mode}{kills}")
    sure = 0
    unfinished = 0
    recovered_steps = []
    longest = max(0.05, 3 * forked(seconds_of_a_save, folder / "measure"))
    folder /= "run"
    folder.mkdir()
    for kill in range(kills):
        before = sure
        sure = max(sure, kill_once(folder, mode, draw.uniform(0.0, longest)))
        unfinished += bool(leftovers(folder))
        best, steps = whole_steps(folder)
        if sure:
            assert best is not None, f"kill {kill}: nothing is found, {sure} was acknowledged"
            assert sure <= best <= sure + 2, (
                f"kill {kill}: {best} is recovered, {sure} was acknowledged"
            )
            assert steps[0] == best, f"kill {kill}: {steps}"
            recovered_steps.append(best)
            sure = best
        # the machine may be busier than when it was measured, or less: a few saves between two
        # kills
        longest = min(
            20.0,
            longest * (1.2 if sure == before else 0.9 if sure > before + 3 else 1.0),
        )
    return unfinished, recovered_steps


@pytest.mark.in_each_check(1)
@pytest.mark.parametrize("mode", MODES)
def test_kills_at_random_moments_of_saves_back_to_back(zygote, tmp_path, mode):
    unfinished, steps = zygote(kill_at_random, tmp_path, mode, KILLS)
    assert len(steps) > KILLS / 2
    assert steps == sorted(steps)
    assert steps[-1] > KILLS / 4, "hardly anything was saved between the kills"
    assert unfinished > KILLS / 10, "the kills did not fall into saves"
    print(f"{mode}: {KILLS} kills, {unfinished} in the midst of a save, {steps[-1]} steps")
