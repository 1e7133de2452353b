from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys

import pytest
import torch

from ddpkit.checkpointing import storage
from ddpkit.checkpointing.hashing import HashedHandle
from ddpkit.checkpointing.storage import FileOperations, commit_directory, verify, write_file

MIB = 1 << 20


def write_hashed(file, writer):
    handle = HashedHandle(file)
    writer(handle)
    return handle.sha256()


def pieces_of(*sizes):
    return [os.urandom(size) for size in sizes]


@pytest.mark.parametrize(
    "sizes",
    [(), (0,), (1,), (MIB,), (MIB, 1), (MIB + 1,), (3, 5 * MIB, 7), (4 * MIB,) * 4, (17 * MIB + 3,), (1000,) * 6000],
)
def test_the_checksum_is_that_of_all_that_was_written(sizes):
    pieces, file = pieces_of(*sizes), io.BytesIO()
    digest = write_hashed(file, lambda handle: [handle.write(piece) for piece in pieces])
    assert file.getvalue() == b"".join(pieces)
    assert digest == hashlib.sha256(file.getvalue()).hexdigest()


def test_a_buffer_of_the_writer_may_change_once_it_is_written():
    piece, file = bytearray(8 * MIB), io.BytesIO()

    def writer(handle):
        for number in range(4):
            piece[:] = bytes([number]) * len(piece)
            handle.write(piece)

    digest = write_hashed(file, writer)
    assert digest == hashlib.sha256(file.getvalue()).hexdigest()


def test_other_views_than_bytes_are_hashed_as_bytes():
    file = io.BytesIO()
    digest = write_hashed(file, lambda handle: handle.write(memoryview(torch.arange(6).reshape(2, 3).numpy())))
    assert digest == hashlib.sha256(file.getvalue()).hexdigest()


@pytest.mark.parametrize(
    "writer",
    [
        lambda handle: (handle.write(b"abcd"), handle.seek(0), handle.write(b"x")),
        lambda handle: (handle.write(b"abcd"), handle.truncate(2)),
        lambda handle: os.write(handle.fileno(), b"abcd"),
    ],
)
def test_who_does_more_than_append_gets_no_checksum_and_the_file_is_read_for_it(tmp_path, writer):
    with (tmp_path / "a").open("wb") as handle:
        assert write_hashed(handle, writer) is None
    commit_directory(tmp_path / "CKPT+a", lambda folder: write_file(folder / "a.ckpt", writer))
    assert verify(tmp_path / "CKPT+a") == []


def test_a_text_layer_over_the_handle_works(tmp_path):
    def writer(handle):
        text = io.TextIOWrapper(handle, encoding="utf-8")
        text.write("größer")
        text.detach()

    commit_directory(tmp_path / "CKPT+a", lambda folder: write_file(folder / "a.ckpt", writer))
    assert (tmp_path / "CKPT+a" / "a.ckpt").read_text(encoding="utf-8") == "größer"
    assert verify(tmp_path / "CKPT+a") == []


def test_a_kill_while_a_large_file_is_written_leaves_no_checkpoint_of_that_name(tmp_path):
    """The checkpoint before it stays the one that is found."""
    script = """
import os, signal, sys, torch
from pathlib import Path
from ddpkit.checkpointing.hooks import torch_save
from ddpkit.checkpointing.storage import commit_directory, write_file
final = Path(sys.argv[1]) / "CKPT+a"
commit_directory(final, lambda folder: torch_save(torch.nn.Linear(2048, 1024), folder / "model.ckpt"))
def die(handle):
    handle.write(bytes(5 << 20))
    os.kill(os.getpid(), signal.SIGKILL)
commit_directory(final, lambda folder: write_file(folder / "model.ckpt", die))
"""
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert verify(tmp_path / "CKPT+a", expect_manifest=True) == []
    assert [path.name[:5] for path in sorted(tmp_path.iterdir())] == [".tmp-", "CKPT+"]


# ------------------------------------------------------------------------------------------------ in a commit


def files_read_again(monkeypatch, write, final):
    read = []
    real = storage.file_sha256
    monkeypatch.setattr(storage, "file_sha256", lambda path: (read.append(path.name), real(path))[1])
    commit_directory(final, write)
    monkeypatch.setattr(storage, "file_sha256", real)
    assert verify(final) == []
    return read


def test_only_what_others_have_written_is_read_again(tmp_path, monkeypatch):
    def write(folder):
        write_file(folder / "model.ckpt", lambda handle: torch.save({"w": torch.randn(1000, 1000)}, handle))
        write_file(folder / "small.ckpt", lambda handle: handle.write(b"1"))
        (folder / "own.ckpt").write_text("by itself")

    assert files_read_again(monkeypatch, write, tmp_path / "CKPT+a") == ["own.ckpt"]


@pytest.mark.parametrize("text", [b"longer than before", b"2"])
def test_a_file_that_changed_after_it_was_hashed_is_read_again(tmp_path, monkeypatch, text):
    def write(folder):
        write_file(folder / "a.ckpt", lambda handle: handle.write(b"1"))
        os.utime(folder / "a.ckpt", ns=(0, 0))
        (folder / "a.ckpt").write_bytes(text)

    assert files_read_again(monkeypatch, write, tmp_path / "CKPT+a") == ["a.ckpt"]


def test_the_checksum_is_of_what_was_to_be_written_and_not_of_what_the_disk_made_of_it(tmp_path, monkeypatch):
    class Rotten(FileOperations):
        def write(self, path, writer):
            super().write(path, writer)
            if path.name == "a.ckpt":
                status = path.stat()
                path.write_bytes(b"2" * status.st_size)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    monkeypatch.setattr(storage, "FILES", Rotten())
    commit_directory(tmp_path / "CKPT+a", lambda folder: write_file(folder / "a.ckpt", lambda h: h.write(b"111")))
    assert verify(tmp_path / "CKPT+a") == ["a.ckpt fails its checksum: its content has changed since it was saved"]
