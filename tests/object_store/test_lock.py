"""The lock of a folder of a store: one run at a time, and no killed run keeps it."""

from __future__ import annotations

import dataclasses
import json
import uuid

import pytest

from ddpkit.errors import CheckpointError, FolderInUseError
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
