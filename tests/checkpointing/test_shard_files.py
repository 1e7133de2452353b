"""States in shards: what is written is what is read, by any number of ranks, and damage is seen."""

from __future__ import annotations

import json
import time
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ddpkit.base import FileSystem, StoredTensor, map_named
from ddpkit.checkpointing import shard_files, shard_writing, storage
from ddpkit.checkpointing.file_loading import load_file as load_content, load_lazily, safe_load
from ddpkit.checkpointing.safetensors_format import blocks_of, layout_of
from ddpkit.checkpointing.shard_files import shard_path
from ddpkit.errors import CheckpointError, CheckpointUsageError
from tests.checkpointing.sharded_checkpoints import state_of_many_kinds, write_sharded


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_equal(found, expected):
    told = []
    map_named(found, lambda name, value: told.append((name, value)))
    given = dict(told)
    map_named(expected, lambda name, value: told.append((name, value)))
    assert len(told) == 2 * len(given)
    for name, value in told:
        assert given[name].dtype == value.dtype, name
        assert given[name].shape == value.shape, name
        assert torch.equal(bits(given[name]), bits(value)), name


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_state_in_shards_is_read_as_it_was(tmp_path, count):
    state = state_of_many_kinds()
    path = write_sharded(tmp_path, "net", state, count)
    found = safe_load(path)
    assert_equal(found, state)
    assert found["groups"] == state["groups"]
    assert list(found) == list(state)
    assert len(list(tmp_path.glob("*.safetensors"))) == count


def test_any_rows_are_read(tmp_path, monkeypatch):
    """With pieces of a few bytes, so that rows begin and end inside of them."""
    monkeypatch.setattr(storage, "PIECE_BYTES", 48)
    monkeypatch.setattr(shard_files, "PIECE_BYTES", 48)
    wide = torch.arange(91).reshape(13, 7)
    path = write_sharded(tmp_path, "net", {"w": wide, "other": wide.float()}, 3)
    stored = load_lazily(path)
    for first in range(14):
        for count in range(14 - first):
            assert torch.equal(stored["w"].rows(first, count), wide[first : first + count])
            assert torch.equal(
                stored["other"].rows(first, count),
                wide[first : first + count].float(),
            )


def test_nothing_is_read_but_the_rows_that_are_asked_for(tmp_path, monkeypatch):
    read = []
    piece = shard_files._Shard._read_piece

    def note(shard, file, number, target):
        read.append((shard.path.name, number))
        piece(shard, file, number, target)

    monkeypatch.setattr(storage, "PIECE_BYTES", 4096)
    monkeypatch.setattr(shard_files, "PIECE_BYTES", 4096)
    monkeypatch.setattr(shard_files._Shard, "_read_piece", note)
    path = write_sharded(tmp_path, "net", {"w": torch.ones(4000, 4)}, 2)
    stored = load_lazily(path)
    assert not read
    stored["w"].rows(2000, 10)
    assert {name for name, _ in read} == {"net-shard-1-of-2.safetensors"}
    assert len(read) == 1


