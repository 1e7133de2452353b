"""A Checkpointer whose folder is in an object store."""

from __future__ import annotations

import json

import pytest
import torch

from ddpkit.checkpointing.object_folder import ObjectFolder
from ddpkit.checkpoints import Checkpointer
from ddpkit.errors import CheckpointError, CheckpointUsageError, FolderInUseError
from ddpkit.mirror import mirror_holding
from ddpkit.mirror.local_folder import NOT_COPIED
from ddpkit.object_store import StoreLock
from tests.mirror.conftest import (
    Dead,
    Trained,
    checkpoints_in,
    folders_of_machine,
    fsspec,
    names_in,
    other_machine,
    train,
    weights,
)
from tests.recipes import Value


class DiesInThird(Trained):
    dies_in = 3


class KeepsTwo(Trained):
    keeps = 2


def damage(url, name):
    """Change a byte of an object."""
    filesystem, path = fsspec.core.url_to_fs(url)
    data = bytearray(filesystem.cat_file(f"{path}/{name}"))
    data[-1] ^= 1
    filesystem.pipe_file(f"{path}/{name}", bytes(data))


@pytest.mark.costly
def test_a_run_that_dies_goes_on_elsewhere_to_the_bits_of_the_uninterrupted_one(store, tmp_path):
    whole = weights(train(tmp_path / "whole", 4))
    with pytest.raises(Dead):
        train(store, 4, kind=DiesInThird)
    other_machine()
    brain = train(store, 4)
    assert torch.equal(weights(brain), whole)
    assert [name for name, *_ in brain.losses] == ["TRAIN", "TRAIN"]  # epochs 3 and 4


def test_what_was_saved_is_complete_in_the_store_when_the_save_returns(store):
    checkpointer = Checkpointer(store, {"value": Value(3)})
    saved = checkpointer.save_checkpoint(name="one")
    assert checkpoints_in(store) == ["CKPT+one"]
    assert saved.path.is_dir()
    assert saved.path.parent == checkpointer.checkpoints_dir
    assert fsspec.open(f"{store}/latest").open().read() == b"CKPT+one\n"


@pytest.mark.costly
def test_the_retention_holds_in_the_store_and_here(store):
    brain = train(store, 5, kind=KeepsTwo)
    here = {path.name for path in brain.checkpointer.checkpoints_dir.glob("CKPT*")}
    assert set(checkpoints_in(store)) == here
    assert len(here) == 2


def test_what_other_machines_have_saved_counts_for_the_retention_and_is_not_copied_down(store):
    train(store, 3, kind=KeepsTwo)
    before = checkpoints_in(store)
    other_machine()
    brain = train(store, 4, kind=KeepsTwo)
    kept = checkpoints_in(store)
    assert before[1] in kept  # names of one second are not in the order of their saves
    assert len(kept) == 2
    here = sorted(path.name for path in brain.checkpointer.checkpoints_dir.glob("CKPT*"))
    assert here == kept  # the older one was never here


def test_only_what_is_loaded_is_copied_down(store):
    checkpointer = Checkpointer(store, {"value": Value(1)})
    for name in ("one", "two", "three"):
        checkpointer.save_checkpoint(name=name)
    other_machine()
    checkpointer = Checkpointer(store, {"value": Value()})
    assert len(checkpointer.list_checkpoints()) == 3
    assert checkpointer.recover_if_possible().path.name == "CKPT+three"
    assert [path.name for path in checkpointer.checkpoints_dir.glob("CKPT*")] == ["CKPT+three"]


def test_the_best_by_a_key_is_found_in_the_store(store):
    value = Value()
    checkpointer = Checkpointer(store, {"value": value})
    for number in (3, 1, 2):
        value.value = number
        checkpointer.save_checkpoint(meta={"loss": number})
    other_machine()
    value = Value()
    Checkpointer(store, {"value": value}).recover_if_possible(min_key="loss")
    assert value.value == 1


