"""Saves in shards: kill -9 at every file operation of each rank, and ranks that cannot write."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from ddpkit.base import FailureReport, Reason
from ddpkit.checkpointing import folder as folder_module, shard_saving, shard_writing
from ddpkit.comm import get_runtime
from ddpkit.distributed import get_rank
from ddpkit.errors import CheckpointError
from tests.checkpointing.sharded_runs import ShardedRun, save, steps_of
from tests.faults.storage_tools import (
    MODES,
    CrashingFiles,
    Plan,
    WatchedFiles,
    leftovers,
    names,
    watched,
    without_waiting,
)
from tests.launching import python, start_by_hand
from tests.rank_pool import RankPool

SIZE = 2
SECONDS = 60.0  # for a pair of ranks, on a machine with much else to do


@pytest.fixture(scope="module")
def zygote():
    """One process that has imported torch and has no threads: what runs in it forks the ranks."""
    with RankPool(timeout=1200) as pool:
        yield lambda function, *args: pool.run(function, *args, world_size=1, init=False)[0]


def start_rank(rank, store, work, *args):
    """Fork a rank of a process group; return its process id and where its result comes."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.fspath(store), SIZE),
            rank=rank,
            world_size=SIZE,
        )
        result = work(*args)
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(result, pipe)
    finally:
        os._exit(0)


def run_pair(folder, *works):
    """Run a pair of ranks; once one was killed, kill the other, as a launcher does. Return their
    results; of what was killed None.
    """
    store = folder.with_name(f"{folder.name}.store")
    store.unlink(missing_ok=True)
    started = [start_rank(rank, store, *work) for rank, work in enumerate(works)]
    await_ends({pid for pid, _ in started})
    results = []
    for _, reader in started:
        with os.fdopen(reader, "rb") as pipe:
            content = pipe.read()
        results.append(pickle.loads(content) if content else None)
    return results


def await_ends(waiting):
    end = time.monotonic() + SECONDS
    while waiting:
        for pid in list(waiting):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                waiting.remove(pid)
            if ended and os.WIFSIGNALED(status):
                kill(waiting)
        if time.monotonic() > end:
            kill(waiting)
            raise AssertionError("a rank has not ended")
        time.sleep(0.002)


