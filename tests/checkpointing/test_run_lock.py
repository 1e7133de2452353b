"""The lock of a folder, within one process; with real processes in tests/faults/test_run_lock.py."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ddpkit.base import state_and_start
from ddpkit.base.process_probe import is_killed
from ddpkit.checkpointing import run_lock, storage
from ddpkit.checkpointing.run_lock import LOCK_NAME, FolderLock, holder
from ddpkit.checkpointing.storage import FileOperations
from ddpkit.errors import CheckpointError
from tests.launching import PATIENCE, soon, wait_until

RENEWAL = 0.05  # seconds: a lease is 0.15 s


@pytest.fixture
def lock(tmp_path):
    lock = FolderLock(tmp_path, renewal_seconds=RENEWAL)
    yield lock
    while lock.held:
        lock.release()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def renewers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("lock of")]


def put(folder, record, token="0123"):
    """Lay a lock into a folder as its owner does."""
    (folder / LOCK_NAME).mkdir(exist_ok=True)
    text = record if isinstance(record, bytes) else json.dumps(asdict(record)).encode()
    (folder / LOCK_NAME / token).write_bytes(text)


class Renewing:
    """Another host's owner, which renews so many times, or until nobody watches any more."""

    def __init__(self, path, times=10**6):
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.renew, args=(path, times))

    def renew(self, path, times):
        for _ in range(times):
            if self.done.wait(RENEWAL):
                return
            os.utime(path)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()


def ours(**changes):
    return replace(run_lock._own_record("0123"), **changes)


def test_it_is_there_while_held_and_gone_afterwards(tmp_path, lock):
    assert not lock.held
    assert holder(tmp_path) is None
    with lock.hold():
        assert lock.held
        assert names(tmp_path) == [LOCK_NAME]
        assert len(renewers()) == 1
        found = holder(tmp_path)
        assert (found.pid, found.is_here(), found.has_ended()) == (os.getpid(), True, False)
        assert f"process {os.getpid()} on " in str(found)
    assert not lock.held
    assert names(tmp_path) == []
    assert renewers() == []


def test_it_is_released_when_the_block_raises(tmp_path, lock):
    with pytest.raises(ZeroDivisionError), lock.hold():
        raise ZeroDivisionError
    assert names(tmp_path) == []


def test_locks_of_one_folder_share_it_within_a_process(tmp_path, lock):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    first, second = FolderLock(tmp_path / "real"), FolderLock(f"{tmp_path}/link")
    with first.hold():
        token = holder(tmp_path / "real").token
        with second.hold(), second.hold(), first.hold():
            assert holder(tmp_path / "link").token == token
            assert len(renewers()) == 1
            second.require()
        first.require()
        with pytest.raises(CheckpointError, match="not held: acquire it first"):
            second.require()
    assert names(tmp_path / "real") == []


def test_release_without_acquire_does_nothing(tmp_path, lock):
    other = FolderLock(tmp_path)
    with lock.hold():
        other.release()
        lock.require()
    lock.release()


def test_threads_that_take_it_together_share_it(tmp_path):
    inside, errors = [], []
    everybody = threading.Barrier(6)

    def take():
        try:
            everybody.wait()
            with FolderLock(tmp_path).hold():
                everybody.wait()
                inside.append(holder(tmp_path).token)
                everybody.wait()
        except BaseException as error:  # noqa: BLE001 -- shown below
            errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(inside) == 6
    assert len(set(inside)) == 1
    assert names(tmp_path) == []


