"""What another machine has of the checkpoint that rank 0 has chosen."""

from __future__ import annotations

import hashlib
import pickle
import threading

import pytest

from ddpkit.checkpointing import PLACES, REMOTES, ObjectFolder, fetch_on_each_machine, fetching
from ddpkit.checkpoints import Checkpointer
from ddpkit.errors import CheckpointError
from ddpkit.mirror import machine_copies, mirror_of
from ddpkit.mirror.machine_copies import MachineCopies
from tests.mirror.conftest import fsspec
from tests.mirror.test_checkpointer import Value

NAME = "CKPT+x"


@pytest.fixture
def machine(tmp_path):
    """The folder of another machine."""
    return tmp_path / "other"


def saved(store, value):
    """Save a checkpoint; return its directory, and the digest of its manifest."""
    checkpoint = Checkpointer(store, {"value": Value(value)}).save_checkpoint(name="x")
    return checkpoint.path, digest(checkpoint.path)


def digest(path):
    return hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()


def of_another_launch(monkeypatch):
    monkeypatch.setattr(machine_copies, "launch_name", lambda: "another launch")


def test_another_checkpoint_of_the_name_is_replaced(store, machine):
    _, before = saved(store, 1)
    copies = MachineCopies(ObjectFolder(store), machine)
    copies.have(NAME, before, "full")
    assert digest(machine / NAME) == before
    _, now = saved(store, 2)
    copies.have(NAME, now, "full")
    assert digest(machine / NAME) == now != before


def test_what_is_there_is_not_copied_again(store, machine, monkeypatch):
    _, wanted = saved(store, 1)
    MachineCopies(ObjectFolder(store), machine).have(NAME, wanted, "full")
    monkeypatch.setattr(ObjectFolder, "get", None)
    MachineCopies(ObjectFolder(store), machine).have(NAME, wanted, "full")
    of_another_launch(monkeypatch)
    MachineCopies(ObjectFolder(store), machine).have(NAME, wanted, "full")


def test_a_copy_of_an_earlier_launch_that_is_damaged_is_replaced(store, machine, monkeypatch):
    path, wanted = saved(store, 1)
    MachineCopies(ObjectFolder(store), machine).have(NAME, wanted, "full")
    (machine / NAME / "value.ckpt").write_bytes(b"x" * (path / "value.ckpt").stat().st_size)
    of_another_launch(monkeypatch)
    MachineCopies(ObjectFolder(store), machine).have(NAME, wanted, "full")
    assert (machine / NAME / "value.ckpt").read_bytes() == (path / "value.ckpt").read_bytes()


def test_what_an_earlier_launch_has_copied_is_removed(store, machine, monkeypatch):
    _, wanted = saved(store, 1)
    MachineCopies(ObjectFolder(store), machine).have(NAME, wanted, "full")
    other = Checkpointer(store, {"value": Value(2)}).save_checkpoint(name="y")
    (machine / "CKPT+of-the-user").mkdir()
    of_another_launch(monkeypatch)
    MachineCopies(ObjectFolder(store), machine).have("CKPT+y", digest(other.path), "full")
    assert sorted(path.name for path in machine.glob("CKPT*")) == ["CKPT+of-the-user", "CKPT+y"]


def test_a_checkpoint_that_is_on_its_way_is_waited_for(store, machine, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_copies, "FIRST_PAUSE_SECONDS", 0.01)
    checkpoint = Checkpointer(tmp_path / "disk", {"value": Value(1)}).save_checkpoint(name="x")
    copies = MachineCopies(ObjectFolder(store), machine)
    has_looked = threading.Event()
    plain = ObjectFolder.manifest_now

    def manifest_now(self, name):
        found = plain(self, name)
        has_looked.set()
        return found

    monkeypatch.setattr(ObjectFolder, "manifest_now", manifest_now)
    thread = threading.Thread(target=copies.have, args=(NAME, digest(checkpoint.path), "full"))
    thread.start()
    assert has_looked.wait(60)
    ObjectFolder(store).put(checkpoint.path)
    thread.join(60)
    assert digest(machine / NAME) == digest(checkpoint.path)


def test_what_does_not_come_is_named(store, machine, monkeypatch, caplog):
    monkeypatch.setattr(machine_copies, "WAIT_SECONDS", 0.1)
    saved(store, 1)
    copies = MachineCopies(ObjectFolder(store), machine)
    with pytest.raises(CheckpointError, match=r"CKPT\+x .* has not come into memory://"):
        copies.have(NAME, "0" * 64, "full")
    assert "has another one of this name, and rank 0 copies it there" in caplog.text


@pytest.mark.parametrize("before", [b"old", None])
def test_a_file_is_the_one_that_rank_0_reads(store, machine, before):
    fsspec.open(f"{store}/net.pt", "wb").open().write(b"new")
    if before is not None:
        machine.mkdir()
        (machine / "net.pt").write_bytes(before)
    copies = MachineCopies(ObjectFolder(store), machine)
    copies.have_file("net.pt", hashlib.sha256(b"new").hexdigest())
    assert (machine / "net.pt").read_bytes() == b"new"
    with pytest.raises(CheckpointError, match="does not have the net.pt that rank 0 reads"):
        copies.have_file("net.pt", "0" * 64)


def test_a_failure_names_the_rank_and_its_machine(store, monkeypatch):
    path, _ = saved(store, 1)
    chosen = fetching._Chosen(("elsewhere", "", ""), "/nowhere/CKPT+x", 0, "0" * 64)
    monkeypatch.setattr(machine_copies, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(fetching, "get_rank", lambda: 3)
    monkeypatch.setattr(fetching, "host_name", lambda: "host2")
    monkeypatch.setattr(fetching, "checkpoint_work_on_main", lambda *_: chosen)
    with pytest.raises(CheckpointError, match="^rank 3 on host2: the checkpoint"):
        fetch_on_each_machine(path)


def test_a_torn_record_is_no_record(store, machine):
    _, wanted = saved(store, 1)
    machine.mkdir()
    (machine / machine_copies.RECORD).write_text('{"CKPT+x": ["ab')
    MachineCopies(ObjectFolder(store), machine).have(NAME, wanted, "full")
    assert digest(machine / NAME) == wanted


def test_a_checkpoint_travels_by_its_place_in_the_store(store, machine):
    checkpointer = Checkpointer(f"{store}/save", {"value": Value(1)})
    sent = pickle.dumps(checkpointer.save_checkpoint(name="x"))
    root = checkpointer.checkpoints_dir
    try:
        PLACES.forget(root)
        PLACES.register(machine, f"{store}/save")
        arrived = pickle.loads(sent)
    finally:
        PLACES.forget(machine)
    assert arrived.path == machine / NAME
    assert arrived.paramfiles == {"value": machine / NAME / "value.ckpt"}
    assert pickle.loads(sent).path == root / NAME  # of a process that knows no mirrors


def test_a_checkpoint_of_the_machine_alone_is_offered_to_others(store, tmp_path):

    checkpointer = Checkpointer(mirror_of(store, str(tmp_path / "kept")), {"value": Value(1)})
    checkpoint = checkpointer.save_checkpoint(name="x")
    remote = REMOTES.of(checkpointer.checkpoints_dir)
    remote.finish()
    there = ObjectFolder(store)
    there.delete(NAME)
    remote.offer(NAME)
    remote.finish()
    assert there.manifest_now(NAME) == (checkpoint.path / "manifest.json").read_bytes()
    assert there.names() == [NAME]
