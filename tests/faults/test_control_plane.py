"""Never hang, never lie: real processes that fail, die, hang or are asked to stop, under torchrun
and without.

What is measured is from the fault on; starting takes seconds of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.launching import PATIENCE, Run, start_by_hand, torchrun, wait_until

pytestmark = pytest.mark.faults

RECIPE = str(Path(__file__).with_name("control_recipe.py"))
GONE_SECONDS = 5.0  # on an idle machine
START_SECONDS = 60.0


def start(folder, *words, processes=2, by_hand=False, warm=True):
    folder.mkdir(parents=True, exist_ok=True)
    command = (RECIPE, str(folder / "out"), *words)
    if by_hand:
        return start_by_hand([sys.executable, *command], folder, processes, warm=warm)
    return [Run(torchrun(processes, *command), folder, warm=warm)]


def wait(runs, seconds=START_SECONDS):
    for run in runs:
        run.wait(seconds)


def said(runs):
    return "\n".join(run.err for run in runs)


def await_fault(folder, runs):
    """Wait until the fault has happened; not longer than the processes live."""
    happened = (folder / "out" / "fault").exists
    wait_until(
        lambda: happened() or any(run.process.poll() is not None for run in runs),
        START_SECONDS,
    )
    assert happened(), said(runs)


def fault_at(folder):
    return float((folder / "out" / "fault").read_text())


def steps(folder, rank):
    path = folder / "out" / f"steps-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(folder, stage, step, *, ranks=2):
    def there():
        return all(
            any(line[2] == stage and line[3] >= step for line in steps(folder, rank))
            for rank in range(ranks)
        )

    assert wait_until(there, START_SECONDS)


def pid_of(folder, rank):
    return steps(folder, rank)[-1][1]


def require_gone_soon(runs, folder):
    """Wait for the end of all processes, and check that it came soon after the fault."""
    assert wait_until((folder / "out" / "fault").exists, START_SECONDS)
    for run in runs:
        run.wait(GONE_SECONDS + 2)
    assert time.time() - fault_at(folder) < GONE_SECONDS * PATIENCE


# ------------------------------------------------------------------------------- a rank that raises


@pytest.mark.parametrize(
    ("where", "rank", "by_hand"),
    [
        ("forward", 1, False),
        ("forward", 0, True),
        pytest.param("forward", 1, True, marks=pytest.mark.exhaustive),
        ("hook", 0, False),
        ("dataset", 1, True),
        ("worker", 1, False),
        pytest.param("worker", 0, True, marks=pytest.mark.exhaustive),
        ("valid", 1, False),
        pytest.param("valid", 0, True, marks=pytest.mark.exhaustive),
        ("main", 0, False),
        pytest.param("main", 0, True, marks=pytest.mark.exhaustive),
        ("start", 1, False),
        ("start", 0, True),
    ],
)
def test_an_exception_anywhere_ends_all_and_is_what_one_reads_last(
    tmp_path,
    where,
    rank,
    by_hand,
):
    words = [
        f"fault=raise@{where}",
        f"rank={rank}",
        "size=160",
        f"workers={2 * (where == 'worker')}",
    ]
    runs = start(tmp_path, *words, by_hand=by_hand)
    require_gone_soon(runs, tmp_path)
    assert all(run.code != 0 for run in runs)
    text = said(runs)
    assert f"rank {rank} (" in text
    assert "boom from the fault" in text
    if where not in {"main", "start"}:
        stage = "VALID" if where == "valid" else "TRAIN"
        assert f"in {stage} of epoch 1 at step" in text
    guilty = runs[rank].tail(15) if by_hand else runs[0].err
    assert "ValueError: boom from the fault" in guilty
    assert "Connection closed" not in text
    assert "Connection reset" not in text
    assert "terminate called" not in text


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_exception_on_one_of_four_ranks(tmp_path, by_hand):
    runs = start(tmp_path, "fault=raise@forward", "rank=2", processes=4, by_hand=by_hand)
    require_gone_soon(runs, tmp_path)
    assert "rank 2 (" in said(runs)


# ------------------------------------------------------------------------------ a process that dies


@pytest.mark.parametrize(("rank", "by_hand"), [(1, False), (0, False), (1, True), (0, True)])
def test_a_killed_rank_is_named_with_its_step(tmp_path, rank, by_hand):
    runs = start(tmp_path, "fault=kill@forward", f"rank={rank}", "step=9", by_hand=by_hand)
    require_gone_soon(runs, tmp_path)
    assert all(run.code != 0 for run in runs)
    text = said(runs)
    assert f"rank {rank} (" in text
    assert f"pid {pid_of(tmp_path, rank)}) disappeared in TRAIN of epoch 1 at step" in text


def test_a_rank_that_is_asked_to_end_after_fit_says_first_which_one_was_killed(tmp_path):
    runs = start(tmp_path, "fault=kill@forward", "rank=1", "step=9", "after=1", by_hand=True)
    assert wait_until((tmp_path / "out" / "left-0").exists, START_SECONDS)
    runs[0].signal(signal.SIGTERM)  # as a launcher does
    require_gone_soon(runs, tmp_path)
    assert (
        f"rank 1 ({socket.gethostname()}, pid {pid_of(tmp_path, 1)}) disappeared in TRAIN"
        in runs[0].err
    )


def test_without_their_launcher_the_workers_end(tmp_path):
    [run] = start(tmp_path, "epochs=1000", warm=False)
    until(tmp_path, "TRAIN", 5)
    run.signal(signal.SIGKILL)
    run.wait(GONE_SECONDS)
    assert "the launcher" in run.err


def test_when_main_dies_inside_of_its_own_work_everyone_learns_it(tmp_path):
    runs = start(tmp_path, "fault=kill@main", "size=40", by_hand=True)
    require_gone_soon(runs, tmp_path)
    assert runs[1].code != 0
    assert "rank 0" in runs[1].tail()


@pytest.mark.parametrize("by_hand", [False, True])
def test_without_memory_for_a_checkpoint_that_is_sent_to_it_a_rank_ends_and_nobody_waits(
    tmp_path,
    by_hand,
):
    wait(start(tmp_path, "size=40", "epochs=1"))
    runs = start(tmp_path, "fault=memory@load", "rank=1", "--ckpt_load=broadcast", by_hand=by_hand)
    require_gone_soon(runs, tmp_path)
    assert all(run.code != 0 for run in runs)
    assert "rank 1 (" in said(runs)
    assert "failed first, in fit, before the first stage" in said(runs)
    assert "MemoryError" in runs[0].err


# ----------------------------------------------------------------------------- a rank that is stuck


@pytest.mark.parametrize(
    ("fault", "where"),
    [("sleep", "forward"), ("spin", "hook"), ("sleep", "worker")],
)
def test_a_stuck_rank_is_named_with_its_line_and_ends_the_run(tmp_path, fault, where):
    words = ["--hang_warning=3", "--hang_timeout=8", f"workers={2 * (where == 'worker')}"]
    [run] = start(tmp_path, f"fault={fault}@{where}", "rank=1", *words)
    await_fault(tmp_path, [run])
    run.wait(8 + GONE_SECONDS)
    at = (
        "at .*, waiting for its loader$"
        if where == "worker"
        else (
            r".*control_recipe.py:\d+ "
            r"in happen"
        )
    )
    guilty = rf"^rank 1 \(.*\): in TRAIN of epoch 1 at step \d+, for \d+ s {at}"
    assert re.search(guilty, run.err, re.MULTILINE), run.err
    if where == "worker":
        stacks = run.err.partition("A worker of the loader (pid ")[2]
        assert re.search(r"control_recipe.py\", line \d+ in happen", stacks), run.err
    assert re.search(
        r"^rank 0: in TRAIN of epoch 1 at step \d+, .* waiting for other ranks",
        run.err,
        re.MULTILINE,
    )
    assert "where all threads are" in run.err
    assert run.code != 0


def test_a_stopped_process_is_named(tmp_path):
    runs = start(
        tmp_path,
        "fault=stop@forward",
        "rank=1",
        "--hang_warning=3",
        "--hang_timeout=8",
        by_hand=True,
    )
    await_fault(tmp_path, runs)
    assert wait_until(lambda: runs[0].process.poll() is not None, 8 + GONE_SECONDS)
    assert "rank 1 (" in runs[0].err
    assert "silent for" in runs[0].err
    for run in runs:
        for pid in run.alive():
            os.kill(pid, signal.SIGKILL)
    wait(runs)


@pytest.mark.parametrize(("rank", "where"), [(0, "fit"), (1, "forward")])
def test_a_rank_that_keeps_the_interpreter_lock_is_named_by_the_others(tmp_path, rank, where):
    """Nobody of this process can end it: that is the launcher's."""
    words = [
        f"fault=gil@{where}",
        f"rank={rank}",
        "size=40",
        "--hang_warning=3",
        "--hang_timeout=8",
    ]
    runs = start(tmp_path, *words, by_hand=True)
    await_fault(tmp_path, runs)
    assert wait_until(lambda: runs[1 - rank].process.poll() is not None, 8 + GONE_SECONDS)
    assert re.search(rf"^rank {rank} \(.*silent for", runs[1 - rank].err, re.MULTILINE), said(runs)
    assert runs[rank].process.poll() is None
    runs[rank].signal(signal.SIGKILL)
    wait(runs)


