"""The links ``latest`` and ``best`` in a folder of checkpoints."""

from __future__ import annotations

import errno
import os

import pytest

from ddpkit.checkpointing import storage
from ddpkit.checkpoints import Checkpointer
from tests.recipes import Value


@pytest.fixture
def checkpointer(tmp_path):
    return Checkpointer(tmp_path / "save", {"value": Value(1)})


def keep(checkpointer, loss, **options):
    checkpointer.save_and_keep_only(meta={"loss": loss}, **{"min_keys": ["loss"], **options})


def links(checkpointer):
    """Which loss each link stands for."""
    folder = checkpointer.checkpoints_dir
    return {
        name: checkpointer.named(folder / name).meta["loss"]
        for name in ("latest", "best")
        if os.path.lexists(folder / name)
    }


def test_links_follow_the_newest_and_the_best(checkpointer):
    found = []
    for loss in (3.0, 1.0, 2.0, 0.5):
        keep(checkpointer, loss)
        found.append(links(checkpointer))
    assert [each["latest"] for each in found] == [3.0, 1.0, 2.0, 0.5]
    assert [each["best"] for each in found] == [3.0, 1.0, 1.0, 0.5]
    folder = checkpointer.checkpoints_dir
    assert str((folder / "latest").readlink()) == checkpointer.find_checkpoint().path.name


def test_links_are_no_further_checkpoints(checkpointer):
    keep(checkpointer, 2.0, num_to_keep=3)
    keep(checkpointer, 1.0, num_to_keep=3)
    folder = checkpointer.checkpoints_dir
    assert len(checkpointer.list_checkpoints()) == len(checkpointer.find_checkpoints()) == 2
    assert checkpointer.named(folder / "best").path.name.startswith("CKPT+")
    checkpointer.delete_checkpoints(num_to_keep=0, min_keys=["loss"])
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == []


def test_a_save_without_keys_leaves_the_best(checkpointer):
    keep(checkpointer, 1.0)
    checkpointer.save_checkpoint(meta={"loss": 7.0})
    assert links(checkpointer) == {"latest": 7.0, "best": 1.0}


def test_of_several_keys_the_first_decides(checkpointer):
    for right, loss in ((0.5, 1.0), (0.9, 3.0), (0.6, 2.0)):
        meta = {"right": right, "loss": loss}
        checkpointer.save_and_keep_only(meta=meta, max_keys=["right"], min_keys=["loss"])
    assert links(checkpointer) == {"latest": 2.0, "best": 3.0}


def test_what_is_set_aside_has_no_link(checkpointer):
    keep(checkpointer, 1.0)
    keep(checkpointer, 2.0)
    checkpointer._folder().set_aside([checkpointer.find_checkpoint()])
    assert links(checkpointer) == {"best": 1.0}


def test_the_folder_may_be_moved(checkpointer, tmp_path):
    keep(checkpointer, 1.0)
    moved = checkpointer.checkpoints_dir.rename(tmp_path / "moved")
    assert (moved / "latest" / "value.ckpt").is_file()


def test_what_else_has_the_name_of_a_link_is_left_alone(checkpointer, caplog):
    folder = checkpointer.checkpoints_dir
    (folder / "best").mkdir(parents=True)
    (folder / "best" / "mine").touch()
    (folder / "latest").symlink_to("/nowhere/else")
    for loss in (2.0, 1.0):
        keep(checkpointer, loss)
    assert (folder / "best" / "mine").exists()
    assert str((folder / "latest").readlink()) == "/nowhere/else"
    assert len([said for said in caplog.messages if "left as it is" in said]) == 2
    assert len(checkpointer.find_checkpoints()) == 1


def test_a_file_system_without_links_is_told_of_once(checkpointer, caplog, monkeypatch):
    class NoLinks(storage.FileOperations):
        def link(self, name, path):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(storage, "FILES", NoLinks())
    for loss in (2.0, 1.0, 3.0):
        keep(checkpointer, loss)
    assert links(checkpointer) == {}
    assert len(checkpointer.find_checkpoints()) == 2
    assert [said.partition("There is no link ")[2][:8] for said in caplog.messages] == [
        "'latest'",
        "'best' i",
    ]


def test_a_link_that_a_kill_has_left_half_made_is_in_nobody_s_way(checkpointer):
    keep(checkpointer, 2.0)
    folder = checkpointer.checkpoints_dir
    (folder / ".tmp-latest").symlink_to("CKPT+gone")
    (folder / ".tmp-best").symlink_to(checkpointer.find_checkpoint().path.name)
    keep(checkpointer, 1.0)
    assert links(checkpointer) == {"latest": 1.0, "best": 1.0}
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".tmp-")]
    assert len(checkpointer.find_checkpoints()) == 1


def test_a_link_is_never_empty_while_old_checkpoints_are_deleted(checkpointer, monkeypatch):
    seen = []

    class Watching(storage.FileOperations):
        def rename(self, source, target):
            folder = checkpointer.checkpoints_dir
            seen.extend(link.exists() for link in (folder / "latest", folder / "best"))
            super().rename(source, target)

    keep(checkpointer, 3.0)
    monkeypatch.setattr(storage, "FILES", Watching())
    for loss in (2.0, 1.0, 4.0):
        keep(checkpointer, loss)
    assert seen
    assert all(seen)