def test_a_shard_is_a_plain_file_of_safetensors(tmp_path):
    wide = torch.arange(35.0).reshape(5, 7)
    write_sharded(tmp_path, "net", {"w": wide, "flags": wide > 3}, 2)
    parts = [load_file(shard_path(tmp_path / "net.ckpt", rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat([part["w"] for part in parts]), wide)
    assert torch.equal(torch.cat([part["flags"] for part in parts]), wide > 3)


def test_on_the_meta_device_no_shard_is_read(tmp_path):
    path = write_sharded(tmp_path, "net", {"w": torch.ones(4, 2), "b": torch.tensor(1.0)}, 2)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    found = safe_load(path, "meta")
    assert {name: (value.device.type, value.shape) for name, value in found.items()} == {
        "w": ("meta", (4, 2)),
        "b": ("meta", ()),
    }


def test_a_map_location_that_is_no_device_is_refused(tmp_path):
    path = write_sharded(tmp_path, "net", {"w": torch.ones(4)}, 2)
    with pytest.raises(CheckpointUsageError, match="is no device"):
        safe_load(path, {"cpu": "cpu"})


# ------------------------------------------------------------------------------------- damage


def damages(path):
    """Yield names of damages, and functions that do them."""
    own = [shard_path(path, rank, 2) for rank in range(2)]
    other = path.parent / "other"

    def flip(place):
        raw = bytearray(own[1].read_bytes())
        raw[place] ^= 4
        own[1].write_bytes(raw)

    def swap():
        first = own[0].read_bytes()
        own[0].write_bytes(own[1].read_bytes())
        own[1].write_bytes(first)

    yield "missing", own[1].unlink
    yield "cut", lambda: own[1].write_bytes(own[1].read_bytes()[:-1])
    yield "longer", lambda: own[1].write_bytes(own[1].read_bytes() + b"0")
    yield "empty", lambda: own[0].write_bytes(b"")
    yield "swapped", swap
    yield "of another checkpoint", lambda: own[0].write_bytes((other / own[0].name).read_bytes())
    for place in (0, 9, 100, -1, -100, -600):
        yield f"bit of byte {place}", lambda place=place: flip(place)


def names_of_damages():
    from pathlib import Path

    return [name for name, _ in damages(Path("net.ckpt"))]


@pytest.mark.parametrize("name", names_of_damages())
def test_a_damaged_shard_is_seen_by_whoever_reads_it(tmp_path, name):
    """Also where nothing has compared the files with the manifest."""
    (tmp_path / "other").mkdir()
    wide = torch.arange(400.0).reshape(40, 10)
    path = write_sharded(tmp_path, "net", {"w": wide}, 2)
    write_sharded(tmp_path / "other", "net", {"w": wide + 1}, 2)
    dict(damages(path))[name]()
    with pytest.raises(CheckpointError, match="net-shard-"):
        safe_load(path)


def hostile_changes():
    """Yield what a file could claim of its shards."""
    yield "format", lambda content: content["__shards__"].update(format=2)
    yield "no dict", lambda content: content.update({"__shards__": [1]})
    yield "no state", lambda content: content.pop("state")
    yield "no rows", lambda content: content["__shards__"].pop("rows")
    yield "rows of another kind", lambda content: content["__shards__"].update(rows={"w": 3})
    yield "no such rows", lambda content: content["__shards__"].update(rows={})
    yield "no shards", lambda content: content["__shards__"].update(shards=[])
    yield "shards of another kind", lambda content: content["__shards__"].update(shards=[{}, {}])
    yield "a shard too few", lambda content: content["__shards__"]["shards"].pop()
    for column, value in ((0, -1), (0, 7), (1, 3), (2, -1), (3, -8), (3, 1 << 62)):
        yield (
            f"column {column} is {value}",
            lambda content, column=column, value=value: content["__shards__"]["rows"]["w"][
                1, column
            ].fill_(value),
        )
    yield (
        "a huge tensor",
        lambda content: content["state"].update(w=torch.empty(1 << 50, 10, device="meta")),
    )
    yield (
        "a tensor without rows",
        lambda content: content["state"].update(w=torch.empty((), device="meta")),
    )


@pytest.mark.parametrize("name", [name for name, _ in hostile_changes()])
def test_a_file_that_lies_of_its_shards_is_refused(tmp_path, name):
    path = write_sharded(tmp_path, "net", {"w": torch.ones(40, 10)}, 2)
    content = load_content(path)
    dict(hostile_changes())[name](content)
    torch.save(content, path)
    with pytest.raises(CheckpointError):
        safe_load(path)


# ------------------------------------------------------------------------------------- writing


def test_a_shard_is_written_in_blocks(tmp_path):
    """Numpy's memory is traced, and torch's copies would go through none: blocks are views."""
    tensor = torch.ones(1 << 22)
    assert max(len(block) for block in blocks_of(tensor)) == storage.BLOCK_BYTES
    begin = tensor.data_ptr()
    for number, block in enumerate(blocks_of(tensor)):
        array = np.frombuffer(block, np.uint8)
        assert array.ctypes.data == begin + number * storage.BLOCK_BYTES
    tracemalloc.start()
    try:
        write_sharded(tmp_path, "net", {"w": tensor}, 2)
        assert tracemalloc.get_traced_memory()[1] < storage.BLOCK_BYTES
    finally:
        tracemalloc.stop()


def test_large_elements_come_first(tmp_path):
    flags = torch.ones(3, dtype=torch.bool)
    tensors = {"a": flags, "b": torch.ones(2), "c": torch.ones(1).double()}
    layout = layout_of(tensors, {})
    assert list(layout.starts) == ["c", "b", "a"]
    assert all(start % 8 == 0 for start in layout.starts.values())
    assert json.loads(layout.header[8:])["a"]["data_offsets"] == [16, 19]


def test_a_directory_that_another_machine_has_made_is_waited_for(tmp_path, monkeypatch):
    nfs = FileSystem("nfs4", "/")
    monkeypatch.setattr(shard_writing, "file_system_here", lambda path: nfs)
    monkeypatch.setattr(shard_writing, "VISIBLE_SECONDS", 0.05)
    monkeypatch.setattr(shard_writing, "LOOK_SECONDS", 0.01)
    looks = []
    with pytest.raises(CheckpointError, match=r"after 0 s\. .* must share the folder.*ckpt_layout"):
        shard_writing.write_shards(
            tmp_path / "nowhere", {}, {}, 0, 1, lambda: looks.append(time.monotonic())
        )
    assert looks[-1] - looks[0] > 0.02
    staging = tmp_path / "there later"
    shard_writing.write_shards(staging, {}, {}, 0, 1, staging.mkdir)


def test_a_directory_on_a_disk_of_another_machine_is_not_waited_for(tmp_path, monkeypatch):
    disk = FileSystem("xfs", "/scratch")
    monkeypatch.setattr(shard_writing, "file_system_here", lambda path: disk)
    looks = []
    with pytest.raises(CheckpointError, match=r"own disk .* \(xfs, mounted at /scratch\)"):
        shard_writing.write_shards(
            tmp_path / "nowhere", {}, {}, 0, 1, lambda: looks.append("given up?")
        )
    assert looks == ["given up?"]


def test_a_shard_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "net-shard-0-of-1.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="saving the recoverable 'net': IsADirectoryError"):
        shard_writing.write_shards(tmp_path, {"net": {}}, {"net": {}}, 0, 1)


def test_a_stored_tensor_says_what_it_is(tmp_path):
    path = write_sharded(tmp_path, "net", {"w": torch.ones(4, 2)}, 2)
    stored = load_lazily(path)["w"]
    assert isinstance(stored, StoredTensor)
    assert repr(stored) == f"<an InShards w of {path}, (4, 2)>"
