from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from ddpkit.checkpointing import storage
from ddpkit.checkpointing.storage import (
    FileOperations,
    FolderLock,
    cleaned_on_error,
    commit_staging,
    make_staging,
    remove_directory,
    verify,
)
from ddpkit.errors import CheckpointError, ConfigError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write_two(folder, text="one"):
    (folder / "a.ckpt").write_text(text)
    (folder / "sub").mkdir()
    (folder / "sub" / "b.pt").write_bytes(b"12345")


def commit_directory(final, write, world_size=1):
    staging = make_staging(final)
    with cleaned_on_error(staging, final):
        write(staging)
        commit_staging(staging, final, world_size=world_size)


def commit(final, text="one"):
    commit_directory(final, lambda folder: write_two(folder, text), world_size=3)


def clean(folder):
    lock = FolderLock(folder)
    with lock.hold():
        lock.clean()


class Dead(BaseException):
    """The process is gone: nothing that it would still do happens."""


class FailingFiles(FileOperations):
    """Counts operations; number ``at`` fails. With ``Dead`` so does everything after it."""

    def __init__(self, at=None, error=None):
        self.count = 0
        self.at = at
        self.error = error
        self.log = []

    def _step(self, name):
        self.count += 1
        self.log.append(name)
        if self.at is None:
            return
        if self.count == self.at or (self.error is Dead and self.count > self.at):
            raise self.error if self.error is Dead else OSError(self.error, os.strerror(self.error))


for _name in ("make_directory", "write", "sync_file", "sync_directory", "rename", "remove_tree"):

    def _operation(self, *args, _name=_name):
        self._step(_name)
        getattr(FileOperations, _name)(self, *args)

    setattr(FailingFiles, _name, _operation)


def operations_of(monkeypatch, action):
    """Count the file operations of an action."""
    files = FailingFiles()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "FILES", files)
        action()
    return files


def commit_with(monkeypatch, files, final):
    """Commit with these file operations and return the error, if any."""
    with monkeypatch.context() as patch:
        patch.setattr(storage, "FILES", files)
        try:
            commit(final, "after")
        except CheckpointError as error:
            return error
    return None


def test_a_committed_directory_holds_all_files_and_a_manifest(tmp_path):
    final = tmp_path / "CKPT+a"
    commit(final)
    assert names(tmp_path) == ["CKPT+a"]
    assert names(final) == ["a.ckpt", "manifest.json", "sub"]
    manifest = json.loads((final / "manifest.json").read_text())
    assert manifest["world_size"] == 3
    assert manifest["torch"] == torch.__version__
    assert set(manifest["files"]) == {"a.ckpt", "sub/b.pt"}
    assert manifest["files"]["sub/b.pt"]["size"] == 5
    assert verify(final) == []


def test_the_order_of_operations(tmp_path, monkeypatch):
    log = operations_of(monkeypatch, lambda: commit(tmp_path / "CKPT+a")).log
    assert log == [
        "make_directory",
        *["sync_file"] * 2,
        "write",  # the manifest
        "sync_file",
        *["sync_directory"] * 2,
        "rename",
        "sync_directory",
    ]


def test_nothing_is_seen_before_the_rename(tmp_path):
    seen = []

    def write(folder):
        seen.append([name for name in names(tmp_path) if not name.startswith(".tmp-")])
        write_two(folder)

    commit_directory(tmp_path / "CKPT+a", write)
    assert seen == [[]]


