"""The lock of a folder, within one process; with real processes in
tests/faults/test_run_lock.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading

import pytest

from ddpkit.checkpointing import storage
from ddpkit.checkpointing.storage import LOCK_NAME, FolderLock
from ddpkit.errors import CheckpointError, FolderInUseError


@pytest.fixture
def lock(tmp_path):
    lock = FolderLock(tmp_path)
    yield lock
    while lock.held:
        lock.release()


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(storage, "GRACE_SECONDS", 0.1)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fail(number):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


def test_it_is_there_while_held_and_gone_afterwards(tmp_path, lock):
    assert not lock.held
    with lock.hold():
        assert lock.held
        assert names(tmp_path) == [LOCK_NAME]
        assert (tmp_path / LOCK_NAME).read_text().startswith(f"process {os.getpid()} on ")
    assert not lock.held
    assert names(tmp_path) == []


def test_it_is_released_when_the_block_raises(tmp_path, lock):
    with pytest.raises(ZeroDivisionError), lock.hold():
        raise ZeroDivisionError
    assert names(tmp_path) == []


def test_locks_of_one_folder_share_it_within_a_process(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    first = FolderLock(tmp_path / "real")
    second = FolderLock(f"{tmp_path}/link")
    with first.hold():
        text = (tmp_path / "real" / LOCK_NAME).read_text()
        with second.hold(), second.hold(), first.hold():
            second.require()
        assert (tmp_path / "real" / LOCK_NAME).read_text() == text
        first.require()
        with pytest.raises(CheckpointError, match="not held: acquire it first"):
            second.require()
    assert names(tmp_path / "real") == []


def test_locks_of_two_names_in_one_folder_are_two(tmp_path, lock):
    with lock.hold(), FolderLock(tmp_path, "other").hold():
        assert names(tmp_path) == [LOCK_NAME, "other"]


def test_release_without_acquire_does_nothing(tmp_path, lock):
    other = FolderLock(tmp_path)
    with lock.hold():
        other.release()
        lock.require()
    lock.release()


def test_threads_that_take_it_together_share_it(tmp_path):
    inside = []
    everybody = threading.Barrier(6)

    def take():
        everybody.wait()
        with FolderLock(tmp_path).hold():
            everybody.wait()
            inside.append((tmp_path / LOCK_NAME).read_text())
            everybody.wait()

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(inside) == 6
    assert len(set(inside)) == 1
    assert names(tmp_path) == []


def test_a_relative_folder_is_the_same_wherever_the_working_directory_is(tmp_path, monkeypatch):
    (tmp_path / "save").mkdir()
    monkeypatch.chdir(tmp_path)
    lock = FolderLock("save")
    assert lock.folder == tmp_path / "save"
    with lock.hold():
        monkeypatch.chdir("/")
        lock.require()
        monkeypatch.chdir(tmp_path)
    assert names(tmp_path / "save") == []


# ------------------------------------------------------------------------------------ what is there


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"process 1 on elsewhere, since then UTC\n"])
def test_a_file_that_a_killed_run_has_left_is_in_nobodys_way(tmp_path, lock, content):
    (tmp_path / LOCK_NAME).write_bytes(content)
    with lock.hold():
        lock.require()
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"process 7 on elsewhere, since 2026 UTC\n12\n", "process 7 on elsewhere, since 2026 UTC"),
        (b"\x1b[31mred\n", "an unknown process"),
        (b"\xff\0" * 1000, "an unknown process"),
        (b"", "an unknown process"),
    ],
)
def test_who_has_it_is_named(tmp_path, lock, content, words):
    (tmp_path / LOCK_NAME).write_bytes(content)
    with (tmp_path / LOCK_NAME).open() as file:  # another open file is as another process
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(
            FolderInUseError,
            match=f"{tmp_path} is in use by another run: {words}. Wait for it, end",
        ):
            lock.acquire()
    assert not lock.held
    assert (tmp_path / LOCK_NAME).read_bytes() == content


# ---------------------------------------------------------------------------------------- losing it


def lose(folder, how):
    path = folder / LOCK_NAME
    if how == "taken":
        path.write_text("process 7 on elsewhere, since 2026 UTC\n12\n")
        return
    path.unlink()
    if how == "folder":
        folder.rmdir()
    if how == "made anew":
        path.write_text("process 7 on elsewhere, since 2026 UTC\n12\n")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("removed", "the lock file is missing"),
        ("folder", "the lock file is missing"),
        ("taken", "the lock file is missing or belongs to process 7 on elsewhere"),
        ("made anew", "the lock file is missing or belongs to process 7 on elsewhere"),
    ],
)
def test_a_lost_lock_is_noticed_before_anything_is_touched(tmp_path, how, words):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    if how != "folder":
        (folder / "CKPT+old").mkdir()
    lock = FolderLock(folder)
    lock.acquire()
    lose(folder, how)
    for act in (lock.require, lock.acquire, *([] if how == "folder" else [lock.clean])):
        with pytest.raises(FolderInUseError, match=words):
            act()
    lock.release()
    assert not lock.held
    if how != "folder":
        assert "CKPT+old" in names(folder)
    if how in {"taken", "made anew"}:
        assert LOCK_NAME in names(folder), "a late release leaves the new owner's lock alone"


# ----------------------------------------------------------------------------------- under the lock


def test_clean_removes_leftovers_and_puts_back_what_was_being_replaced(tmp_path, lock):
    with lock.hold():
        for name in (".tmp-1", ".trash-2", ".trash-of-CKPT+one", "CKPT+two", ".trash-of-CKPT+two"):
            (tmp_path / name).mkdir()
        (tmp_path / ".tmp-notes").touch()
        lock.clean()
    assert names(tmp_path) == [".tmp-notes", "CKPT+one", "CKPT+two"]


# -------------------------------------------------------------------------------- no lock to be had


@pytest.mark.parametrize("number", storage.CANNOT_LOCK, ids=errno.errorcode.get)
def test_where_nothing_can_be_locked_a_run_warns_once_and_the_last_one_has_the_folder(
    tmp_path,
    lock,
    monkeypatch,
    caplog,
    number,
):
    monkeypatch.setattr(fcntl, "flock", fail(number))
    (tmp_path / LOCK_NAME).write_text("process 7 on elsewhere, since 2026 UTC\n12\n")
    for _ in range(2):
        with lock.hold():
            lock.require()
    assert caplog.messages == [f"{tmp_path} cannot be locked here: nothing stops a second run."]
    lock.acquire()
    lose(tmp_path, "taken")
    with pytest.raises(FolderInUseError, match="the lock file is missing or belongs to process 7"):
        lock.require()


@pytest.mark.parametrize("operation", ["open", "write", "sync_file"])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EROFS, "Read-only file system"),
        (errno.EIO, ("Input/output error")),
    ],
)
def test_a_folder_that_takes_no_lock_says_why(
    tmp_path,
    lock,
    monkeypatch,
    operation,
    number,
    words,
):
    with monkeypatch.context() as broken:
        broken.setattr(os if operation == "open" else storage.FILES, operation, fail(number))
        with pytest.raises(CheckpointError, match=words) as refused:
            lock.acquire()
    assert f"because its lock {tmp_path / LOCK_NAME} cannot be taken" in str(refused.value)
    assert refused.value.__cause__.errno == number
    sentences = str(refused.value).split(". ")
    remedy = "Or give another folder" if number == errno.ENOSPC else "Give another folder"
    assert any(sentence.startswith(remedy) for sentence in sentences)
    assert names(tmp_path) == []
    assert not lock.held
    with lock.hold():
        lock.require()


def test_a_folder_that_is_not_there_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="No such file or directory"):
        FolderLock(tmp_path / "missing").acquire()
