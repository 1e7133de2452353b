"""``python -m ddpkit ckpt`` on checkpoints of which each rank has written its shard."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.sharded_checkpoints import most_above
from ddpkit.cli.ckpt import run
from ddpkit.errors import CheckpointError
from tests.checkpointing.sharded_checkpoints import save_sharded

MEGABYTE = 1 << 20
SIZE = 96  # megabytes of the state whose memory is measured


def small_state():
    return {
        "weight": torch.arange(35.0).reshape(7, 5),
        "bias": torch.ones(7, dtype=torch.bfloat16),
        "flags": torch.ones(3, dtype=torch.bool),
        "count": torch.tensor(3),
    }


@pytest.fixture
def checkpoint(tmp_path):
    return save_sharded(tmp_path, {"net": small_state()}, 2)


def load(path):
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", ["net.safetensors", "net.pt"])
def test_a_plain_file_is_exported(checkpoint, tmp_path, capsys, name):
    output = tmp_path / name
    assert run(["export", str(checkpoint), "--recoverable", "net", "--output", str(output)]) == 0
    found = load(output)
    assert found.keys() == small_state().keys()
    for key, value in small_state().items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value)
    assert "4 tensor(s)" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CKPT+one", name]


def test_an_average_of_several(checkpoint, tmp_path):
    other = {
        name: value + 2 if name == "weight" else value for name, value in small_state().items()
    }
    save_sharded(tmp_path, {"net": other}, 3, "unixtime: 2.5\n", "CKPT+two")
    output = tmp_path / "mean.pt"
    assert run(["average", str(tmp_path), "--recoverable", "net", "--output", str(output)]) == 0
    assert torch.equal(load(output)["weight"], small_state()["weight"] + 1)


def test_show_tells_whole_shapes(checkpoint, capsys):
    assert run(["show", str(checkpoint), "--tensors"]) == 0
    told = capsys.readouterr().out
    assert "weight  float32 7 x 5" in told
    assert "bias    bfloat16 7" in told
    assert "46 number(s) in 4 tensor(s)" in told
    assert told.count("rows of one rank, as a file of safetensors") == 2


def test_verify_and_export_see_damage(checkpoint, tmp_path, capsys):
    assert run(["verify", str(checkpoint)]) == 0
    assert "whole (5 file(s)" in capsys.readouterr().out
    shard = checkpoint / "net-shard-1-of-2.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert run(["verify", str(checkpoint)]) == 1
    assert f"damaged: {shard.name} fails its checksum" in capsys.readouterr().out
    words = ["export", str(checkpoint), "--recoverable", "net", "--output", str(tmp_path / "a.pt")]
    with pytest.raises(CheckpointError, match=rf"is damaged: {shard.name}"):
        run(words)
    assert not (tmp_path / "a.pt").exists()


# ------------------------------------------------------------------------------------- memory


@pytest.mark.costly
@pytest.mark.parametrize("name", ["net.safetensors", "net.pt"])
def test_an_export_takes_a_block_of_memory(tmp_path, name):
    """The tensors are many times as large as what is held."""
    state = {f"weight {number}": torch.ones(SIZE // 3, MEGABYTE // 4) for number in range(3)}
    checkpoint = save_sharded(tmp_path, {"net": state}, 2)
    del state
    output = str(tmp_path / name)
    words = ["export", str(checkpoint), "--recoverable", "net", "--output", output]
    assert most_above(lambda: run(words)) < SIZE // 3 * MEGABYTE
