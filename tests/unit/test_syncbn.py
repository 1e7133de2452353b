"""One process: it is BatchNorm, and conversion keeps everything that it should."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from ddpkit.errors import ConfigError
from ddpkit.syncbn import SyncBatchNorm, convert_sync_batchnorm


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 2), (5, 3, 2, 2, 2)])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}],
)
def test_it_is_batchnorm_in_one_process(shape, options):
    torch.manual_seed(0)
    ours = SyncBatchNorm(3, **options)
    theirs = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[
        len(shape)
    ](3, **options)
    for training in (True, True, False):
        ours.train(training)
        theirs.train(training)
        x = torch.randn(shape)
        assert torch.equal(ours(x), theirs(x))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, ours.state_dict()[key])


def test_bad_input():
    with pytest.raises(ConfigError, match=r"expected at least 2D input .* got shape \(3,\)"):
        SyncBatchNorm(3)(torch.zeros(3))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        SyncBatchNorm(3)(torch.zeros(1, 3))


class Activated(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


def model():
    shared = nn.BatchNorm1d(4)
    return nn.ModuleDict(
        {
            "conv": nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, eps=0.1, momentum=None)),
            "twice": nn.Sequential(shared, nn.ReLU(), shared),
            "also": shared,
            "plain": nn.BatchNorm3d(2, affine=False, track_running_stats=False),
            "instance": nn.InstanceNorm1d(4, track_running_stats=True),
            "torchs": nn.SyncBatchNorm(4),
            "ours": SyncBatchNorm(4),
        }
    )


def test_conversion_keeps_objects_keys_and_mode():
    net = model()
    net["also"].eval()
    before = dict(net.named_parameters()), dict(net.named_buffers()), list(net.state_dict())
    kept = net["instance"], net["torchs"], net["ours"]
    assert convert_sync_batchnorm(net) is net
    after = dict(net.named_parameters()), dict(net.named_buffers()), list(net.state_dict())
    assert before[2] == after[2]
    assert all(before[0][name] is after[0][name] for name in before[0])
    assert all(before[1][name] is after[1][name] for name in before[1])
    assert (net["instance"], net["torchs"], net["ours"]) == kept
    assert type(net["conv"][1]) is SyncBatchNorm
    assert (net["conv"][1].eps, net["conv"][1].momentum, net["conv"][1].training) == (
        0.1,
        None,
        True,
    )
    assert not net["also"].training
    assert type(net["plain"]) is SyncBatchNorm
    assert not net["plain"].track_running_stats


def test_a_layer_that_is_there_twice_stays_one():
    net = convert_sync_batchnorm(model())
    assert type(net["also"]) is SyncBatchNorm
    assert net["twice"][0] is net["twice"][2] is net["also"]


def test_a_second_conversion_changes_nothing():
    net = convert_sync_batchnorm(model())
    layers = dict(net.named_modules())
    convert_sync_batchnorm(net)
    assert all(layers[name] is layer for name, layer in net.named_modules())


def test_a_bare_batchnorm_is_returned_new_with_its_hooks():
    calls = []
    layer = nn.BatchNorm1d(3, dtype=torch.float64)
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    layer.note = "mine"
    twin = convert_sync_batchnorm(layer)
    assert type(twin) is SyncBatchNorm
    assert twin.weight is layer.weight
    assert twin.note == "mine"
    assert twin(torch.randn(4, 3, dtype=torch.float64)).dtype is torch.float64
    handle.remove()
    twin(torch.randn(4, 3, dtype=torch.float64))
    assert calls == [1]


def test_a_layer_with_its_own_forward_is_left(caplog):
    net = nn.Sequential(Activated(3))
    with caplog.at_level("WARNING"):
        convert_sync_batchnorm(net)
    assert type(net[0]) is Activated
    assert "module '0' (Activated)" in caplog.text


def test_copies_and_pickles():
    net = convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    x = torch.randn(4, 2)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(x), net(x))
        assert "SyncBatchNorm(3, eps=1e-05" in repr(twin)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripted_modules_are_left(caplog):
    scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(2)))
    net = convert_sync_batchnorm(nn.Sequential(scripted, nn.BatchNorm1d(2)))
    assert net[0] is scripted
    assert isinstance(net[0], torch.jit.ScriptModule)
    assert "module '0.0'" in caplog.text
    assert type(net[1]) is SyncBatchNorm
