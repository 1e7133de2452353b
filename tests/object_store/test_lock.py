"""The lock of a folder of a store: one run at a time, and no killed run keeps it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import uuid

import pytest

from ddpkit.errors import CheckpointError, FolderInUseError, ObjectStoreError
from ddpkit.object_store import Objects, StoreLock, lock as lock_module
from ddpkit.object_store.owner import this_process


@pytest.fixture
def url():
    return f"memory://locks/{uuid.uuid4().hex}"


@pytest.fixture
def objects(url):
    return Objects(url)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(lock_module, "LEASE_SECONDS", 0.3)
    monkeypatch.setattr(lock_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(lock_module, "GRACE_SECONDS", 0.1)


def record(**changes):
    """The record of a run of another machine."""
    other = dataclasses.replace(this_process(), host="elsewhere", space="another boot", **changes)
    return other, other.encoded()


def test_a_lock_is_an_object_for_as_long_as_it_is_held(url, objects):
    lock = StoreLock(url)
    with lock.hold():
        lock.require()
        assert lock.held
        assert lock.excludes
        assert json.loads(objects.read(".lock"))["pid"] == this_process().pid
    assert not lock.held
    assert objects.sizes() == {}


def test_locks_of_one_process_share_the_folder(url, objects):
    one, other = StoreLock(url), StoreLock(url + "/")
    one.acquire()
    other.acquire()
    one.release()
    other.require()
    other.release()
    assert objects.sizes() == {}


def test_without_the_lock_nothing_may_be_written(url):
    with pytest.raises(CheckpointError, match="is not held"):
        StoreLock(url).require()


def test_a_run_that_was_not_renewed_is_taken_over(url, objects, caplog):
    _, data = record()
    objects.write(".lock", data)
    lock = StoreLock(url)
    with lock.hold():
        lock.require()
        assert "which is gone: this run has taken it over" in caplog.text
    assert objects.sizes() == {}


def test_a_run_that_renews_is_left_alone(url, objects, monkeypatch):
    other, data = record()
    objects.write(".lock", data)
    beats = iter(range(1000))
    monkeypatch.setattr(
        lock_module.time,
        "sleep",
        lambda _: objects.write(f".lock.alive-{other.token}", str(next(beats)).encode()),
    )
    with pytest.raises(FolderInUseError, match="in use by another run: process .* on elsewhere"):
        StoreLock(url).acquire()
    assert objects.read(".lock") == data


def test_a_record_of_another_run_is_the_end_of_this_one(url, objects):
    lock = StoreLock(url)
    lock.acquire()
    _, data = record()
    objects.write(".lock", data)
    with pytest.raises(FolderInUseError, match="no longer locked by this run.*on elsewhere"):
        lock.require()
    lock.release()
    assert objects.read(".lock") == data


def test_of_several_that_wait_for_a_lock_that_was_left_one_has_it(url, objects):
    """Each in a process's place: the sharing within one is switched off."""
    other, data = record()
    objects.write(".lock", data)
    taken = []
    refused = []

    def take():
        try:
            taken.append(lock_module._take(Objects(url), ".lock"))
        except FolderInUseError:
            refused.append(True)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # they are one process, so that each may take over from the one before
    holders = [hold for hold in taken if lock_module._owner_of(objects, ".lock") == hold.owner]
    assert len(holders) == 1
    for hold in taken:
        if hold not in holders:
            with pytest.raises(FolderInUseError):
                hold.require()
    for hold in taken:
        hold.give_back()
    assert objects.sizes() == {}
    assert other.token not in str(objects.sizes())


def test_one_claim_at_a_time_replaces_a_record(objects):
    other, data = record()
    objects.write(".lock", data)
    objects.create(f".lock.after-{other.token}", record()[1])  # of one that is at it
    assert not lock_module._is_taken_over(objects, ".lock", other, this_process())
    assert objects.read(".lock") == data


def test_a_claim_whose_process_was_killed_is_not_waited_for_for_ever(url, objects):
    other, data = record()
    objects.write(".lock", data)
    objects.create(f".lock.after-{other.token}", record()[1])
    lock = StoreLock(url)
    with lock.hold():
        lock.require()
    assert objects.sizes() == {}