def test_damage_in_the_store_is_told_and_the_one_before_is_taken(store, caplog):
    value = Value(1)
    checkpointer = Checkpointer(store, {"value": value})
    checkpointer.save_checkpoint(name="one")
    value.value = 2
    checkpointer.save_checkpoint(name="two")
    damage(store, "CKPT+two/value.ckpt")
    other_machine()
    value = Value()
    found = Checkpointer(store, {"value": value}).recover_if_possible()
    assert (found.path.name, value.value) == ("CKPT+one", 1)
    assert "CKPT+two" in caplog.text
    assert "damaged" in caplog.text


def test_damage_of_the_only_one_is_an_error_and_no_start_from_scratch(store):
    Checkpointer(store, {"value": Value(1)}).save_checkpoint(name="one")
    damage(store, "CKPT+one/CKPT.yaml")
    other_machine()
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
        Checkpointer(store, {"value": Value()}).recover_if_possible()


def test_an_upload_that_did_not_end_is_not_found_and_is_cleaned(store):
    checkpointer = Checkpointer(store, {"value": Value(1)})
    checkpointer.save_checkpoint(name="one")
    filesystem, path = fsspec.core.url_to_fs(store)
    filesystem.pipe_file(f"{path}/CKPT+two/value.ckpt", b"half of it")
    other_machine()
    checkpointer = Checkpointer(store, {"value": Value()})
    assert checkpointer.recover_if_possible().path.name == "CKPT+one"
    checkpointer.save_checkpoint(name="three")
    assert checkpoints_in(store) == ["CKPT+one", "CKPT+three"]
    assert not [name for name in names_in(store) if name.startswith("CKPT+two")]


class Refusing:
    """Has the store refuse objects whose names contain a text."""

    def __init__(self, monkeypatch, text):
        kind = type(fsspec.filesystem("memory"))
        plain = kind.pipe_file
        plain_put = kind.put_file
        self.text = text
        self.refused = []

        def pipe_file(this, path, *args, **kwargs):
            self.look(path)
            return plain(this, path, *args, **kwargs)

        def put_file(this, source, path, *args, **kwargs):
            self.look(path)
            return plain_put(this, source, path, *args, **kwargs)

        monkeypatch.setattr(kind, "pipe_file", pipe_file)
        monkeypatch.setattr(kind, "put_file", put_file)

    def look(self, path):
        if self.text is not None and self.text in path:
            self.refused.append(path)
            raise PermissionError(f"no permission for {path}")


def test_a_save_that_the_store_refuses_is_an_error_and_leaves_nothing_here(store, monkeypatch):
    checkpointer = Checkpointer(store, {"value": Value(1)})
    checkpointer.save_checkpoint(name="one")
    refusing = Refusing(monkeypatch, "CKPT+two/manifest.json")
    with pytest.raises(CheckpointError, match="no permission"):
        checkpointer.save_checkpoint(name="two")
    assert refusing.refused
    assert [path.name for path in checkpointer.checkpoints_dir.glob("CKPT*")] == ["CKPT+one"]
    assert checkpoints_in(store) == ["CKPT+one"]
    refusing.text = None
    checkpointer.save_checkpoint(name="two")
    assert ObjectFolder(store).names() == ["CKPT+one", "CKPT+two"]


def test_with_warn_the_training_goes_on_where_the_store_refuses(store, monkeypatch, caplog):
    Refusing(monkeypatch, "manifest.json")
    brain = train(store, 3, ckpt_errors="warn")
    assert brain.progress.optimizer_step == 12
    assert checkpoints_in(store) == []
    assert "Training goes on." in caplog.text


def test_with_never_what_is_in_the_store_is_moved_aside_there(store):
    train(store, 2)
    before = checkpoints_in(store)
    other_machine()
    train(store, 1, resume="never")
    after = [name for name in checkpoints_in(store) if name.startswith("earlier-")]
    assert [name.partition("/")[2] for name in after] == before
    assert len(checkpoints_in(store)) == 2


def test_a_checkpoint_of_another_run_is_given_by_its_url(store):
    first = train(f"{store}/first", 2)
    newest = checkpoints_in(f"{store}/first")[-1]
    expected = weights(first)
    other_machine()
    brain = train(f"{store}/second", 2, resume=f"{store}/first/{newest}")
    assert torch.equal(weights(brain), expected)
    assert checkpoints_in(f"{store}/first") == [newest]


