"""Checkpoints that are saved on this machine first, and copied up later (``--ckpt_local``)."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch

from ddpkit.checkpointing import META_NAME, REMOTES, ObjectFolder
from ddpkit.checkpointing.storage import META_MARK, commit_staging, make_staging
from ddpkit.checkpoints import Checkpointer
from ddpkit.errors import CheckpointError
from ddpkit.mirror import kept, mirror_of, uploads
from ddpkit.train_logger import set_run_log
from tests.mirror.conftest import (
    Dead,
    Trained,
    checkpoints_in,
    fsspec,
    no_longer_copies,
    other_machine,
    train,
    weights,
)


class KeepsAll(Trained):
    keeps = 99


class DiesInThird(Trained):
    dies_in = 3


class DiesInFourth(Trained):
    dies_in = 4


class Gate:
    """Has the store wait, or refuse, where an object's name ends with a text."""

    def __init__(self, monkeypatch):
        self.refuses = None
        self.waits = None
        self.is_open = threading.Event()
        self.is_reached = threading.Event()
        kind = type(fsspec.filesystem("memory"))
        for name in ("pipe_file", "put_file"):
            monkeypatch.setattr(kind, name, self._around(getattr(kind, name)))

    def _around(self, plain):
        def write(this, *args, **kwargs):
            path = args[0] if plain.__name__ == "pipe_file" else args[1]
            if self.refuses is not None and path.endswith(self.refuses):
                raise PermissionError(path)
            if self.waits is not None and path.endswith(self.waits):
                self.is_reached.set()
                assert self.is_open.wait(60)
            return plain(this, *args, **kwargs)

        write.__name__ = plain.__name__
        return write


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.setattr(uploads, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(uploads, "LONGEST_PAUSE_SECONDS", 0.05)
    found = Gate(monkeypatch)
    yield found
    found.is_open.set()


@pytest.fixture
def place(store, tmp_path):
    """Returns the folder of a machine, which stays, that mirrors the store."""

    def of_machine(name="a"):
        other_machine()
        return Checkpointer(mirror_of(store, str(tmp_path / name)))

    return of_machine


def names(checkpointer):
    return sorted(path.name for path in checkpointer.checkpoints_dir.glob("CKPT*"))


def test_all_that_was_saved_is_in_the_store_at_the_end(store, place):
    checkpointer = place()
    train(checkpointer, 3, kind=KeepsAll)
    assert len(names(checkpointer)) == 3
    assert checkpoints_in(store) == names(checkpointer)


def test_the_retention_reaches_the_store(store, place):
    checkpointer = place()
    train(checkpointer, 4)
    assert checkpoints_in(store) == names(checkpointer)
    assert len(names(checkpointer)) == 1


def test_a_save_does_not_wait_for_the_store_and_what_is_superseded_is_left_out(
    store, place, gate, monkeypatch
):
    monkeypatch.setattr(kept, "END_SECONDS", 30.0)
    gate.waits = "manifest.json"
    checkpointer = place()
    sent = []
    plain = ObjectFolder.put
    monkeypatch.setattr(
        ObjectFolder,
        "put",
        lambda self, directory, **kw: sent.append(directory.name) or plain(self, directory, **kw),
    )

    class OpensAtTheEnd(Trained):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            super().on_stage_end(stage, stage_loss, epoch)
            assert gate.is_reached.wait(60)
            if epoch == 5:
                self.checkpointer.wait()
                gate.is_open.set()

    train(checkpointer, 5, kind=OpensAtTheEnd)
    assert len(sent) == 2  # the first, which was on its way, and the last
    assert checkpoints_in(store) == names(checkpointer) == [sent[1]]


def test_what_is_behind_is_in_the_log_of_the_run(store, place, tmp_path):
    checkpointer = place()
    set_run_log(tmp_path / "metrics.jsonl")
    train(checkpointer, 2, kind=KeepsAll)
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [event for event in events if event["event"] == "checkpoint_uploaded"]
    assert [event["path"] for event in told] == [
        f"{store}/{name}" for name in checkpoints_in(store)
    ]
    assert told[-1]["behind"] == 0
    assert all(event["bytes"] > 0 and event["late_seconds"] >= 0 for event in told)


def test_an_upload_that_fails_is_tried_again(store, place, gate, caplog):
    gate.refuses = "manifest.json"

    class Allows(Trained):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            super().on_stage_end(stage, stage_loss, epoch)
            gate.refuses = None if epoch == 2 else gate.refuses

    checkpointer = place()
    train(checkpointer, 2, kind=Allows)
    assert checkpoints_in(store)[-1].partition("@")[0] == names(checkpointer)[-1]


def test_the_end_of_fit_says_what_is_not_in_the_store(store, place, gate, monkeypatch):
    monkeypatch.setattr(kept, "END_SECONDS", 0.3)
    gate.refuses = "manifest.json"
    checkpointer = place()
    with pytest.raises(CheckpointError, match="1 checkpoint.s. are not in the store yet: CKPT"):
        train(checkpointer, 1)
    assert len(names(checkpointer)) == 1


def test_with_warn_the_end_of_fit_only_says_it(store, place, gate, monkeypatch, caplog):
    monkeypatch.setattr(kept, "END_SECONDS", 0.3)
    gate.refuses = "manifest.json"
    train(place(), 1, ckpt_errors="warn")
    assert "not in the store yet" in caplog.text


@pytest.mark.costly
def test_what_a_killed_run_could_not_copy_up_is_gone_on_from_and_copied(
    store, place, gate, monkeypatch, tmp_path
):
    whole = weights(train(tmp_path / "whole", 4))
    monkeypatch.setattr(kept, "FAILED_SECONDS", 0.1)
    gate.refuses = "manifest.json"
    with pytest.raises(Dead):
        train(place(), 4, kind=DiesInThird)
    no_longer_copies()
    assert checkpoints_in(store) == []
    gate.refuses = None
    checkpointer = place()
    brain = train(checkpointer, 4)
    assert len(brain.losses) == 2  # epochs 3 and 4
    assert torch.equal(weights(brain), whole)
    assert ObjectFolder(store).names() == names(checkpointer)


@pytest.mark.costly
def test_another_machine_goes_on_from_the_store(store, place, tmp_path):
    whole = weights(train(tmp_path / "whole", 4))
    with pytest.raises(Dead):
        train(place("a"), 4, kind=DiesInThird)
    brain = train(place("b"), 4)
    assert len(brain.losses) == 2
    assert torch.equal(weights(brain), whole)


@pytest.mark.costly
def test_the_machine_that_has_come_further_wins_and_the_branch_is_moved_away(
    store, place, gate, monkeypatch, tmp_path, caplog
):
    whole = weights(train(tmp_path / "whole", 4))
    monkeypatch.setattr(kept, "FAILED_SECONDS", 5.0)

    class DiesInThirdAndThenRefuses(Trained):
        dies_in = 4

        def on_stage_end(self, stage, stage_loss, epoch=None):
            if epoch == 2:  # the first is in the store, the others never
                self.checkpointer.wait()
                self.checkpointer._damage_log.remote._uploads.wait(30)
                monkeypatch.setattr(kept, "FAILED_SECONDS", 0.1)
                gate.refuses = "manifest.json"
            super().on_stage_end(stage, stage_loss, epoch)

    with pytest.raises(Dead):
        train(place("a"), 4, kind=DiesInThirdAndThenRefuses)
    no_longer_copies()
    assert len(checkpoints_in(store)) == 1  # not deleted before a later one is there
    gate.refuses = None
    monkeypatch.setattr(kept, "FAILED_SECONDS", 5.0)
    with pytest.raises(Dead):  # later by the clock, but epoch 2 alone
        train(place("b"), 4, kind=DiesInThird)
    brain = train(place("a"), 4)
    assert [name for name, *_ in brain.losses] == ["TRAIN"]  # epoch 4
    assert torch.equal(weights(brain), whole)
    assert "which is on this machine" in caplog.text
    assert any(name.startswith("earlier-") for name in checkpoints_in(store))


@pytest.mark.costly
def test_the_store_wins_where_another_machine_has_come_further(store, place, tmp_path):
    whole = weights(train(tmp_path / "whole", 4))
    with pytest.raises(Dead):
        train(place("a"), 4, kind=DiesInThird)
    with pytest.raises(Dead):
        train(place("b"), 4, kind=DiesInFourth)
    brain = train(place("a"), 4)
    assert [name for name, *_ in brain.losses] == ["TRAIN"]
    assert torch.equal(weights(brain), whole)


@pytest.mark.costly
def test_what_is_here_of_another_run_is_moved_away(store, place, caplog):
    train(place("a"), 3)
    checkpointer = place("b")
    train(checkpointer, 1, resume="never")
    again = place("a")
    brain = train(again, 2)
    assert len(brain.losses) == 1  # it has gone on from the other run's first epoch
    assert list(again.checkpoints_dir.glob("earlier-*/CKPT*"))


def standing(folder, name, step, time):
    """Save a checkpoint that has come so far, and was saved then."""
    folder.mkdir(parents=True, exist_ok=True)
    staging = make_staging(folder / name)
    (staging / META_NAME).write_text(f"{META_MARK}unixtime: {time}\n")
    (staging / kept.BRAIN_FILE).write_text(f"optimizer_step: {step}\n")
    commit_staging(staging, folder / name)
    return folder / name


def steps_in(folder):
    return [
        int((path / kept.BRAIN_FILE).read_text().split()[1]) for path in folder.glob("CKPT+last")
    ]


@pytest.mark.parametrize(
    ("here", "there"),
    [((100, 1000.0), (80, 2000.0)), ((80, 2000.0), (100, 1000.0)), ((80, 900.0), (100, 1000.0))],
)
def test_of_two_checkpoints_of_one_name_the_furthest_stays_and_the_other_is_kept_aside(
    store, place, tmp_path, here, there
):
    checkpointer = place()
    folder = checkpointer.checkpoints_dir
    remote = REMOTES.of(folder)
    standing(folder, "CKPT+last", *here)
    ObjectFolder(remote._url).put(standing(tmp_path / "other", "CKPT+last", *there))
    remote.acquire()
    try:
        remote.begin()
        remote._uploads.wait(30)
    finally:
        remote.finish()
        remote.release()
    assert ObjectFolder(remote._url).names() == ["CKPT+last"]
    assert remote._store.get("CKPT+last", tmp_path / "other").parent.is_dir()
    assert steps_in(tmp_path / "other") == [100]
    assert steps_in(folder) == ([100] if here[0] == 100 else [])
    aside = [step for one in folder.glob("earlier-*") for step in steps_in(one)]
    assert aside == [80]


def test_what_differs_here_and_in_the_store_is_set_aside_in_both(store, place, tmp_path):
    checkpointer = place()
    folder = checkpointer.checkpoints_dir
    remote = REMOTES.of(folder)
    standing(folder, "CKPT+last", 100, 1000.0)
    ObjectFolder(remote._url).put(standing(tmp_path / "other", "CKPT+last", 80, 2000.0))
    checkpointer.set_aside(None)
    aside = [step for one in folder.glob("earlier-*") for step in steps_in(one)]
    assert sorted(aside) == [80, 100]
    assert ObjectFolder(remote._url).names() == []


def test_a_store_that_refuses_to_delete_still_gets_what_is_saved(
    store, place, gate, monkeypatch, caplog
):
    monkeypatch.setattr(kept, "END_SECONDS", 2.0)

    def delete(self, name):
        raise PermissionError(f"may not delete {name}")

    monkeypatch.setattr(ObjectFolder, "delete", delete)
    checkpointer = place()
    train(checkpointer, 4)
    assert set(names(checkpointer)) <= set(checkpoints_in(store))
    assert "may not delete" in caplog.text


def test_what_the_store_refuses_to_delete_is_told_as_that_and_waited_for_by_nobody(
    store, place, monkeypatch, caplog
):
    def refuse(self, path):
        if "CKPT+" in path:
            raise PermissionError(f"no permission to delete {path}")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "rm_file", refuse)
    monkeypatch.setattr(kept, "END_SECONDS", 300.0)
    checkpointer = place()
    begun = time.monotonic()
    train(checkpointer, 2)
    assert time.monotonic() - begun < 60
    assert set(names(checkpointer)) < set(checkpoints_in(store))
    assert "cannot be deleted in the store, and count there until then" in caplog.text
    assert "It is tried again in" not in caplog.text


def test_a_checkpoint_that_is_replaced_while_it_is_pinned_is_pinned_again(tmp_path, monkeypatch):
    folder = tmp_path / "save"

    def save(text):
        folder.mkdir(exist_ok=True)
        staging = make_staging(folder / "CKPT+x")
        for name in ("a.ckpt", "b.ckpt"):
            (staging / name).write_text(text)
        commit_staging(staging, folder / "CKPT+x")

    save("old")
    linked = []

    def link(source, target):
        plain(source, target)
        linked.append(target)
        if len(linked) == 1:
            save("new")

    plain = uploads._link
    monkeypatch.setattr(uploads, "_link", link)
    copied = []

    def copy(directory):
        copied.append({path.name: path.read_text() for path in directory.glob("*.ckpt")})

    own = uploads.Uploads(folder, copy, len, len)
    own.add(["CKPT+x"])
    own.wait(60)
    assert copied == [{"a.ckpt": "new", "b.ckpt": "new"}]
