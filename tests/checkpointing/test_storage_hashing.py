from __future__ import annotations

import hashlib
import json
import os
import signal

import pytest
import torch

from ddpkit.checkpointing import storage
from ddpkit.checkpointing.storage import (
    FileOperations,
    commit_staging,
    make_staging,
    verify,
    write_file,
)
from tests.launching import Run, python

MIB = 1 << 20


def pieces_of(*sizes):
    return [os.urandom(size) for size in sizes]


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (0,),
        (1,),
        (MIB,),
        (MIB, 1),
        (MIB + 1,),
        (3, 5 * MIB, 7),
        (4 * MIB,) * 4,
        (17 * MIB + 3,),
        (1000,) * 6000,
    ],
)
def test_the_checksum_is_that_of_all_that_was_written(tmp_path, sizes):
    pieces = pieces_of(*sizes)
    path = tmp_path / "a"
    digest = write_file(path, lambda handle: [handle.write(piece) for piece in pieces])
    assert path.read_bytes() == b"".join(pieces)
    parts = [
        path.read_bytes()[start : start + 16 * MIB]
        for start in range(0, max(sum(sizes), 1), 16 * MIB)
    ]
    sums = [hashlib.sha256(part).digest() for part in parts]
    assert digest == (
        sums[0].hex() if len(sums) == 1 else hashlib.sha256(b"".join(sums)).hexdigest()
    )
    assert digest == storage.file_sha256(path)


@pytest.mark.slow
def test_a_kill_while_a_large_file_is_written_leaves_no_checkpoint_of_that_name(tmp_path):
    """The checkpoint before it stays the one that is found."""
    script = """
import os, signal, sys, torch
from pathlib import Path
from ddpkit.checkpointing.hooks import torch_save
from ddpkit.checkpointing.storage import commit_staging, make_staging, write_file
final = Path(sys.argv[1]) / "CKPT+a"
staging = make_staging(final)
torch_save(torch.nn.Linear(2048, 1024), staging / "model.ckpt")
commit_staging(staging, final)
def die(handle):
    handle.write(bytes(5 << 20))
    os.kill(os.getpid(), signal.SIGKILL)
write_file(make_staging(final) / "model.ckpt", die)
"""
    folder = tmp_path / "save"
    folder.mkdir()
    ended = Run(python("-c", script, str(folder)), tmp_path, warm=True).wait()
    assert ended.code == -signal.SIGKILL, ended.err
    assert verify(folder / "CKPT+a") == []
    assert [path.name[:5] for path in sorted(folder.iterdir())] == [".tmp-", "CKPT+"]


# -------------------------------------------------------------------------------------- in a commit


def commit(final, write):
    staging = make_staging(final)
    commit_staging(staging, final, write(staging))


def as_format_1(final):
    """Write the manifest as ddpkit 0.1 did: one sum for a file, however large."""
    manifest = json.loads((final / "manifest.json").read_text())
    del manifest["digest"]
    manifest["format"] = 1
    for name, entry in manifest["files"].items():
        entry["sha256"] = hashlib.sha256((final / name).read_bytes()).hexdigest()
    manifest["digest"] = storage._manifest_digest(manifest)
    (final / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.slow
@pytest.mark.parametrize("is_old", [False, True])
def test_each_piece_of_a_large_file_is_verified_and_what_ddpkit_0_1_has_saved(tmp_path, is_old):
    final = tmp_path / "CKPT+a"
    content = bytearray(os.urandom(33 * MIB))

    def write(folder):
        path = folder / "a.ckpt"
        return {path: write_file(path, lambda handle: handle.write(content))}

    commit(final, write)
    if is_old:
        as_format_1(final)
    assert verify(final) == []
    for place in (0, 16 * MIB - 1, 16 * MIB, 32 * MIB + 5, 33 * MIB - 1):
        content[place] ^= 1
        (final / "a.ckpt").write_bytes(content)
        assert verify(final) == [
            ("a.ckpt fails its checksum: its content has changed since it was saved")
        ], place
        content[place] ^= 1
    first = content[: 16 * MIB]
    second = content[16 * MIB : 32 * MIB]
    rest = content[32 * MIB :]
    (final / "a.ckpt").write_bytes(second + first + rest)
    assert len(verify(final)) == 1, "the order of the pieces counts"


def test_only_what_others_have_written_is_read_again(tmp_path, monkeypatch):
    read = []
    real = storage.file_sha256

    def write(folder):
        (folder / "own.ckpt").write_text("by itself")
        path = folder / "model.ckpt"
        return {
            path: write_file(
                path,
                lambda handle: torch.save({"w": torch.randn(1000, 1000)}, handle),
            )
        }

    with monkeypatch.context() as patch:
        patch.setattr(storage, "file_sha256", lambda path: (read.append(path.name), real(path))[1])
        commit(tmp_path / "CKPT+a", write)
    assert read == ["own.ckpt"]
    assert verify(tmp_path / "CKPT+a") == []


def test_the_checksum_is_of_what_was_to_be_written_and_not_of_what_the_disk_made_of_it(
    tmp_path,
    monkeypatch,
):
    class Rotten(FileOperations):
        def write(self, path, writer):
            super().write(path, writer)
            if path.name == "a.ckpt":
                path.write_bytes(b"2" * path.stat().st_size)

    def write(folder):
        path = folder / "a.ckpt"
        return {path: write_file(path, lambda handle: handle.write(b"111"))}

    monkeypatch.setattr(storage, "FILES", Rotten())
    commit(tmp_path / "CKPT+a", write)
    assert verify(tmp_path / "CKPT+a") == [
        ("a.ckpt fails its checksum: its content has changed since it was saved")
    ]