def test_a_forked_child_holds_nothing_and_takes_nothing_away(tmp_path, lock):
    with lock.hold():
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of forking a process with threads
            pid = os.fork()
        if pid == 0:
            said = [str(lock.held)]
            for call in (lock.require, lock.acquire):
                try:
                    call()
                    said.append("nothing")
                except CheckpointError as error:
                    said.append(str(error))
            lock.release()
            os.write(writer, json.dumps(said).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        held, required, acquired = json.loads(os.read(reader, 10000))
        os.close(reader)
        os.close(writer)
        lock.require()
    assert held == "False"
    assert f"held by process {os.getpid()}, not by this child" in required
    assert f"in use by another run: process {os.getpid()}" in acquired


# ------------------------------------------------------------------------------------------------ what is there


@pytest.mark.parametrize(
    "changes",
    [{"pid": 2**22 + 5}, {"pid": 2**40}, {"pid": 1, "process_started": 10**15}, {"process_started": 1}, {}],
    ids=["gone", "absurd", "another's number", "own number, older", "own number, after exec"],
)
def test_the_lock_of_a_dead_process_of_this_host_is_taken_over_at_once(tmp_path, caplog, changes):
    dead = ours(**changes)
    put(tmp_path, dead)
    assert holder(tmp_path).has_ended()
    start = time.monotonic()
    with caplog.at_level(logging.INFO), FolderLock(tmp_path).hold():
        assert soon(start, 2)
        assert len(names(tmp_path / LOCK_NAME)) == 1
    assert [record.getMessage() for record in caplog.records if "taking over" in record.getMessage()] == [
        f"{tmp_path}: taking over the lock of {dead}, which has ended."
    ]


def test_a_run_whose_locks_are_taken_over_in_two_folders_is_told_once(tmp_path, caplog):
    folders = [tmp_path / "experiment", tmp_path / "save"]
    for folder in folders:
        folder.mkdir()
        put(folder, ours(pid=2**22 + 6))
        with FolderLock(folder).hold():
            pass
    [told] = [one for one in caplog.messages if "taking over" in one]
    assert told.startswith(f"{folders[0]}: ")


def test_a_live_process_of_this_host_is_named(tmp_path, lock):
    started = state_and_start(1)[1]
    put(tmp_path, ours(pid=1, process_started=started))
    with pytest.raises(CheckpointError, match=r"process 1 on .*it is alive.*end it \(kill 1\)") as refused:
        lock.acquire()
    assert "remove" not in str(refused.value), "the lock of a run that lives must stay"
    assert str(tmp_path) in str(refused.value)
    assert not lock.held
    assert names(tmp_path / LOCK_NAME) == ["0123"]
    assert names(tmp_path) == [LOCK_NAME]


def test_a_live_process_of_this_host_is_refused_long_before_a_renewal(tmp_path):
    put(tmp_path, ours(pid=1, process_started=state_and_start(1)[1]))
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="it is alive"):
        FolderLock(tmp_path, renewal_seconds=30).acquire()
    assert time.monotonic() - start >= 2
    assert soon(start, 4)


@pytest.mark.parametrize(
    ("status", "killed"),
    [
        ("SigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n", True),
        ("SigPnd:\t0000000000000000\nShdPnd:\t0000000000000102\n", True),
        ("SigPnd:\t0000000000000080\nShdPnd:\t0000000000004200\nSigBlk:\t0000000000000100\n", False),
        ("", False),
    ],
)
def test_a_process_that_was_killed_is_known_by_its_pending_signals(status, killed):
    assert is_killed(status) is killed


AWAY = [{"host": "elsewhere"}, {"boot_id": "another"}, {"pid_namespace": "pid:[1]"}]


@pytest.mark.parametrize("away", AWAY, ids=["host", "boot", "namespace"])
def test_the_lock_of_another_place_is_taken_over_after_a_lease(tmp_path, lock, away):
    put(tmp_path, ours(**away, pid=1))
    start = time.monotonic()
    with lock.hold():
        assert time.monotonic() - start >= 3 * RENEWAL
        assert holder(tmp_path).pid == os.getpid()


def test_one_that_renews_once_more_and_dies_is_taken_over(tmp_path, lock):
    put(tmp_path, ours(host="elsewhere"))
    with Renewing(tmp_path / LOCK_NAME / "0123", 1), lock.hold():
        pass
    assert names(tmp_path) == []


def test_one_that_goes_on_renewing_is_not(tmp_path):
    put(tmp_path, ours(host="elsewhere"))
    slow = FolderLock(tmp_path, renewal_seconds=10 * RENEWAL)
    refusal = pytest.raises(CheckpointError, match="on elsewhere .*renewed while this process watched")
    with Renewing(tmp_path / LOCK_NAME / "0123"), refusal:
        slow.acquire()


BAD_RECORDS = {
    "empty": b"",
    "zeros": b"\0" * 100,
    "no JSON": b"{",
    "no record": b"[1]\n",
    "deep": b"[" * 4000,
    "wrong type": json.dumps(asdict(ours()) | {"pid": "7"}).encode(),
    "wrong number": json.dumps(asdict(ours()) | {"pid": -1}).encode(),
    "escapes": json.dumps(asdict(ours()) | {"host": "\x1b[31m"}).encode(),
    "not text": b"\xff\xfe\n",
}