def test_latest_stands_for_the_newest_checkpoint_of_a_store(store):
    train(f"{store}/first", 2)
    newest = checkpoints_in(f"{store}/first")[-1]
    other_machine()
    checkpointer = Checkpointer(f"{store}/second", {"value": Value()})
    assert checkpointer.named(f"{store}/first/latest").path.name == newest


@pytest.mark.parametrize(
    "named", ["first", "first/{newest}", "first/{newest}/net.ckpt", "first/latest", "net.pt"]
)
def test_first_weights_come_from_a_url(store, named, tmp_path):
    expected = train(f"{store}/first", 2)
    newest = checkpoints_in(f"{store}/first")[-1]
    torch.save(expected.modules.net.state_dict(), tmp_path / "net.pt")
    fsspec.open(f"{store}/net.pt", "wb").open().write((tmp_path / "net.pt").read_bytes())
    other_machine()
    url = f"{store}/{named.format(newest=newest)}"

    class Begins(Trained):
        def on_fit_start(self):
            super().on_fit_start()
            self.first = weights(self)

    brain = train(tmp_path / "second", 1, kind=Begins, init_from=url)
    assert torch.equal(brain.first, weights(expected))


def test_a_url_without_a_checkpoint_is_refused(store):
    checkpointer = Checkpointer(store, {"value": Value()})
    with pytest.raises(CheckpointUsageError, match="is not a checkpoint"):
        checkpointer.named(f"{store}/CKPT+none")


def test_a_rehearsal_writes_nothing_there(store):
    train(store, 2, debug=True)
    assert names_in(store) == []


def test_the_mirror_is_removed_at_the_end(store):
    checkpointer = Checkpointer(store, {"value": Value(1)})
    assert mirror_holding(checkpointer.checkpoints_dir).url == store
    checkpointer.save_checkpoint()
    assert folders_of_machine()
    other_machine()
    assert folders_of_machine() == []


def taken_over(objects, name):
    """Have another run hold a lock."""
    record = json.loads(objects.read(name))
    objects.write(name, json.dumps({**record, "token": "f" * 32}).encode())


@pytest.mark.parametrize("lock", ["save", "run"])
def test_a_run_that_has_lost_its_folder_pushes_no_file(store, lock):
    mirror = mirror_holding(Checkpointer(store).checkpoints_dir)
    mirror.begin()
    held = mirror.run_lock() if lock == "run" else StoreLock(store)
    held.acquire()
    (mirror.folder / "log.txt").write_text("mine\n")
    mirror.push(held)
    mirror.objects.write("log.txt", b"of the new run\n")
    taken_over(mirror.objects, ".run.lock" if lock == "run" else ".lock")
    (mirror.folder / "log.txt").write_text("mine, and more\n")
    with pytest.raises(FolderInUseError, match="is no longer locked by this run"):
        mirror.push(held)
    mirror.push()
    mirror.close()
    assert mirror.objects.read("log.txt") == b"of the new run\n"
    held.release()


def test_a_loss_that_a_save_has_found_ends_the_copying_of_logs(store):
    checkpointer = Checkpointer(store)
    train(checkpointer, 1)
    mirror = mirror_holding(checkpointer.checkpoints_dir)
    mirror.begin()
    saved = checkpointer.find_checkpoint().path
    lock = StoreLock(store)
    lock.acquire()
    mirror.push()
    mirror.objects.write("log.txt", b"of the new run\n")
    taken_over(mirror.objects, ".lock")
    (mirror.folder / "log.txt").write_text("mine\n")
    with pytest.raises(FolderInUseError, match="is no longer locked by this run"):
        ObjectFolder(store).put(saved, lock=lock)
    lock.release()
    mirror.push()
    mirror.close()
    assert mirror.objects.read("log.txt") == b"of the new run\n"


def test_the_end_of_a_process_survives_a_store_without_threads(store, monkeypatch, caplog):
    mirror = mirror_holding(Checkpointer(store).checkpoints_dir)
    mirror.begin()
    (mirror.folder / "log.txt").write_text("mine\n")

    def push(*_):
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(mirror.files, "push", push)
    mirror.close()
    assert (mirror.folder / NOT_COPIED).exists()
    assert "The last files of this run stay in" in caplog.text
