from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from ddpkit import hashing, storage
from ddpkit.checkpoint_hooks import torch_save
from ddpkit.errors import CheckpointError
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
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
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


# ------------------------------------------------------------------------------------------------ past the cache


def can_write_directly(folder):
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        descriptor = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    os.close(descriptor)
    return True


def write_directly(path, writer, write_at=os.pwrite):
    """Write a file past the cache; return its checksum and (bytes, offset, whether past the cache) of each write."""
    if not can_write_directly(path.parent):
        pytest.skip("this file system has no direct output")
    told = []

    def watched(descriptor, data, offset):
        is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        told.append((len(data), offset, is_direct))
        return write_at(descriptor, data, offset)

    with path.open("wb") as file:
        handle = HashedHandle(file, path=path, write_at=watched)
        try:
            writer(handle)
            handle.flush()
        finally:
            digest = handle.finish()
    return digest, told


@pytest.mark.parametrize(
    "sizes",
    [
        (MIB + 1,),
        (MIB, 1),
        (100, 3 * MIB, 7),
        (MIB - 5, 10, 4096, 9 * MIB),
        (4096, 2 * MIB - 4096),
        (16 * MIB,) * 3,
        (1000,) * 6000,
        (17 * MIB + 3,) * 2,
    ],
)
def test_a_large_file_is_written_past_the_cache_and_is_what_was_written(tmp_path, sizes):
    pieces = pieces_of(*sizes)
    digest, told = write_directly(tmp_path / "a", lambda handle: [handle.write(piece) for piece in pieces])
    content = (tmp_path / "a").read_bytes()
    assert content == b"".join(pieces)
    assert digest == hashlib.sha256(content).hexdigest()
    assert all(is_direct for _, _, is_direct in told)
    assert all(length % 4096 == 0 == offset % 4096 for length, offset, _ in told)
    assert bool(told) == (sizes != (MIB, 1))
    assert threads() == []


def test_memory_may_change_once_it_is_written_past_the_cache(tmp_path):
    piece = bytearray(5 * MIB)

    def writer(handle):
        for number in range(8):
            piece[:] = bytes([number]) * len(piece)
            handle.write(piece)
            assert handle.tell() == (number + 1) * len(piece)

    digest, told = write_directly(tmp_path / "a", writer)
    content = (tmp_path / "a").read_bytes()
    assert content == b"".join(bytes([number]) * len(piece) for number in range(8))
    assert digest == hashlib.sha256(content).hexdigest()
    assert len(told) > 10


def test_writes_that_fall_short_go_on_where_they_stopped(tmp_path):
    pieces = pieces_of(3 * MIB, 5 * MIB)
    digest, told = write_directly(
        tmp_path / "a",
        lambda handle: [handle.write(piece) for piece in pieces],
        lambda descriptor, data, offset: os.pwrite(descriptor, data[: 8192 if len(data) > 8192 else 77], offset),
    )
    assert (tmp_path / "a").read_bytes() == b"".join(pieces)
    assert digest == hashlib.sha256(b"".join(pieces)).hexdigest()
    assert {is_direct for _, _, is_direct in told} == {True, False}  # what is not aligned any more cannot be direct


def test_where_direct_output_is_refused_on_writing_the_cache_takes_it(tmp_path):
    def refuse(descriptor, data, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.pwrite(descriptor, data, offset)

    piece = os.urandom(9 * MIB)
    digest, told = write_directly(tmp_path / "a", lambda handle: handle.write(piece), refuse)
    assert (tmp_path / "a").read_bytes() == piece
    assert digest == hashlib.sha256(piece).hexdigest()
    assert [is_direct for _, _, is_direct in told].count(True) == 1


@pytest.mark.parametrize("at", [1, 3])
def test_a_full_disk_is_told_to_the_writer_and_nothing_is_called_whole(tmp_path, monkeypatch, at):
    written = []

    class Full(FileOperations):
        def write_at(self, descriptor, data, offset):
            written.append(offset)
            if len(written) >= at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write_at(descriptor, data, offset)

    if not can_write_directly(tmp_path):
        pytest.skip("this file system has no direct output")
    monkeypatch.setattr(storage, "FILES", Full())
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)])
    with pytest.raises(CheckpointError, match="no space left"):
        commit_directory(tmp_path / "CKPT+a", lambda folder: torch_save(model, folder / "model.ckpt"))
    assert len(written) == at  # nothing is tried after it
    assert [path.name for path in tmp_path.iterdir()] == ["probe"]
    assert threads() == []


@pytest.mark.parametrize(
    "more",
    [
        lambda handle: (handle.seek(5), handle.write(b"x")),
        lambda handle: handle.truncate(3 * MIB),
        lambda handle: os.pwrite(handle.fileno(), b"abcd", 7),
    ],
)
def test_who_does_more_than_append_to_a_large_file_gets_what_he_asked_for(tmp_path, more):
    piece = os.urandom(5 * MIB + 11)

    def writer(handle):
        handle.write(piece)
        more(handle)

    digest, told = write_directly(tmp_path / "a", writer)
    assert digest is None
    assert told
    with (tmp_path / "b").open("wb") as plain:
        plain.write(piece)
        plain.flush()
        more(plain)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_follows_a_flush_is_hashed_too(tmp_path):
    pieces = pieces_of(3 * MIB + 5, 3 * MIB)

    def writer(handle):
        handle.write(pieces[0])
        handle.flush()
        assert (tmp_path / "a").stat().st_size == len(pieces[0])
        handle.write(pieces[1])

    digest, _ = write_directly(tmp_path / "a", writer)
    assert (tmp_path / "a").read_bytes() == b"".join(pieces)
    assert digest == hashlib.sha256(b"".join(pieces)).hexdigest()


def test_an_error_of_the_writer_ends_the_threads_and_gives_no_checksum(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        handle = HashedHandle(file, path=tmp_path / "a")
        handle.write(bytes(9 * MIB))
        assert threads()
        digest = handle.finish()  # without a flush: the writer did not get there
    assert digest is None
    assert threads() == []


def test_a_kill_while_a_large_file_is_written_leaves_no_checkpoint_of_that_name(tmp_path):
    """A child dies at each of its first direct writes; the checkpoint before it stays the one that is found."""
    if not can_write_directly(tmp_path):
        pytest.skip("this file system has no direct output")
    script = """
import os, signal, sys, torch
from pathlib import Path
from ddpkit import storage
from ddpkit.checkpoint_hooks import torch_save
from ddpkit.errors import CheckpointError
class Dying(storage.FileOperations):
    count = 0
    def write_at(self, descriptor, data, offset):
        Dying.count += 1
        if Dying.count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_at(descriptor, data, offset)
model = torch.nn.Linear(2048, 1024)
final = Path(sys.argv[1]) / "CKPT+a"
storage.commit_directory(final, lambda folder: torch_save(model, folder / "model.ckpt"))
storage.FILES = Dying()
storage.commit_directory(final, lambda folder: torch_save(torch.nn.Linear(2048, 1024), folder / "model.ckpt"))
"""
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert verify(tmp_path / "CKPT+a", expect_manifest=True) == []
    assert [path.name[:5] for path in sorted(tmp_path.iterdir())] == [".tmp-", "CKPT+", "probe"]


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