def kill(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def save_at(folder, mode, step, at, num_to_keep):
    """Save as one rank, and die at point ``at``; return the points if there are not so many."""
    run = ShardedRun()
    checkpointer = run.checkpointer(folder, mode)
    with watched(Plan(at), CrashingFiles()) as plan:
        save(run, checkpointer, step, num_to_keep)
    return plan.points


def save_as_pair(folder, mode, step, at=(None, None), num_to_keep=2):
    return run_pair(
        folder,
        *[(save_at, folder, mode, step, number, num_to_keep) for number in at],
    )


def chosen(points, stride):
    """Return the numbers of the points to die at; few of those in the midst of a file."""
    numbers = range(1, len(points) + 1)
    inside = [number for number in numbers if points[number - 1].endswith(" bytes")]
    left_out = set(inside) - set(inside[:: 4 * stride])
    return [number for number in numbers if number not in left_out][::stride]


def crash_everywhere(folder, mode, dying, stride):
    template = folder / "template"
    trial = folder / "trial"
    found = []
    with without_waiting():
        save_as_pair(template, mode, 1)
        assert steps_of(template) == [1]
        shutil.copytree(template, trial, symlinks=True)
        points = save_as_pair(trial, mode, 2)[dying]
        shutil.rmtree(trial)
        for at in chosen(points, stride):
            shutil.copytree(template, trial, symlinks=True)
            where = [None] * SIZE
            where[dying] = at
            results = save_as_pair(trial, mode, 2, where)
            assert results[dying] is None, f"rank {dying} did not die at point {at}"
            steps = steps_of(trial)
            assert steps in ([1], [2, 1]), f"died at point {at}: found {steps}"
            found.append(len(steps))
            save_as_pair(trial, mode, 9, num_to_keep=1)
            assert steps_of(trial) == [9], at
            assert [name for name in names(trial) if not name.startswith("CKPT+")] == [], at
            shutil.rmtree(trial)
    return points, found


@pytest.mark.in_each_check(2)
@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dying", "stride"), [(0, 6), (1, 2)])
def test_death_of_a_rank_at_every_point_of_its_save(zygote, tmp_path, mode, dying, stride):
    points, found = zygote(crash_everywhere, tmp_path, mode, dying, stride)
    assert "before sync_file" in points
    # what the other rank writes is no checkpoint by itself; the main process commits
    assert set(found) <= ({1, 2} if dying == 0 else {1})
    assert found[0] == 1


# ------------------------------------------------------------------------------------- errors


class FullFiles(WatchedFiles):
    """No space is left for a shard of one rank."""

    def __init__(self, rank):
        self.rank = rank

    def around(self, name, operation, args):
        if name == "write" and get_rank() == self.rank and "-shard-" in args[0].name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return operation(*args)


def save_on_a_full_disk(folder, mode, rank):
    """Save, save in vain, and save again; return what is said, and what is found after each."""
    run = ShardedRun()
    checkpointer = run.checkpointer(folder, mode)
    save(run, checkpointer, 1)
    found = []
    with watched(Plan(), FullFiles(rank)):
        with pytest.raises(CheckpointError) as caught:
            save(run, checkpointer, 2)
        dist.barrier()
        found += [steps_of(folder), leftovers(folder)]
        dist.barrier()
        checkpointer.on_error = "warn"
        save(run, checkpointer, 3)
        dist.barrier()
        found.append(steps_of(folder))
        dist.barrier()
    save(run, checkpointer, 4)
    dist.barrier()
    found.append(steps_of(folder))
    return str(caught.value), found


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", range(SIZE))
def test_a_rank_that_cannot_write_ends_the_save_on_all(ranks, tmp_path, mode, rank):
    for message, found in ranks.run(save_on_a_full_disk, tmp_path, mode, rank, timeout=300):
        assert f"rank {rank}: " in message
        assert "saving the recoverable 'model': OSError: [Errno 28] No space left" in message
        assert "Existing checkpoints are unchanged" in message
        assert found == [[1], [], [1], [4, 1]]


def save_where_nothing_is_shared(folder):
    """Save where rank 1 has another disk."""
    write = shard_saving.ShardSaving.write_and_tell

    def write_elsewhere(saving, staging, rows):
        write(saving, folder / "other disk" / staging.name, rows)

    with mock.patch.object(shard_saving.ShardSaving, "write_and_tell", write_elsewhere):
        if get_rank():
            (folder / "other disk").mkdir()
        run = ShardedRun()
        checkpointer = run.checkpointer(folder / "shared")
        with pytest.raises(CheckpointError) as caught:
            save(run, checkpointer, 1)
    dist.barrier()
    return str(caught.value), names(folder / "shared")


def test_a_folder_that_the_nodes_do_not_share_is_named(ranks, tmp_path):
    for message, left in ranks.run(save_where_nothing_is_shared, tmp_path):
        assert "rank 1: " in message
        assert "all machines must share the folder" in message
        assert "--ckpt_layout=whole" in message
        assert left == []


LONGEST = 110 * "ä"  # in bytes 220


def save_long_names(folder):
    """Save under the longest names, as another step, and load it."""
    run = ShardedRun()
    checkpointer = run.checkpointer(folder)
    checkpointer.recoverables[LONGEST] = checkpointer.recoverables.pop("model")
    checkpointer.divided_states = lambda objects: {LONGEST: run.divided_states(objects)["model"]}
    run.stamp(3)
    path = checkpointer.save_checkpoint(name=240 * "c").path
    run.stamp(4)
    assert checkpointer.recover_if_possible() is not None
    return run.step(), [name for name in names(path) if "-shard-" in name]


def test_the_longest_names_are_those_of_files_in_shards(ranks, tmp_path):
    for step, shards in ranks.run(save_long_names, tmp_path):
        assert step == 3
        assert shards == [f"{LONGEST}-shard-{rank}-of-2.safetensors" for rank in range(SIZE)]


def save_what_the_main_process_cannot(folder, mode, moment):
    """Save in vain: the main process fails before rank 1 looks for the directory. Return what each
    says, and for how long rank 1 was in it.
    """
    run = ShardedRun()
    checkpointer = run.checkpointer(folder, mode)
    write = shard_saving.ShardSaving.write_and_tell
    seconds = [0.0]
    written = threading.Event()

    def write_late(saving, staging, rows):
        end = time.monotonic() + SECONDS
        while staging.exists():
            assert time.monotonic() < end, "the main process has not failed"
            time.sleep(0.01)
        begin = time.monotonic()
        write(saving, staging, rows)
        seconds[0] = time.monotonic() - begin
        written.set()

    fails = mock.Mock(side_effect=ValueError("it is not to be"))
    with contextlib.ExitStack() as patches:
        if get_rank():
            patches.enter_context(
                mock.patch.object(shard_saving.ShardSaving, "write_and_tell", write_late)
            )
            told = patches.enter_context(
                mock.patch.object(shard_saving, "_tell", wraps=shard_saving._tell)
            )
        else:
            patches.enter_context(mock.patch.object(folder_module, moment, fails))
        with pytest.raises(CheckpointError) as caught:
            save(run, checkpointer, 1)
        if get_rank():
            assert written.wait(SECONDS)  # a thread may do it
    words = told.call_args.args[1] if get_rank() else ""
    return str(caught.value), words, seconds[0]


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moment", ["run_savers", "write_state"])
def test_a_main_process_that_fails_keeps_no_rank_waiting(tmp_path, mode, moment):
    with RankPool(timeout=90) as pool:
        main, other = pool.run(
            save_what_the_main_process_cannot,
            tmp_path,
            mode,
            moment,
            world_size=SIZE,
        )
    assert "it is not to be" in main[0]
    assert re.search(r"failed rank 0 has given the checkpoint up: .*it is not to be", other[1])
    assert other[2] < shard_writing.VISIBLE_SECONDS / 3
    assert names(tmp_path) == []


def departs(folder):
    """Save as rank 0, where rank 1 has come to its end while it wrote."""
    run = ShardedRun()
    checkpointer = run.checkpointer(folder)
    if get_rank():
        shard_saving.ShardSaving.write_and_tell = lambda *_: get_runtime().report.depart()
    try:
        save(run, checkpointer, 1)
    except CheckpointError as error:
        return str(error)
    finally:
        get_runtime().report.store.delete_key("ddpkit/departed/1")
    return None


@pytest.mark.costly
def test_a_rank_that_ends_without_a_word_is_named(tmp_path):
    with RankPool(timeout=120) as pool:
        for message in pool.run(departs, tmp_path, world_size=SIZE):
            assert "rank 1: it has ended and has not told that its shard" in message
    assert names(tmp_path) == []


STOPPED = """
import os, signal, sys
sys.path.insert(0, ROOT)
from ddpkit.checkpointing.shard_saving import ShardSaving
from ddpkit.distributed import ddp_init_group, get_rank
from tests.checkpointing.sharded_runs import ShardedRun, save

ddp_init_group({"device": "cpu", "hang_timeout": 5.0})
if get_rank():
    ShardSaving.write_and_tell = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
run = ShardedRun()
save(run, run.checkpointer(FOLDER), 1)
"""


def test_a_rank_that_is_stopped_before_it_writes_is_not_waited_for_without_end(tmp_path):
    root = os.fspath(Path(__file__).parents[2])
    text = STOPPED.replace("ROOT", repr(root)).replace("FOLDER", repr(f"{tmp_path}/saved"))
    (tmp_path / "train.py").write_text(text)
    main, other = start_by_hand(
        python(str(tmp_path / "train.py")),
        tmp_path,
        SIZE,
        warm=True,
        LOCAL_WORLD_SIZE="2",
    )
    try:
        main.wait(30)
    finally:
        other.signal(signal.SIGKILL)
        other.wait(5)
    assert (main.code, other.code) == (1, -signal.SIGKILL), other.err
    assert re.search(
        r"rank 1: it has ended and has not told .* sent no heartbeat for \d+ s "
        r"\(--hang_timeout=5\): it was killed or stopped",
        main.err,
    ), main.err
    assert names(tmp_path / "saved") == []


def save_while_training_goes_on(folder):
    """Save where no rank writes before the training goes on there; return what is then found."""
    run = ShardedRun()
    checkpointer = run.checkpointer(folder, "async")
    goes_on = threading.Event()
    was_awaited = []
    write = shard_saving.write_shards

    def write_late(*args):
        was_awaited.append(not goes_on.wait(10))
        return write(*args)

    with mock.patch.object(shard_saving, "write_shards", write_late):
        run.stamp(1)
        checkpointer.save_checkpoint(meta={"step": 1})
        goes_on.set()
        run.stamp(2)  # what is written is a copy
        checkpointer.wait()
    dist.barrier()
    return was_awaited, steps_of(folder)


def test_no_rank_waits_for_a_shard_that_is_written_in_the_background(ranks, tmp_path):
    assert ranks.run(save_while_training_goes_on, tmp_path) == SIZE * [([False], [1])]


def save_what_cannot_be_copied(folder):
    run = ShardedRun()
    checkpointer = run.checkpointer(folder, "async")
    if get_rank():
        checkpointer._memory = SimpleNamespace(take=mock.Mock(side_effect=TypeError("no copy")))
    with pytest.raises((CheckpointError, TypeError)) as caught:
        save(run, checkpointer, 1)
    return str(caught.value)


@pytest.mark.costly
def test_a_rank_that_cannot_copy_its_rows_is_not_waited_for(tmp_path):
    with RankPool(timeout=60) as pool:
        main, other = pool.run(save_what_cannot_be_copied, tmp_path, world_size=SIZE)
    assert "rank 1: TypeError: no copy" in main
    assert other == "no copy"
    assert names(tmp_path) == []


@pytest.fixture
def clock(monkeypatch):
    """A clock of waits for shards, which goes on when they sleep."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(shard_saving, "time", clock)
    return clock


def test_a_long_wait_asks_the_store_few_questions_however_many_ranks_there_are(clock):
    store = dist.HashStore()
    asked = mock.Mock(wraps=store)
    wait = shard_saving.NoteWait(FailureReport(asked, 0, 64), lambda _: None)

    def sleep(seconds):
        clock.now += seconds
        if clock.now > 60:
            FailureReport(store, 1, 64).note("shard 1", "wrote it")

    clock.sleep = sleep
    assert wait.of("shard 1", 1) == "wrote it"
    assert 60 < clock.now < 61
    assert asked.check.call_count < 15 * clock.now


def test_all_ranks_that_are_not_heard_of_have_one_time_after_a_failure(clock):
    store = dist.HashStore()
    FailureReport(store, 7, 8).tell(Reason.of(7, ValueError("boom"), is_final=True))
    wait = shard_saving.NoteWait(FailureReport(store, 0, 8), lambda _: None)
    for rank in range(1, 8):
        with pytest.raises(CheckpointError, match="boom"):
            wait.of(f"shard {rank}", rank)
    assert shard_saving.FAILED_SECONDS <= clock.now < shard_saving.FAILED_SECONDS + 1
