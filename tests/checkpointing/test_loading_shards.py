"""What is loaded from shards, by all that loads checkpoints: one process here, with all rows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ddpkit.checkpointing import TrainedOnly, find_weights, read_weights
from ddpkit.checkpointing.shard_files import shard_path
from ddpkit.checkpoints import (
    Checkpointer,
    average_checkpoints,
    torch_parameter_transfer,
    torch_recovery,
)
from ddpkit.ema import WeightAverage
from ddpkit.errors import CheckpointError
from ddpkit.parameter_transfer import Pretrainer
from tests.checkpointing.sharded_checkpoints import put_in_shards, write_sharded

SHARDS = 3


def make_net(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(net, optimizer, average=None, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(3, 5)).square().sum().backward()
        optimizer.step()
        if average is not None:
            average.update()


class Trained:
    """A net, its optimizer and its average, with what saves them."""

    def __init__(self, folder, seed=1, steps=0):
        self.net = make_net(seed)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.average = WeightAverage(nn.ModuleDict({"net": self.net}), 0.5)
        train(self.net, self.optimizer, self.average, steps)
        self.checkpointer = Checkpointer(
            folder,
            {"net": self.net, "optimizer": self.optimizer, "ema": self.average},
        )

    def save(self, name, **meta):
        saved = self.checkpointer.save_checkpoint(meta, name=name)
        put_in_shards(saved.path, ["net", "optimizer", "ema"], SHARDS)
        return saved.path

    def state(self):
        return copy.deepcopy(
            [self.net.state_dict(), self.optimizer.state_dict(), self.average.state_dict()]
        )


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_all_that_a_checkpoint_has_in_shards_is_recovered(tmp_path):
    first = Trained(tmp_path, steps=2)
    path = first.save("one")
    assert len(list(path.glob("*.safetensors"))) == 3 * SHARDS
    second = Trained(tmp_path, seed=2, steps=1)
    assert second.checkpointer.recover_if_possible().path == path
    assert_same(second.state(), first.state())
    torch.manual_seed(0)
    train(first.net, first.optimizer, first.average)
    torch.manual_seed(0)
    train(second.net, second.optimizer, second.average)
    assert_same(second.state(), first.state())


@pytest.mark.costly
def test_the_best_is_found_and_the_rest_deleted(tmp_path):
    trained = Trained(tmp_path)
    states = {}
    for number, loss in enumerate((3.0, 1.0, 2.0)):
        train(trained.net, trained.optimizer)
        trained.save(str(number), loss=loss, unixtime=100.0 + number)
        states[number] = copy.deepcopy(trained.net.state_dict())
    found = trained.checkpointer.recover_if_possible(min_key="loss")
    assert found.path.name == "CKPT+1"
    assert_same(trained.net.state_dict(), states[1])
    trained.checkpointer.delete_checkpoints(num_to_keep=1, min_keys=["loss"])
    assert {path.name for path in tmp_path.glob("CKPT*")} == {"CKPT+1", "CKPT+2"}


def test_weights_for_a_new_run(tmp_path):
    first = Trained(tmp_path, steps=1)
    path = first.save("one")
    source = find_weights(str(tmp_path))
    stored = read_weights(source.files["net"], lazily=True)
    whole = read_weights(source.files["net"])
    assert {name: value.shape for name, value in stored.items()} == {
        name: value.shape for name, value in whole.items()
    }
    assert_same(dict(whole), dict(first.net.state_dict()))
    for load in (
        lambda net: torch_parameter_transfer(net, path / "net.ckpt"),
        lambda net: torch_recovery(net, path / "net.ckpt", end_of_epoch=True),
        lambda net: Pretrainer(
            loadables={"net": net},
            paths={"net": str(path / "net.ckpt")},
        ).load_collected(),
    ):
        net = make_net(3)
        load(net)
        assert_same(net.state_dict(), first.net.state_dict())


def test_what_does_not_fit_is_told_by_name(tmp_path):
    path = Trained(tmp_path, steps=1).save("one")
    other = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(CheckpointError, match=r"does not fit this Sequential(.|\n)*2\.weight"):
        torch_recovery(other, path / "net.ckpt", end_of_epoch=True)
    with pytest.raises(CheckpointError, match=r"2\.weight \(2, 4\) in the file, \(3, 4\)"):
        torch_parameter_transfer(other, path / "net.ckpt")


@pytest.mark.parametrize("name", ["net", "optimizer", "ema"])
def test_a_damaged_shard_does_not_seem_to_be_another_model(tmp_path, name):
    first = Trained(tmp_path, steps=1)
    path = first.save("one")
    shard = shard_path(path / f"{name}.ckpt", 1, SHARDS)
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    second = Trained(tmp_path, seed=2, steps=1)
    second.checkpointer.verify_mode = "off"
    with pytest.raises(CheckpointError, match=r"fails its checksum") as caught:
        second.checkpointer.recover_if_possible()
    assert str(shard) in str(caught.value)
    assert "does not fit" not in str(caught.value)


def test_averages_over_checkpoints(tmp_path):
    trained = Trained(tmp_path)
    found = []
    for number in range(2):
        train(trained.net, trained.optimizer)
        trained.save(str(number))
        found.append(copy.deepcopy(trained.net.state_dict()))
    average = average_checkpoints(trained.checkpointer.find_checkpoints(), "net")
    expected = (found[0]["0.weight"] + found[1]["0.weight"]) / 2
    assert torch.equal(average["0.weight"], expected)


def test_a_checkpoint_without_its_base(tmp_path):
    net = make_net()
    net[0].requires_grad_(requires_grad=False)
    trained = TrainedOnly(net)
    trained.begin()
    trained.refresh()
    path = write_sharded(tmp_path, "net", trained.state_dict(), SHARDS)
    other = make_net()  # of the same base
    with torch.no_grad():
        other[2].weight.zero_()
    trained = TrainedOnly(other)
    trained.load(other, path, end_of_epoch=True).finish()
    assert_same(other.state_dict(), net.state_dict())
