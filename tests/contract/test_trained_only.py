"""Checkpoints that hold what is trained: the base weights come from elsewhere, and are compared."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpkit.checkpoints import Checkpointer, average_checkpoints, safe_load
from ddpkit.cli.ckpt import run as ckpt
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.parameter_transfer import Pretrainer
from tests.reading_blocks import block_rows
from tests.recipes import QUIET, Regression, assert_same, points, weights

DATA = points(8)
BASE = ("base.weight", "base.bias", "norm.weight", "norm.bias")


class Adapted(nn.Module):
    """A frozen base with an adapter beside it; its batch norm counts."""

    def __init__(self, seed=1):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.base = nn.Linear(3, 64).double()
        self.norm = nn.BatchNorm1d(64).double()
        self.down = nn.Linear(64, 1).double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
        self.base.requires_grad_(False)
        self.norm.requires_grad_(False)

    def forward(self, rows):
        return self.down(torch.tanh(self.norm(self.base(rows))))


class Saving(Regression):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage.name == "TRAIN":
            self.checkpointer.save_checkpoint()


def begin(folder, epochs, *, net=None, cls=Saving, trained_only=("net",), **options):
    """Run as a script does that is started again."""
    net = Adapted() if net is None else net
    counter = EpochCounter(epochs)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter}, trained_only=trained_only)
    brain = cls(
        {"net": net},
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        run_opts={**QUIET, **options},
        checkpointer=checkpointer,
    )
    brain.fit(counter, DATA, train_loader_kwargs={"batch_size": 2})
    return brain


def newest(folder, name="net"):
    return safe_load(
        max(folder.glob("CKPT*"), key=lambda path: path.stat().st_mtime) / f"{name}.ckpt"
    )


def test_a_checkpoint_holds_what_is_trained_and_the_buffers(tmp_path):
    begin(tmp_path, 1)
    state = newest(tmp_path)
    assert set(state) == {
        "down.weight",
        "down.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "__base__",
    }
    assert set(state["__base__"]) == set(BASE)


@pytest.mark.costly
@pytest.mark.parametrize("options", [{"ema_decay": 0.5}, {"ckpt_async": False}])
def test_a_run_that_goes_on_is_the_uninterrupted_one(tmp_path, options):
    whole = begin(tmp_path / "a", 2, trained_only=(), **options)
    begin(tmp_path / "b", 1, **options)
    again = begin(tmp_path / "b", 2, **options)
    assert_same(weights(again), weights(whole))
    if "ema_decay" in options:
        average = newest(tmp_path / "b", "ema")
        expected = newest(tmp_path / "a", "ema")
        left_out = set(average.pop("__base__"))
        assert left_out == {f"net.{name}" for name in BASE}
        assert_same(average, {name: expected[name] for name in expected if name not in left_out})


def test_another_base_is_refused_with_the_names_that_differ(tmp_path):
    begin(tmp_path, 1)
    net = Adapted()
    with torch.no_grad():
        net.base.weight[3, 1] += 1e-9
    with pytest.raises(CheckpointError) as caught:
        begin(tmp_path, 2, net=net)
    words = str(caught.value)
    assert "other base   base.weight: float64 (64, 3)" in words
    assert "base.bias" not in words
    assert "Load the base with which this was trained: before fit, or with --init_from" in words
    assert isinstance(caught.value, ConfigError)


@pytest.mark.costly
def test_the_base_may_come_from_init_from_at_every_start(tmp_path, caplog):
    caplog.set_level("INFO", logger="ddpkit")
    torch.save({name: Adapted().state_dict()[name] for name in BASE}, tmp_path / "base.pt")
    options = {"init_from": tmp_path / "base.pt", "init_skip": "down.*,norm.*"}
    base = Adapted()
    other = Adapted(seed=2)
    other.down.load_state_dict(base.down.state_dict())
    begin(tmp_path / "run", 1, net=other, **options)
    again = begin(tmp_path / "run", 2, net=Adapted(seed=3), **options)
    whole = begin(tmp_path / "whole", 2)
    assert_same(weights(again), weights(whole))
    assert (
        "as the base; what is trained comes from the checkpoint"
        in block_rows(caplog.text)["init_from"]
    )


@pytest.mark.costly
def test_the_base_may_be_in_a_checkpoint_that_the_run_has_moved_away(tmp_path):
    begin(tmp_path / "run", 1, trained_only=())
    (old,) = (tmp_path / "run").glob("CKPT+*")
    old = old.rename(old.with_name("CKPT+first"))  # a later one may be of the same second
    whole = begin(tmp_path / "whole", 2, net=Adapted(seed=2), init_from=old)
    begin(tmp_path / "run", 1, net=Adapted(seed=3), init_from=old, resume="never")
    assert not old.exists()
    again = begin(tmp_path / "run", 2, net=Adapted(seed=4), init_from=old)
    assert_same(weights(again), weights(whole))


class Thawing(Saving):
    """Trains the first layer in epoch 2 alone, and saves after it."""

    saves_from = 1

    def on_stage_start(self, stage, epoch=None):
        self.modules.net.base.requires_grad_(epoch == 2)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage.name == "TRAIN" and epoch >= self.saves_from:
            self.checkpointer.save_checkpoint()


class SavesLate(Thawing):
    saves_from = 3


@pytest.mark.costly
@pytest.mark.parametrize("cls", [SavesLate, pytest.param(Thawing, marks=pytest.mark.slow)])
def test_what_was_trained_and_is_frozen_again_is_saved(tmp_path, cls):
    whole = begin(tmp_path / "a", 5, cls=cls, trained_only=())
    for epochs in (3, 4):
        begin(tmp_path / "b", epochs, cls=cls)
        assert set(newest(tmp_path / "b")["__base__"]) == {"norm.weight", "norm.bias"}
    assert_same(weights(begin(tmp_path / "b", 5, cls=cls)), weights(whole))


def test_a_run_that_saved_whole_goes_on_saving_what_it_has_loaded(tmp_path):
    begin(tmp_path, 1, trained_only=())
    begin(tmp_path, 2, net=Adapted())
    assert "__base__" not in newest(tmp_path)
    assert "base.weight" in newest(tmp_path)


def test_a_checkpointer_without_the_argument_loads_what_another_has_saved(tmp_path):
    brain = begin(tmp_path, 1)
    net = Adapted()
    Checkpointer(tmp_path, {"net": net}).recover_if_possible()
    assert_same(net.state_dict(), brain.modules.net.state_dict())
    with pytest.raises(CheckpointError, match="other base"):
        Checkpointer(tmp_path, {"net": Adapted(seed=2)}).recover_if_possible()


def test_new_runs_begin_from_it_on_the_same_base_alone(tmp_path, caplog):
    brain = begin(tmp_path, 1)
    net = Adapted()
    (file,) = tmp_path.glob("CKPT*/net.ckpt")
    Pretrainer(loadables={"net": net}, paths={"net": file}).load_collected()
    assert_same(net.state_dict(), brain.modules.net.state_dict())
    with pytest.raises(CheckpointError, match="other base   net.base.weight"):
        begin(tmp_path / "new", 1, net=Adapted(seed=2), init_from=file.parent)


def test_an_average_is_of_what_is_trained_and_of_one_base(tmp_path):
    begin(tmp_path / "a", 2)
    begin(tmp_path / "b", 1, net=Adapted(seed=2))
    found = Checkpointer(tmp_path / "a").list_checkpoints()
    average = average_checkpoints(found, "net")
    states = [safe_load(one.paramfiles["net"]) for one in found]
    expected = (states[0]["down.weight"] + states[1]["down.weight"]) / 2
    torch.testing.assert_close(average["down.weight"], expected)
    assert "__base__" not in average
    others = Checkpointer(tmp_path / "b").list_checkpoints()
    with pytest.raises(ConfigError, match="two bases, which differ in 4 weight"):
        average_checkpoints([*found, *others], "net")


def test_an_export_says_what_it_lacks_and_joins_the_base_if_it_is_the_right_one(tmp_path, capsys):
    brain = begin(tmp_path / "a", 1)
    torch.save(Adapted().state_dict(), tmp_path / "base.pt")
    torch.save(Adapted(seed=2).state_dict(), tmp_path / "other.pt")
    words = ["export", str(tmp_path / "a"), "--recoverable", "net", "--output"]
    assert ckpt([*words, str(tmp_path / "part.pt")]) == 0
    assert (
        "without its base, 4 tensor(s) from elsewhere: --base FILE adds them"
        in capsys.readouterr().out
    )
    assert set(torch.load(tmp_path / "part.pt")).isdisjoint(BASE)
    assert ckpt([*words, str(tmp_path / "all.pt"), "--base", str(tmp_path / "base.pt")]) == 0
    assert_same(torch.load(tmp_path / "all.pt"), dict(brain.modules.net.state_dict()))
    with pytest.raises(
        CheckpointError, match=r"other.pt is not the base of this checkpoint: 4 of 4"
    ):
        ckpt([*words, str(tmp_path / "no.pt"), "--base", str(tmp_path / "other.pt")])
    assert not (tmp_path / "no.pt").exists()
    assert ckpt(["show", str(tmp_path / "a")]) == 0
    assert "without its base: 4 tensor(s) from elsewhere, by fingerprint" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["none"], "'none' is no recoverable"),
        (["counter"], "'counter' is an EpochCounter"),
        ("net", "is no list of names"),
    ],
)
def test_what_is_no_module_is_refused_before_training(tmp_path, names, words):
    with pytest.raises(ConfigError, match=words):
        begin(tmp_path, 1, trained_only=names)


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "checkpoints.md"


@pytest.mark.costly
def test_the_adapters_of_the_page_go_on_with_their_base(tmp_path, monkeypatch):
    (text,) = re.findall(r"```py\n(# adapters.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "adapters.py").write_text(text)
    base = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    torch.save(base.state_dict(), tmp_path / "base.pt")
    monkeypatch.chdir(tmp_path)
    for epochs in ("1", "2"):
        monkeypatch.setattr("sys.argv", ["adapters.py", "base.pt", "4", epochs])
        runpy.run_path("adapters.py")
    assert len(newest(tmp_path / "save")["__base__"]) == 16
    torch.save(nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))).state_dict(), "base.pt")
    with pytest.raises(CheckpointError, match="other base   0.layer.weight"):
        runpy.run_path("adapters.py")