def test_a_record_that_was_replaced_meanwhile_is_not_replaced_again(objects):
    other, _ = record()
    successor, data = record()
    objects.write(".lock", data)
    assert not lock_module._is_taken_over(objects, ".lock", other, this_process())
    assert objects.read(".lock") == data
    assert list(objects.sizes()) == [".lock"]
    assert successor != other


def test_a_record_that_cannot_be_read_is_taken_over(url, objects):
    objects.write(".lock", b"{")
    with StoreLock(url).hold():
        assert json.loads(objects.read(".lock"))["host"] == this_process().host


def test_a_lock_that_could_not_be_given_back_is_this_process_s_again(url, objects, monkeypatch):
    lock = StoreLock(url)
    lock.acquire()
    with monkeypatch.context() as patched:
        patched.setattr(Objects, "delete", lambda *_: (_ for _ in ()).throw(ObjectStoreError("no")))
        lock.release()
    assert objects.size(".lock")
    with StoreLock(url).hold():
        pass
    assert not objects.size(".lock")


HOLD = """
import sys, time
from ddpkit.object_store import StoreLock

StoreLock(sys.argv[1]).acquire()
print("held", flush=True)
{then}
"""


def start(url, then="time.sleep(600)"):
    words = [sys.executable, "-c", HOLD.format(then=then), url]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.costly
def test_another_process_keeps_it_out_until_it_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "LEASE_SECONDS", 600.0)
    waits = lambda *_: pytest.fail("it waits for a process that is known to be gone")
    url = f"file://{tmp_path}/run"
    process = start(url)
    lock = StoreLock(url)
    try:
        with pytest.raises(FolderInUseError, match=f"in use by another run: process {process.pid}"):
            lock.acquire()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    monkeypatch.setattr(lock_module._Waiting, "is_over", waits)
    with lock.hold():
        lock.require()


@pytest.mark.costly
def test_a_process_that_exits_gives_it_back_and_a_forked_child_does_not(tmp_path):
    url = f"file://{tmp_path}/run"
    forks = """
import os
child = os.fork()
if not child:
    lock = StoreLock(sys.argv[1])
    assert not lock.held
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
StoreLock(sys.argv[1]).acquire()
print("still held", flush=True)
"""
    process = start(url, forks)
    assert process.stdout.read() == "still held\n"
    process.stdout.close()
    assert process.wait() == 0
    assert Objects(url).sizes() == {}


def test_a_renewal_that_fails_for_any_reason_is_tried_again(url, monkeypatch, caplog):
    monkeypatch.setattr(lock_module, "RENEWAL_SECONDS", 0.01)
    plain = lock_module._Hold.renew
    failed, renewed = threading.Event(), threading.Event()

    def renew(self):
        if threading.current_thread() is threading.main_thread():
            return plain(self)
        if not failed.is_set():
            failed.set()
            raise RuntimeError("cannot schedule new futures after shutdown")
        plain(self)
        renewed.set()
        return None

    monkeypatch.setattr(lock_module._Hold, "renew", renew)
    with StoreLock(url).hold():
        assert renewed.wait(30)
    assert "was not renewed: RuntimeError: cannot schedule new futures" in caplog.text


def test_a_lock_that_cannot_be_given_back_keeps_no_other(url, monkeypatch, caplog):
    first, second = StoreLock(f"{url}/a"), StoreLock(f"{url}/b")
    first.acquire()
    second.acquire()
    plain = lock_module._Hold.give_back

    def give_back(self):
        plain(self)
        if self.objects.url.endswith("/a"):
            raise RuntimeError("no more threads")

    monkeypatch.setattr(lock_module._Hold, "give_back", give_back)
    lock_module._give_all_back()
    assert not first.held
    assert not second.held
    assert Objects(url).sizes() == {}
    assert "was not given back: RuntimeError: no more threads" in caplog.text


def test_objects_that_stand_for_folders_are_not_listed(url, objects, monkeypatch):
    objects.write("a/log.txt", b"1")
    folder = objects._folder
    plain = type(objects._filesystem).find

    def find(self, path, **options):
        empty = {"size": 0, "type": "file"}
        names = [f"{folder}/", f"{folder}/a/", folder]  # as the console of S3 makes them
        return {**plain(self, path, **options), **dict.fromkeys(names, empty)}

    monkeypatch.setattr(type(objects._filesystem), "find", find)
    assert objects.sizes() == {"a/log.txt": 1}
