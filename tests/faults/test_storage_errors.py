"""F8: an error at any file operation of a save, injected and real; what to do about it, on one rank
and on two.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import subprocess
from itertools import count

import pytest

from ddpkit.distributed import ddp_barrier, if_main_process
from ddpkit.errors import CheckpointError
from tests.faults.storage_tools import (
    MODES,
    CrashingFiles,
    Plan,
    Run,
    Warnings,
    forked,
    leftovers,
    names,
    new_folder,
    obey_permissions,
    recovered,
    save,
    steps_of,
    watched,
    without_waiting,
)
from tests.rank_pool import RankPool

WORDS = {
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "quota exceeded",
    errno.EIO: "input/output error",
    errno.EROFS: "read-only file system",
    errno.EACCES: "permission denied",
}


@pytest.fixture(scope="module")
def zygote():
    """One process without threads, whose forks may be given limits."""
    with RankPool(timeout=600) as pool:
        yield lambda function, *args: pool.run(forked, function, *args, world_size=1, init=False)[0]


class Failing(Plan):
    """At one point, or from it on at every one that needs space, an operation fails.

    Of the pieces in which a file is written the first two count.
    """

    def __init__(self, at, number, *, stays=False):
        super().__init__(at, self.fail)
        self.number = number
        self.stays = stays
        self.pieces = 0

    def fail(self):
        raise OSError(self.number, os.strerror(self.number))

    def reach(self, point):
        self.pieces = self.pieces + 1 if point.endswith("bytes") else 0
        if not point.startswith("after") and self.pieces <= 2:
            super().reach(point)
        needs_space = point.startswith("half") or point in {"before write", "before make_directory"}
        if self.stays and needs_space and len(self.points) > self.at:
            self.fail()


def fail_once(folder, mode, plan, on_error="stop"):
    """Save a third time with an error; return it, or None if all went well."""
    run = Run()
    checkpointer = run.checkpointer(folder, mode)
    checkpointer.on_error = on_error
    try:
        with watched(plan, CrashingFiles()):
            save(run, checkpointer, 3)
    except CheckpointError as error:
        return error
    return None


def names_what_failed(folder, text):
    """Say whether a message names the checkpoint that is not there, or the folder that takes
    none.
    """
    a_save = f"cannot save {folder / 'CKPT+'}"
    a_removal = f"cannot remove {folder / 'CKPT+'}"
    any_save = (
        f"cannot save or delete a checkpoint in {folder}, because its lock {folder / '.lock'} "
        "cannot be taken: "
    )
    return any(words in text for words in (a_save, a_removal, any_save))


def check(folder, plan, error):
    """Nothing that was there is lost, what is half done is gone, and the next save works."""
    where = f"error {plan.number} at point {plan.at}, {plan.points[plan.at - 1]}"
    found = steps_of(folder)
    # In the end it deletes the oldest, which is where a wish of the caller may fail after the save.
    allowed = (
        [{2, 3}, {1, 2, 3}]
        if error is None or "cannot remove" in str(error)
        else [{1, 2}, {1, 2, 3}]
    )
    assert set(found) in allowed, f"{where}: {found} after {error}"
    assert recovered(folder) == max(found), where
    assert [name for name in leftovers(folder) if name.startswith(".tmp-")] in (
        [],
        [".tmp-0123"],
    ), where
    if error is not None:
        assert WORDS[plan.number] in str(error).lower(), f"{where}: {error}"
        assert names_what_failed(folder, str(error)), f"{where}: {error}"
        assert error.__cause__.errno == plan.number, f"{where}: {error}"
    run = Run()
    save(run, run.checkpointer(folder), 9, num_to_keep=1)
    assert [name for name in names(folder) if not name.startswith("CKPT+")] == [], where
    assert steps_of(folder) == [9], where


@pytest.fixture(autouse=True)
def quick():
    with without_waiting():
        yield


@pytest.fixture
def template(tmp_path):
    """Two checkpoints, and what a killed save has left."""
    folder = tmp_path / "template"
    run = Run()
    checkpointer = run.checkpointer(folder)
    for step in (1, 2):
        save(run, checkpointer, step)
    (folder / ".tmp-0123").mkdir()
    (folder / ".tmp-0123" / "half").write_text("x")
    return folder


# Whatever the error, it goes the same way; a full disk is one that stays.
@pytest.mark.in_each_check(3)
@pytest.mark.parametrize(
    ("number", "mode"),
    [
        (errno.ENOSPC, "sync"),
        (errno.ENOSPC, "async"),
        (errno.EDQUOT, "sync"),
        (errno.EIO, "async"),
        (errno.EROFS, "sync"),
        (errno.EACCES, "async"),
    ],
    ids=lambda one: errno.errorcode.get(one, one),
)
def test_an_error_at_any_operation(template, tmp_path, number, mode):
    outcomes = []
    for at in count(1):
        trial = tmp_path / "trial"
        shutil.copytree(template, trial, symlinks=True)
        plan = Failing(at, number, stays=number == errno.ENOSPC)
        error = fail_once(trial, mode, plan)
        if len(plan.points) < at:
            break
        check(trial, plan, error)
        outcomes.append(error is None)
        shutil.rmtree(trial)
    assert len(outcomes) > 30
    assert sum(outcomes) < 8  # removing leftovers may fail without a word


def test_a_full_disk_says_how_much_is_needed_and_was_free(template):
    for mode in MODES:
        error = str(fail_once(template, mode, Failing(20, errno.ENOSPC, stays=True)))
        needed, free = (int(number) for number in re.findall(r"(\d+) bytes (?:needed|free)", error))
        # a model and Adam's two moments, of a kilobyte each, and what is around them
        assert 3_000 < needed < 100_000
        assert free > 100_000


# ------------------------------------------------------------------------------ what to do about it


@pytest.mark.parametrize("mode", MODES)
def test_training_goes_on_with_a_warning_where_that_is_asked_for(template, tmp_path, mode):
    warned_of = 0
    for at in count(1):
        trial = tmp_path / "trial"
        shutil.copytree(template, trial, symlinks=True)
        plan = Failing(at, errno.ENOSPC, stays=True)
        with Warnings() as warned:
            assert fail_once(trial, mode, plan, "warn") is None
        if len(plan.points) < at:
            break
        assert len(warned.texts) <= 1, warned.texts
        assert all("no space left" in text.lower() for text in warned.texts)
        assert warned.texts or recovered(trial) == 3, f"point {at}: it neither saved nor said so"
        warned_of += len(warned.texts)
        assert recovered(trial) in {2, 3}
        shutil.rmtree(trial)
    assert warned_of > 25


def save_with_an_error_on_main(folder, mode, on_error, held, where):
    """Save three times on every rank; the second time an operation of the main process fails."""
    run = Run()
    checkpointer = run.checkpointer(folder, mode)
    checkpointer.on_error = on_error
    with checkpointer.hold_folder() if held else contextlib.nullcontext():  # as a fit does
        outcome = fail_on_main(run, checkpointer, where)
    ddp_barrier()
    return *outcome, run.step(), [name for name in names(folder) if not name.startswith("CKPT+")]


def fail_on_main(run, checkpointer, where):
    save(run, checkpointer, 1)
    plan = Failing(None, errno.ENOSPC)
    reach = plan.reach

    def fail_there(point):
        reach(point)
        if point == where and if_main_process():
            plan.fail()

    plan.reach = fail_there
    error = None
    with watched(plan, CrashingFiles()), Warnings() as warned:
        try:
            save(run, checkpointer, 2)
        except CheckpointError as raised:
            error = str(raised)
    ddp_barrier()
    between = checkpointer.find_checkpoint().meta["step"]
    save(run, checkpointer, 3)
    found = checkpointer.recover_if_possible().meta["step"]
    return error, len(warned.texts), between, found


@pytest.mark.parametrize(
    "where",
    ["before make_directory", "half of a text", "before sync_file", ("before rename")],
)
@pytest.mark.parametrize("on_error", ["stop", "warn"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("held", [True, False], ids=["held", "in the lock"])
def test_all_ranks_do_the_same_about_an_error(ranks, tmp_path, held, mode, on_error, where):
    outcomes = ranks.run(save_with_an_error_on_main, tmp_path, mode, on_error, held, where)
    for rank, (error, warnings, *rest) in enumerate(outcomes):
        assert rest == [1, 3, 3, []]
        if on_error == "stop":
            assert "no space left" in error
            assert names_what_failed(tmp_path, error), error
            assert ("its lock" in error) == (not held and where == "before sync_file")
            assert warnings == 0
        else:
            assert error is None
            assert warnings == (rank == 0), "main says so, once"


def take_with_an_error(folder, mode, on_error, plan):
    """Hold the folder with an error while the lock is taken or given back, and save meanwhile;
    return the error.
    """
    run = Run()
    checkpointer = run.checkpointer(folder, mode)
    checkpointer.on_error = on_error
    with contextlib.ExitStack() as stack:
        try:
            with watched(plan, CrashingFiles()):
                stack.enter_context(checkpointer.hold_folder())
        except CheckpointError as error:
            return error
        save(run, checkpointer, 3)
        with watched(plan, CrashingFiles()):
            stack.close()
    return None


@pytest.mark.parametrize("on_error", ["stop", "warn"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", WORDS, ids=lambda number: errno.errorcode[number])
def test_an_error_while_a_fit_takes_the_folder_or_gives_it_back(
    template,
    tmp_path,
    number,
    mode,
    on_error,
):
    outcomes = []
    for at in count(1):
        trial = tmp_path / "trial"
        shutil.copytree(template, trial, symlinks=True)
        plan = Failing(at, number)
        with Warnings() as warned:
            error = take_with_an_error(trial, mode, on_error, plan)
        if len(plan.points) < at:
            break
        where = f"error {number} at point {at}, {plan.points[at - 1]}"
        told = [text for text in warned.texts if WORDS[number] in text.lower()]
        if on_error == "warn":
            assert error is None, where
            assert len(told) <= 1, where
            assert all("Training goes on." in text for text in told), where
        else:
            assert told == [], where
        for text in told if error is None else [str(error)]:
            assert WORDS[number] in text.lower(), where
            assert names_what_failed(trial, text), f"{where}: {text}"
            assert " lock " in text, where
        # with a warning, the save has taken the lock itself
        assert recovered(trial) == (2 if error else 3), where
        outcomes.append(bool(error or told))
        save(Run(), Run().checkpointer(trial), 9, num_to_keep=1)
        assert [name for name in names(trial) if not name.startswith("CKPT+")] == [], where
        shutil.rmtree(trial)
    assert sum(outcomes) >= 3
    assert not all(outcomes), (
        "giving it back fails without a word: a file that nobody has locked is left"
    )


def test_a_lock_that_could_not_be_taken_takes_none_from_a_save_in_the_background(tmp_path):
    run = Run()
    checkpointer = run.checkpointer(tmp_path, "async")
    checkpointer.on_error = "warn"
    with (
        Warnings() as warned,
        watched(Failing(1, errno.ENOSPC), CrashingFiles()),
        checkpointer.hold_folder(),
    ):
        checkpointer.save_checkpoint(meta={"step": 1})
    checkpointer.wait()
    assert len(warned.texts) == 1, warned.texts
    assert checkpointer.find_checkpoint().meta["step"] == 1
    assert names(tmp_path) == [checkpointer.find_checkpoint().path.name]


# ---------------------------------------------------------------------------------------- real ones


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a quarter of a megabyte; only root can make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_disk_that_is_really_full(small_disk, mode):
    run = Run(width=100)
    checkpointer = run.checkpointer(small_disk / "save", mode)
    save(run, checkpointer, 1)
    before = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="no space left") as raised:
        save(run, checkpointer, 2)
    assert raised.value.__cause__.errno == errno.ENOSPC
    assert {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()} == before
    checkpointer.delete_checkpoints(num_to_keep=0)
    save(run, checkpointer, 3)
    assert checkpointer.recover_if_possible().meta["step"] == run.step() == 3


def test_a_disk_that_is_read_only(small_disk):
    run = Run()
    checkpointer = run.checkpointer(small_disk / "save")
    save(run, checkpointer, 1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system") as raised:
        save(run, checkpointer, 2)
    assert raised.value.__cause__.errno == errno.EROFS
    assert recovered(small_disk / "save") == 1


def save_with_a_limit(folder):
    """A process whose files may have ten thousand bytes fails to save; it says how, and what is
    there then.
    """
    run = Run(width=100)
    checkpointer = run.checkpointer(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    try:
        save(run, checkpointer, 2)
    except CheckpointError as error:
        return str(error), error.__cause__.errno, names(folder)
    return None


def test_a_file_that_may_not_grow(zygote, tmp_path):
    run = Run(width=100)
    save(run, run.checkpointer(tmp_path), 1)
    before = names(tmp_path)
    message, number, after = zygote(save_with_a_limit, tmp_path)
    assert number == errno.EFBIG
    assert "File too large" in message
    assert str(tmp_path / "CKPT+") in message
    assert after == before


def save_without_a_right(folder):
    obey_permissions()
    run = Run()
    checkpointer = run.checkpointer(folder)
    try:
        save(run, checkpointer, 2)
    except CheckpointError as error:
        return str(error), error.__cause__.errno, recovered(folder), names(folder)
    return None


def test_a_folder_without_the_right_to_write(zygote):
    with new_folder() as folder:
        run = Run()
        save(run, run.checkpointer(folder), 1)
        before = names(folder)
        folder.chmod(0o500)
        message, number, step, after = zygote(save_without_a_right, folder)
    assert number == errno.EACCES
    assert f"Permission denied: '{folder}" in message
    assert step == 1
    assert after == before


def test_a_folder_that_has_gone(tmp_path):
    run = Run()
    checkpointer = run.checkpointer(tmp_path / "save")
    save(run, checkpointer, 1)
    shutil.rmtree(tmp_path / "save")
    with pytest.raises(
        CheckpointError,
        match="in .*save, because its lock .* cannot be taken: .*No such file",
    ):
        save(run, checkpointer, 2)
