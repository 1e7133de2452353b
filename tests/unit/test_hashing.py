from __future__ import annotations

import hashlib
import io
import os
import threading

import numpy as np
import pytest
import torch

from ddpkit import hashing, storage
from ddpkit.checkpoint_hooks import torch_save
from ddpkit.hashing import HashedHandle
from ddpkit.storage import FileOperations, commit_directory, verify, write_file

MIB = 1 << 20


def write_hashed(file, writer, lasting=frozenset()):
    handle = HashedHandle(file, lasting)
    try:
        writer(handle)
    finally:
        digest = handle.finish()
    return digest


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


def test_memory_that_lasts_is_hashed_from_where_it_is_and_in_order(monkeypatch):
    large = [np.random.default_rng(n).integers(0, 255, 3 * MIB, dtype=np.uint8) for n in range(4)]
    copied = []
    real = HashedHandle._copy
    monkeypatch.setattr(HashedHandle, "_copy", lambda self, view: (copied.append(len(view)), real(self, view)))
    file = io.BytesIO()

    def writer(handle):
        for piece in large:
            handle.write(b"small" * 1000)
            handle.write(piece)
            handle.write(bytes(2 * MIB))

    digest = write_hashed(file, writer, {piece.ctypes.data for piece in large})
    assert digest == hashlib.sha256(file.getvalue()).hexdigest()
    assert set(copied) == {5000, 2 * MIB}


def test_tensors_on_the_cpu_are_not_copied_to_be_hashed(tmp_path, monkeypatch):
    copied = []
    real = HashedHandle._copy
    monkeypatch.setattr(HashedHandle, "_copy", lambda self, view: (copied.append(len(view)), real(self, view)))
    model = torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(4)])
    commit_directory(tmp_path / "CKPT+a", lambda folder: torch_save(model, folder / "model.ckpt"))
    assert verify(tmp_path / "CKPT+a") == []
    assert copied
    assert max(copied) < 700 * 700 * 4


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


def threads():
    return [thread.name for thread in threading.enumerate() if "checksum" in thread.name]


def test_the_thread_is_there_for_large_files_only_and_ends_with_the_file_also_after_an_error():
    handle = HashedHandle(io.BytesIO())
    handle.write(b"x" * MIB)
    assert threads() == []
    handle.write(b"x")
    assert threads() == ["ddpkit checksum"]
    handle.finish()
    assert threads() == []

    def writer(handle):
        handle.write(bytes(9 * MIB))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_hashed(io.BytesIO(), writer)
    assert threads() == []


def test_without_a_thread_all_is_hashed_on_the_spot(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(hashing.threading.Thread, "start", refuse)
    file = io.BytesIO()
    digest = write_hashed(file, lambda handle: [handle.write(bytes([n]) * MIB) for n in range(9)])
    assert digest == hashlib.sha256(file.getvalue()).hexdigest()


# ------------------------------------------------------------------------------------------------ in a commit


def files_read_again(monkeypatch, write, final):
    read = []
    real = storage._sha256
    monkeypatch.setattr(storage, "_sha256", lambda path: (read.append(path.name), real(path))[1])
    commit_directory(final, write)
    monkeypatch.setattr(storage, "_sha256", real)
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