@pytest.mark.parametrize("record", BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_a_damaged_lock_is_watched_and_taken_over(tmp_path, lock, record):
    put(tmp_path, record)
    assert str(holder(tmp_path)) == "somebody whose lock cannot be read"
    assert not holder(tmp_path).has_ended()
    start = time.monotonic()
    with lock.hold():
        assert time.monotonic() - start >= 3 * RENEWAL
    assert names(tmp_path) == []


def test_a_plain_file_of_its_name_is_watched_and_replaced(tmp_path, lock):
    (tmp_path / LOCK_NAME).write_text("somebody else's idea of a lock")
    with lock.hold():
        lock.require()
    assert names(tmp_path) == []


def test_an_empty_lock_directory_is_free(tmp_path):
    (tmp_path / LOCK_NAME).mkdir()
    with FolderLock(tmp_path).hold():
        assert len(names(tmp_path / LOCK_NAME)) == 1


# ------------------------------------------------------------------------------------------------ keeping and losing


def test_it_is_renewed_while_it_is_held(tmp_path, lock):
    with lock.hold():
        (path,) = (tmp_path / LOCK_NAME).iterdir()
        before = path.stat().st_mtime_ns
        assert wait_until(lambda: path.stat().st_mtime_ns > before, PATIENCE)


def test_a_relative_folder_is_renewed_wherever_the_working_directory_is(tmp_path, monkeypatch):
    (tmp_path / "save").mkdir()
    monkeypatch.chdir(tmp_path)
    lock = FolderLock("save", renewal_seconds=RENEWAL)
    assert lock.folder == tmp_path / "save"
    with lock.hold():
        monkeypatch.chdir("/")
        (path,) = (tmp_path / "save" / LOCK_NAME).iterdir()
        before = path.stat().st_mtime_ns
        assert wait_until(lambda: path.stat().st_mtime_ns > before, PATIENCE)
        lock.require()
        monkeypatch.chdir(tmp_path)
        lock.require()
    assert names(tmp_path / "save") == []


def lose(folder, how):
    (path,) = (folder / LOCK_NAME).iterdir()
    path.unlink()
    if how == "folder":
        path.parent.rmdir()
        folder.rmdir()
    if how == "taken":
        put(folder, ours(host="elsewhere", pid=7))


@pytest.mark.parametrize(
    ("how", "words"), [("removed", "its lock is gone"), ("folder", "its lock is gone"), ("taken", "taken over by pro")]
)
def test_a_lost_lock_is_noticed_before_anything_is_touched(tmp_path, how, words):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "CKPT+old").mkdir()
    lock = FolderLock(folder)
    lock.acquire()
    if how == "folder":
        (folder / "CKPT+old").rmdir()
    lose(folder, how)
    for act in (lock.require, lock.clean, lambda: lock.remove(folder / "CKPT+old"), lock.acquire):
        with pytest.raises(CheckpointError, match=words):
            act()
    lock.release()
    assert not lock.held
    if how != "folder":
        assert "CKPT+old" in names(folder)
    if how == "taken":
        assert holder(folder).pid == 7, "a late release leaves the new owner's lock alone"


def test_a_lost_lock_is_told_once_and_its_renewal_ends(tmp_path, lock, caplog):
    lock.acquire()
    lose(tmp_path, "taken")
    time.sleep(5 * RENEWAL)
    assert renewers() == []
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 1
    assert "taken over by process 7 on elsewhere" in told[0]


def test_a_lock_that_cannot_be_looked_at_is_not_taken_for_lost(tmp_path, lock, monkeypatch):
    lock.acquire()
    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(CheckpointError, match="cannot look at the lock .*Input/output error"):
            lock.require()
    lock.require()


# ------------------------------------------------------------------------------------------------ under the lock


def test_taking_it_moves_half_made_checkpoints_away(tmp_path, lock):
    staging = storage.make_staging(tmp_path / "CKPT+one")
    with lock.hold():
        with pytest.raises(CheckpointError):
            storage.commit_staging(staging, tmp_path / "CKPT+one")
        own = storage.make_staging(tmp_path / "CKPT+two")
        with lock.hold():
            storage.commit_staging(own, tmp_path / "CKPT+two")
    assert names(tmp_path) == ["CKPT+two"]


def test_a_half_made_checkpoint_that_resists_is_no_success(tmp_path, lock, monkeypatch):
    storage.make_staging(tmp_path / "CKPT+one")

    class Stubborn(FileOperations):
        def rename(self, source, target):
            if target.name != LOCK_NAME:
                raise PermissionError(errno.EACCES, "Permission denied")
            super().rename(source, target)

    monkeypatch.setattr(storage, "FILES", Stubborn())
    with pytest.raises(CheckpointError, match="Permission denied"):
        lock.acquire()
    assert not lock.held
    assert LOCK_NAME not in names(tmp_path)
    assert renewers() == []