def test_a_directory_of_the_same_name_is_replaced_as_a_whole(tmp_path):
    final = tmp_path / "CKPT+a"
    final.mkdir()
    (final / "stale.ckpt").write_text("old")
    commit(final)
    assert names(final) == ["a.ckpt", "manifest.json", "sub"]
    assert names(tmp_path) == ["CKPT+a"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("replace", [False, True])
def test_an_error_at_any_operation_leaves_what_was_there(tmp_path, monkeypatch, number, replace):
    final = tmp_path / "CKPT+new"

    def prepare():
        for path in tmp_path.iterdir():
            storage.FILES.remove_tree(path)
        commit(tmp_path / "CKPT+old")
        if replace:
            commit(final, "before")

    prepare()
    total = operations_of(monkeypatch, lambda: commit(final, "after")).count
    assert total >= 9
    for at in range(1, total + 1):
        prepare()
        raised = commit_with(monkeypatch, FailingFiles(at, number), final)
        assert raised is None or raised.__cause__.errno == number, at
        assert verify(tmp_path / "CKPT+old") == [], at
        if final.exists():
            assert verify(final) == [], at
        assert final.exists() or not replace, at
        assert raised is not None or (final / "a.ckpt").read_text() == "after", at
        assert not [name for name in names(tmp_path) if name.startswith(".tmp-")], at


@pytest.mark.parametrize("replace", [False, True])
def test_death_at_any_operation_leaves_a_whole_directory(tmp_path, monkeypatch, replace):
    final = tmp_path / "CKPT+new"

    def prepare():
        for path in tmp_path.iterdir():
            FileOperations().remove_tree(path)
        commit(tmp_path / "CKPT+old")
        if replace:
            commit(final, "before")

    prepare()
    total = operations_of(monkeypatch, lambda: commit(final, "after")).count
    outcomes = set()
    for at in range(1, total + 1):
        prepare()
        with monkeypatch.context() as patch:
            patch.setattr(storage, "FILES", FailingFiles(at, Dead))
            with pytest.raises(Dead):
                commit(final, "after")
        if any(name.startswith(".trash-of-") for name in names(tmp_path)):
            clean(tmp_path)
        assert verify(tmp_path / "CKPT+old") == [], at
        if final.exists():
            assert verify(final) == [], at
            outcomes.add((final / "a.ckpt").read_text())
        else:
            assert not replace, at
        clean(tmp_path)
        assert set(names(tmp_path)) <= {"CKPT+old", "CKPT+new"}, at
    assert outcomes == ({"before", "after"} if replace else {"after"})


def test_an_interrupt_removes_the_half_written_directory_and_goes_on_up(tmp_path):
    def write(folder):
        write_two(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        commit_directory(tmp_path / "CKPT+a", write)
    assert names(tmp_path) == []


def test_a_full_disk_is_named_with_path_and_free_bytes_although_torch_hides_it(tmp_path):
    def write(folder):
        (folder / "first").write_bytes(b"x" * 1000)
        with Path("/dev/full").open("wb") as handle:
            torch.save({"w": torch.zeros(100_000)}, handle)

    with pytest.raises(CheckpointError, match="no space left") as raised:
        commit_directory(tmp_path / "CKPT+a", write)
    assert raised.value.__cause__.errno == errno.ENOSPC
    assert str(tmp_path / "CKPT+a") in str(raised.value)
    assert " bytes free)" in str(raised.value)
    assert names(tmp_path) == []


def test_a_full_disk_is_found_behind_an_error_that_came_of_it(tmp_path):
    def write(folder):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")  # as torch's zip writer does

    with pytest.raises(CheckpointError, match="no space left") as raised:
        commit_directory(tmp_path / "CKPT+a", write)
    assert raised.value.__cause__.errno == errno.ENOSPC


def test_an_error_that_is_no_oserror_keeps_its_type_and_text(tmp_path):
    def write(folder):
        raise KeyError("weight")

    with pytest.raises(CheckpointError, match="KeyError: 'weight'") as raised:
        commit_directory(tmp_path / "CKPT+a", write)
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_missing_parent_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="cannot save .*gone.*No such file or directory"):
        commit(tmp_path / "gone" / "CKPT+a")


def test_a_read_only_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FILES", FailingFiles(1, errno.EROFS))
    with pytest.raises(CheckpointError, match="cannot save .*Read-only file system"):
        commit(tmp_path / "CKPT+a")


def test_leftovers_are_removed_and_all_else_stays(tmp_path):
    (tmp_path / ".tmp-1").mkdir()
    (tmp_path / ".trash-2").mkdir()
    (tmp_path / ".tmp-notes.txt").write_text("a user's")
    commit(tmp_path / "CKPT+a")
    clean(tmp_path)
    assert names(tmp_path) == [".tmp-notes.txt", "CKPT+a"]


def test_removing_what_is_gone_is_no_error_and_what_cannot_be_moved_is(tmp_path, monkeypatch):
    remove_directory(tmp_path / "gone")
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(storage, "FILES", FailingFiles(1, errno.EACCES))
    with pytest.raises(CheckpointError, match="cannot remove"):
        remove_directory(tmp_path / "a")


def test_a_removal_that_stops_half_way_is_not_seen(tmp_path, monkeypatch):
    commit(tmp_path / "CKPT+a")
    monkeypatch.setattr(storage, "FILES", FailingFiles(3, errno.EBUSY))
    remove_directory(tmp_path / "CKPT+a")
    assert [name[:7] for name in names(tmp_path)] == [".trash-"]


def damage_missing(final):
    (final / "a.ckpt").unlink()


def damage_short(final):
    (final / "sub" / "b.pt").write_bytes(b"1234")


def damage_empty(final):
    (final / "a.ckpt").write_bytes(b"")


def damage_swapped(final):
    (final / "a.ckpt").write_text("two")


def damage_manifest(final):
    (final / "manifest.json").write_text("{")


def damage_no_manifest(final):
    (final / "manifest.json").unlink()
    (final / "CKPT.yaml").write_text(storage.META_MARK)


def damage_other_format(final):
    text = (final / "manifest.json").read_text()
    (final / "manifest.json").write_text(text.replace('"format": 2', '"format": 3'))


@pytest.mark.parametrize(
    ("damage", "reason", "seen_by_size"),
    [
        (damage_missing, "a.ckpt is missing", True),
        (damage_short, "sub/b.pt has 4 bytes instead of 5", True),
        (damage_empty, "a.ckpt has 0 bytes instead of 3", True),
        (damage_swapped, "a.ckpt fails its checksum", False),
        (damage_manifest, "manifest.json cannot be read", True),
        (damage_no_manifest, "manifest.json is missing", True),
        (damage_other_format, "manifest.json has format 3", True),
    ],
)
def test_damage_is_found_and_named(tmp_path, damage, reason, seen_by_size):
    final = tmp_path / "CKPT+a"
    commit(final)
    damage(final)
    found = verify(final)
    assert len(found) == 1
    assert reason in found[0]
    assert bool(verify(final, "size")) == seen_by_size
    assert verify(final, "off") == []


def test_every_single_bit_flip_is_found(tmp_path):
    final = tmp_path / "CKPT+a"
    commit(final)
    draw = random.Random(0)
    for path in (final / "a.ckpt", final / "sub" / "b.pt", final / "manifest.json"):
        content = path.read_bytes()
        bits = range(len(content) * 8)
        for bit in draw.sample(bits, min(100, len(bits))):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            assert verify(final), f"bit {bit} of {path.name}"
        path.write_bytes(content)
    assert verify(final) == []


def test_a_manifest_cannot_point_outside(tmp_path):
    final = tmp_path / "CKPT+a"
    commit(final)
    secret = tmp_path / "secret"
    secret.write_text("x")
    for name in ("../secret", str(secret)):
        manifest = {"format": 1, "files": {name: {"size": 1, "sha256": ""}}}
        manifest["digest"] = storage._manifest_digest(manifest)
        (final / "manifest.json").write_text(json.dumps(manifest))
        assert "outside" in verify(final)[0]


def test_files_of_another_library_are_checked_by_their_own_checksums(tmp_path):
    torch.save({"w": torch.arange(1000)}, tmp_path / "model.ckpt")
    (tmp_path / "counter.ckpt").write_text("3")
    (tmp_path / "CKPT.yaml").write_text("unixtime: 1")
    assert verify(tmp_path) == []
    content = (tmp_path / "model.ckpt").read_bytes()
    middle = content.index(torch.arange(1000).numpy().tobytes()[:80]) + 40
    (tmp_path / "model.ckpt").write_bytes(content[:middle] + b"\xff" + content[middle + 1 :])
    assert "model.ckpt fails its checksum" in verify(tmp_path)[0]
    (tmp_path / "model.ckpt").write_bytes(content[: len(content) // 2])
    assert "model.ckpt cannot be read" in verify(tmp_path, "size")[0]
    (tmp_path / "model.ckpt").write_bytes(b"")
    assert verify(tmp_path) == ["model.ckpt is empty"]


def test_an_unknown_mode_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="'full', 'size' and 'off'"):
        verify(tmp_path, "quick")


def test_a_file_that_may_not_be_written_any_more_is_saved(tmp_path, monkeypatch):
    """As `shutil.copy` makes it, of a file of mode 0444; root alone could open it for writing."""
    source = tmp_path / "spm.model"
    is_root = os.geteuid() == 0
    source.write_text("a tokenizer")
    source.chmod(0o444)
    tmp_path.chmod(0o777)
    monkeypatch.chdir(tmp_path)  # the folders above are root's
    if is_root:
        os.seteuid(65534)
    try:
        commit_directory(
            Path("CKPT+a"),
            lambda folder: shutil.copy(source.name, folder / "spm.ckpt"),
        )
    finally:
        if is_root:
            os.seteuid(0)
    assert (tmp_path / "CKPT+a" / "spm.ckpt").read_text() == "a tokenizer"
    assert verify(tmp_path / "CKPT+a") == []
