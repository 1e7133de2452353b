"""F6: after a loss of power at any moment of several saves, the last acknowledged checkpoint is
found.
"""

from __future__ import annotations

import shutil

import pytest

from ddpkit.checkpointing.storage import LOCK_NAME
from ddpkit.errors import CheckpointError
from tests.faults.power_loss import Directory, Disk, File, RecordingFiles, materialize
from tests.faults.storage_tools import MODES, Plan, Run, recovered, save, watched, without_waiting

SAVES = ((1, None), (2, None), (3, "last"), (4, "last"))


def record(folder, mode, forget=lambda name, path: False, saves=SAVES):
    """Make several saves, with deletions and a replacement, on a disk that takes note."""
    folder.mkdir()
    run = Run()
    checkpointer = run.checkpointer(folder, mode)
    disk = Disk(folder, ignored={LOCK_NAME})
    with without_waiting(), checkpointer.hold_folder():
        for step, name in saves:
            with watched(Plan(), RecordingFiles(disk, forget)):
                save(run, checkpointer, step, name, num_to_keep=2)
            disk.acknowledged = step
            disk.look()
    return disk


def lost(disk, folder):
    """Recover from every state that the disk may be in; return those in which what was acknowledged
    is lost.
    """
    losses = []
    for (_, acknowledged), tree in disk.moments.items():
        materialize(tree, folder)
        try:
            step = recovered(folder)
        except CheckpointError as error:
            step = str(error)
        newest = (acknowledged or 0) + 1
        if step not in {acknowledged, newest}:
            losses.append((acknowledged, step))
        shutil.rmtree(folder)
    return losses


@pytest.mark.parametrize("mode", MODES)
def test_what_was_acknowledged_is_found_after_any_loss_of_power(tmp_path, mode):
    disk = record(tmp_path / "run", mode)
    print(f"{mode}: {len(disk.moments)} states")
    assert len(disk.moments) > 50
    assert {acknowledged for _, acknowledged in disk.moments} == {None, 1, 2, 3, 4}
    assert lost(disk, tmp_path / "after") == []


@pytest.mark.in_each_check(1)
@pytest.mark.parametrize("name", ["sync_file", "sync_directory"])
def test_without_waiting_for_the_disk_the_model_loses_a_checkpoint(tmp_path, name):
    disk = record(tmp_path / "run", "sync", lambda operation, path: operation == name, SAVES[:2])
    losses = lost(disk, tmp_path / "after")
    assert losses
    assert any(acknowledged == 2 for acknowledged, _ in losses)


def waits_of_one_save(folder):
    """List the waits for the disk that one save does."""
    waits = []
    record(
        folder,
        "sync",
        lambda name, path: waits.append((name, path)) if name.startswith("sync") else False,
        SAVES[:1],
    )
    return waits


def test_every_wait_of_a_save_is_needed(tmp_path):
    total = len(waits_of_one_save(tmp_path / "count"))
    assert total >= 9
    for number in range(total):
        left = iter(range(total))
        disk = record(
            tmp_path / f"run{number}",
            "sync",
            lambda name, path, left=left, number=number: (
                name.startswith("sync") and next(left) == number
            ),
            SAVES[:1],
        )
        losses = lost(disk, tmp_path / "after")
        assert any(acknowledged == 1 for acknowledged, _ in losses), (
            f"wait {number} of {total} could be left out"
        )


def test_the_model_knows_what_may_be_missing(tmp_path):
    disk = Disk(tmp_path)
    files = RecordingFiles(disk)
    files.write(tmp_path / "a", lambda handle: handle.write(b"1234"))
    assert disk.root.states()[-1] == {}
    assert {tree["a"] for tree in disk.root.states() if tree} == {b"1234", b"12", b"", bytes(4)}
    files.sync_file(tmp_path / "a")
    # its name is not sure yet
    assert {tree.get("a") for tree in disk.root.states()} == {b"1234", None}
    files.sync_directory(tmp_path)
    assert all(tree == {"a": b"1234"} for tree in disk.root.states())
    files.rename(tmp_path / "a", tmp_path / "b")
    assert {"a": b"1234"} in disk.root.states()
    assert {"b": b"1234"} in disk.root.states()
    assert {} not in disk.root.states()
    assert isinstance(disk.root.now["b"], File)
    files.make_directory(tmp_path / "c")
    assert isinstance(disk.root.now["c"], Directory)
    (tmp_path / "b").unlink()
    disk.look()
    assert {} in disk.root.states()
    assert {"a": b"1234"} in disk.root.states()