def test_clean_removes_leftovers_and_puts_back_what_was_being_replaced(tmp_path, lock):
    with lock.hold():
        for name in (".tmp-1", ".trash-2", ".trash-of-CKPT+one", "CKPT+two", ".trash-of-CKPT+two"):
            (tmp_path / name).mkdir()
        (tmp_path / ".tmp-notes").touch()
        lock.clean()
    assert names(tmp_path) == [".tmp-notes", "CKPT+one", "CKPT+two"]


def test_remove(tmp_path, lock):
    (tmp_path / "CKPT+one").mkdir()
    with lock.hold():
        lock.remove(tmp_path / "CKPT+one")
        lock.remove(tmp_path / "CKPT+one")
    assert names(tmp_path) == []


def test_remove_is_not_stopped_by_what_a_save_has_replaced_that_died_right_after(tmp_path, lock):
    for name in ("CKPT+one", ".trash-of-CKPT+one"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").touch()
    with lock.hold():
        lock.remove(tmp_path / "CKPT+one")
    assert names(tmp_path) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_lock_that_may_not_be_looked_into_is_told_at_once(tmp_path, lock):
    put(tmp_path, ours(host="elsewhere"))
    (tmp_path / LOCK_NAME).chmod(0o700)
    for parent in (tmp_path, *[path for path in tmp_path.parents if "pytest" in path.name]):
        parent.chmod(0o777)
    start = time.monotonic()
    os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match="another user's, and this one may not look into it"):
            lock.acquire()
    finally:
        os.seteuid(0)
    assert soon(start, RENEWAL)
    assert names(tmp_path / LOCK_NAME) == ["0123"]


def test_remove_puts_back_what_turns_out_to_be_another_runs(tmp_path, lock, monkeypatch):
    (tmp_path / "CKPT+one").mkdir()

    class LosesItMeanwhile(FileOperations):
        def rename(self, source, target):
            if source.name == "CKPT+one":
                lose(tmp_path, "taken")
            super().rename(source, target)

    lock.acquire()
    monkeypatch.setattr(storage, "FILES", LosesItMeanwhile())
    with pytest.raises(CheckpointError, match="taken over"):
        lock.remove(tmp_path / "CKPT+one")
    assert names(tmp_path) == [LOCK_NAME, "CKPT+one"]


# ------------------------------------------------------------------------------------------------ no lock to be had


@pytest.mark.parametrize("operation", ["make_directory", "write", "sync_file", "rename"])
@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "no space left"), (errno.EROFS, "must be writable"), (errno.EIO, "Input/output error")],
)
def test_a_folder_that_takes_no_lock_says_why(tmp_path, lock, monkeypatch, operation, number, words):
    class Broken(FileOperations):
        pass

    def fail(*_):
        raise OSError(number, os.strerror(number))

    setattr(Broken, operation, staticmethod(fail))
    monkeypatch.setattr(storage, "FILES", Broken())
    with pytest.raises(CheckpointError, match=words) as refused:
        lock.acquire()
    assert str(tmp_path / LOCK_NAME) in str(refused.value)
    assert refused.value.__cause__.errno == number
    assert names(tmp_path) == []
    assert not lock.held


def test_a_folder_that_is_not_there_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"missing does not exist"):
        FolderLock(tmp_path / "missing").acquire()
    assert holder(tmp_path / "missing") is None


def test_it_can_be_taken_again_after_it_could_not(tmp_path, lock, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(FileOperations, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(CheckpointError):
            lock.acquire()
    with lock.hold():
        lock.require()


def test_a_process_whose_numbers_mean_nothing_here_is_watched(monkeypatch):
    """In another namespace than that of /proc, or without /proc at all."""
    monkeypatch.setattr(run_lock, "this_place", lambda: ("host", "", ""))
    assert not run_lock._own_record("1").is_here()


def test_a_lock_that_appears_while_it_is_looked_for_is_found_at_the_next_look(tmp_path, monkeypatch):
    looks, is_dir = [], Path.is_dir

    def is_dir_but_not_yet(path):
        if path.name == LOCK_NAME and not looks:
            looks.append(path)
            path.mkdir()
            (path / "0123").write_bytes(b"")
            return False
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", is_dir_but_not_yet)
    assert holder(tmp_path) is None
    assert holder(tmp_path).pid == 0, "whose record cannot be read"