def test_work_of_the_main_process_has_no_limit_of_time(tmp_path):
    words = [
        "--hang_warning=3",
        "--hang_timeout=8",
        "fault=sleep@main",
        "seconds=13",
        "size=40",
        "epochs=1",
    ]
    [run] = start(tmp_path, *words)
    run.wait(START_SECONDS)
    assert run.code == 0, run.err
    assert run.out.count("finished") == 2


def test_work_of_the_main_process_may_keep_the_interpreter_lock_for_longer_than_the_limit(tmp_path):
    words = ["--hang_timeout=8", "fault=gil@main", "seconds=17", "size=40", "epochs=1"]
    runs = start(tmp_path, *words, by_hand=True)
    wait(runs)
    assert [run.code for run in runs] == [0, 0], said(runs)


# ------------------------------------------------------------------------------------ asked to stop


def final(folder, rank=0):
    return torch.load(folder / "out" / f"final-{rank}.pt", weights_only=True)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Train to the end."""
    folder = tmp_path_factory.mktemp("plain")
    [run] = start(folder, "epochs=2", "size=240", "pause=0")
    run.wait(START_SECONDS)
    assert run.code == 0, run.err
    return final(folder)


@pytest.mark.parametrize(
    ("name", "target", "stage", "workers", "by_hand"),
    [
        ("SIGTERM", "launcher", "TRAIN", 0, False),
        pytest.param("SIGTERM", 1, "TRAIN", 2, False, marks=pytest.mark.exhaustive),
        ("SIGTERM", 1, "VALID", 0, True),
        ("SIGTERM", 1, "VALID of a stream", 0, True),
        ("SIGUSR1", 0, "TRAIN", 2, True),
        ("SIGUSR1", 1, "VALID", 2, False),
        ("SIGINT", "launcher", "TRAIN", 2, False),
        pytest.param("SIGINT", 1, "TRAIN", 0, True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_stops_all_ranks_at_one_step_and_the_run_goes_on(
    tmp_path,
    uninterrupted,
    name,
    target,
    stage,
    workers,
    by_hand,
):
    words = ["epochs=2", "size=240", f"workers={workers}", f"stream={'yes' * ('stream' in stage)}"]
    # slow enough that the signal comes before the end
    runs = start(tmp_path, *words, "pause=0.1", by_hand=by_hand)
    until(tmp_path, stage.partition(" ")[0], 4)
    number = signal.Signals[name]
    if target == "launcher":
        runs[0].signal(number)
    elif by_hand:
        runs[target].signal(number)
    else:
        os.kill(pid_of(tmp_path, target), number)
    wait(runs, 2 * GONE_SECONDS)
    marker = json.loads((tmp_path / "out" / "stopped.json").read_text())
    assert marker["reason"] == name
    assert marker["exit_code"] == 128 + number
    if by_hand:
        assert [run.code for run in runs] == [128 + number] * 2
    assert len({tuple(steps(tmp_path, rank)[-1][2:5]) for rank in range(2)}) == 1, (
        "all ranks at one step"
    )
    assert Path(marker["checkpoint"]).is_dir()
    before = len(steps(tmp_path, 0))
    [again] = start(tmp_path, *words, "pause=0")
    again.wait(START_SECONDS)
    assert again.code == 0, again.err
    assert not (tmp_path / "out" / "stopped.json").exists()
    assert len(steps(tmp_path, 0)) > before
    trained = [line[4] for line in steps(tmp_path, 0) if line[2] == "TRAIN"]
    assert trained == list(range(60)), "every step once"
    for key, value in uninterrupted.items():
        assert torch.equal(final(tmp_path)[key], value)


def workers_of(run):
    """Return the processes of a run but for its rank: the workers, and what has started them."""
    return [pid for pid in run.alive() if pid != run.process.pid]


@pytest.mark.in_each_check(1)
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_are_deaf_from_their_first_moment(tmp_path, context):
    """The whole group is signalled while they start, which takes those that are not forked
    seconds.
    """
    [run] = start(
        tmp_path,
        "workers=2",
        f"context={context}",
        "epochs=2",
        processes=1,
        by_hand=True,
        warm=context == "fork",
    )
    assert wait_until(lambda: workers_of(run), START_SECONDS)
    run.signal(signal.SIGTERM)
    end = time.monotonic() + START_SECONDS
    while run.process.poll() is None and time.monotonic() < end:
        for pid in workers_of(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.02)
    run.wait(GONE_SECONDS)
    assert run.code == 143, run.err
    marker = json.loads((tmp_path / "out" / "stopped.json").read_text())
    assert marker["reason"] == "SIGTERM"
    assert marker["step"] >= 1, "it took the first step, which needs a worker's batch"


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_do_not_outlive_their_rank(tmp_path, context):
    words = ["workers=2", f"context={context}", "size=100000"]
    [run] = start(tmp_path, *words, processes=1, by_hand=True)
    until(tmp_path, "TRAIN", 3, ranks=1)
    assert len(workers_of(run)) >= 3
    run.signal(signal.SIGKILL)
    run.wait(GONE_SECONDS)


def test_the_time_limit_stops_all_ranks(tmp_path):
    [run] = start(tmp_path, "--time_limit=0:00:04", "epochs=1000")
    run.wait(START_SECONDS)
    marker = json.loads((tmp_path / "out" / "stopped.json").read_text())
    assert (marker["reason"], marker["exit_code"]) == ("time limit", 75)
    assert len({tuple(steps(tmp_path, rank)[-1][2:5]) for rank in range(2)}) == 1


def test_a_second_signal_ends_a_rank_that_hangs_in_a_collective(tmp_path):
    runs = start(tmp_path, "fault=sleep@forward", "rank=1", by_hand=True)
    await_fault(tmp_path, runs)
    # a process that was kept from hearing the first one may take the second for its echo
    for _ in range(3):
        runs[0].signal(signal.SIGINT)
        time.sleep(3)  # what comes within a second is the same signal, by another way
        if runs[0].process.poll() is not None:
            break
    assert runs[0].code in {130, -signal.SIGINT}
    wait(runs, GONE_SECONDS)
