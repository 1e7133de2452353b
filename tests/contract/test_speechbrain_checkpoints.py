"""Directories that SpeechBrain has written: a run goes on from them, and the command line
understands them.

They are written here by hand, as SpeechBrain 1.0.3, 1.1.0 and 1.1.2 write them (compared with real
ones of the same recipe: the three differ in nothing but which meta they can read again), and as 0.5
did, whose ``brain.ckpt`` has no ``optimizer_step``.
"""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
import yaml
from torch import nn
from torch.nn.parallel import DataParallel

from ddpkit.base.plain_yaml import UnreadableValue
from ddpkit.checkpoints import (
    Checkpointer,
    average_checkpoints,
    mark_as_loader,
    mark_as_saver,
    mark_as_transfer,
    register_checkpoint_hooks,
)
from ddpkit.cli import main
from ddpkit.dataloader import LoopedLoader, make_dataloader
from ddpkit.epoch_loop import EpochCounter, EpochCounterWithStopper
from ddpkit.errors import CheckpointError
from ddpkit.types import Stage
from tests.recipes import QUIET, Regression, assert_same, linear, points

VERSIONS = ("0.5.16", "1.0.3", "1.1.0", "1.1.2")
BATCHES = 5  # of an epoch: ten samples, two at a time

# What yaml.dump of SpeechBrain 1.0 made of numpy.float64(0.5) under numpy 1 and 2, of a tuple and
# of a path.
NUMPY_SCALAR = """\
loss: !!python/object/apply:{module}.multiarray.scalar
- !!python/object/apply:numpy.dtype
  args:
  - f8
  - false
  - true
  state: !!python/tuple
  - 3
  - <
  - null
  - null
  - null
  - -1
  - -1
  - 0
- !!binary |
  AAAAAAAA4D8=
shape: !!python/tuple
- 1
- 2
"""
TENSOR = """\
loss: !!python/object/apply:torch._utils._rebuild_tensor_v2
- !!python/object/apply:torch.storage._load_from_bytes
  - !!binary |
    gAKKCmz8nEb5IGqoUBkugAJN6QMu
- 0
- !!python/tuple []
- !!python/tuple []
- false
- !!python/object/apply:collections.OrderedDict
  - []
"""


# -------------------------------------------------------------------------------- what recipes have


@register_checkpoint_hooks
class NewBob:
    """A scheduler with hooks of its own, as SpeechBrain's are."""

    def __init__(self, initial_value):
        self.hyperparam_value = initial_value
        self.metric_values = []
        self.current_patient = 0

    @mark_as_saver
    def save(self, path):
        data = {
            "hyperparam_value": self.hyperparam_value,
            "metric_values": self.metric_values,
            "current_patient": self.current_patient,
        }
        torch.save(data, path)

    @mark_as_loader
    def load(self, path, end_of_epoch=False):
        del end_of_epoch
        data = torch.load(path)
        self.hyperparam_value = data["hyperparam_value"]
        self.metric_values = data["metric_values"]
        self.current_patient = data["current_patient"]


@register_checkpoint_hooks
class Normalization(nn.Module):
    """A module whose hooks save something else than its parameters."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.glob_mean = torch.zeros(3)

    @mark_as_saver
    def _save(self, path):
        torch.save({"count": self.count, "glob_mean": self.glob_mean, "spk_dict_mean": {}}, path)

    @mark_as_transfer
    @mark_as_loader
    def _load(self, path, end_of_epoch=False):
        del end_of_epoch
        state = torch.load(path, map_location="cpu")
        self.count = state["count"]
        self.glob_mean = state["glob_mean"]


class Recipe(Regression):
    """Notes what it starts from."""

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN and not hasattr(self, "start"):
            self.start = {
                "epoch": epoch,
                "step": self.step,
                "optimizer_step": self.optimizer_step,
                "weights": {
                    name: value.clone() for name, value in self.raw_modules.net.state_dict().items()
                },
                "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            }


class Source:
    """The state that was saved: one network and its Adam after some steps."""

    def __init__(self, seed=1):
        self.net = linear(seed=seed)
        self.optimizer = adam(self.net.parameters())
        for inputs, targets in points(4, seed=seed):
            nn.functional.mse_loss(self.net(inputs), targets).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def write_speechbrain(
    folder,
    name,
    source,
    *,
    epoch,
    unixtime,
    step=0,
    version="1.1.2",
    meta="",
    **files,
):
    """Write one directory, file by file in SpeechBrain's order: the meta first. Without ``step``:
    an epoch's end.
    """
    path = folder / f"CKPT+{name}"
    path.mkdir(parents=True)
    intra = bool(step)
    head = "# yamllint disable\n" + ("brain_intra_epoch_ckpt: true\n" if intra else "")
    text = f"{head}end-of-epoch: {str(not intra).lower()}\n{meta}unixtime: {unixtime}\n"
    (path / "CKPT.yaml").write_text(text)
    torch.save(source.net.state_dict(), path / "model.ckpt")
    (path / "counter.ckpt").write_text(str(epoch))
    metrics = {"hyperparam_value": 0.025, "metric_values": [0.75, 0.5], "current_patient": 1}
    torch.save(metrics, path / "scheduler.ckpt")
    torch.save(
        {"count": 40, "glob_mean": torch.ones(3), "spk_dict_mean": {}},
        path / "normalizer.ckpt",
    )
    torch.save(source.optimizer.state_dict(), path / "optimizer.ckpt")
    brain = {
        "avg_train_loss": 0.25 if intra else 0.0,
        "optimizer_step": BATCHES * (epoch - intra) + step,
        "step": step,
    }
    if version.startswith("0."):
        del brain["optimizer_step"]
    (path / "brain.ckpt").write_text(yaml.dump(brain))
    (path / "dataloader-TRAIN.ckpt").write_text(str(step or BATCHES))
    for other, content in files.items():
        (path / f"{other}.ckpt").write_text(content)
    return path


def go_on(folder, *, epochs=4, wrap=None, kwargs=None, **run_opts):
    """Start a recipe with the same recoverables on the folder, as somebody does who moves over."""
    net = linear(seed=9)
    counter = EpochCounter(epochs)
    recoverables = {
        "model": net if wrap is None else wrap(net),
        "counter": counter,
        "scheduler": NewBob(0.05),
        "normalizer": Normalization(),
    }
    checkpointer = Checkpointer(folder, recoverables)
    brain = Recipe({"net": net}, adam, None, {**QUIET, **run_opts}, checkpointer)
    data = points(2 * BATCHES)
    brain.fit(
        counter,
        data,
        None,
        train_loader_kwargs={"batch_size": 2, "shuffle": True} if kwargs is None else kwargs,
    )
    return brain


def assert_same_optimizer(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert_same(found["state"][number], state)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "save"


# ----------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_goes_on_from_the_end_of_an_epoch(folder, caplog, version):
    source = Source()
    write_speechbrain(
        folder,
        "2025-04-07+10-00-00+00",
        Source(2),
        epoch=1,
        unixtime=1744020000.5,
        version=version,
    )
    write_speechbrain(
        folder,
        "2025-04-07+11-00-00+00",
        source,
        epoch=2,
        unixtime=1744023600.5,
        version=version,
        meta="loss: 0.5\n",
    )
    with caplog.at_level(logging.WARNING, "ddpkit"):
        brain = go_on(folder)
    # no manifest is no fault
    assert [one for one in caplog.messages if "fit has saved nothing" not in one] == []
    assert (brain.start["epoch"], brain.start["step"]) == (3, 0)
    assert brain.start["optimizer_step"] == (0 if version.startswith("0.") else 2 * BATCHES)
    assert_same(brain.start["weights"], source.net.state_dict())
    assert_same_optimizer(brain.start["optimizer"], source.optimizer.state_dict())
    others = brain.checkpointer.recoverables
    assert (others["scheduler"].hyperparam_value, others["scheduler"].current_patient) == (0.025, 1)
    assert others["scheduler"].metric_values == [0.75, 0.5]
    assert (others["normalizer"].count, others["normalizer"].glob_mean.tolist()) == (
        40,
        [1.0, 1.0, 1.0],
    )
    assert len(brain.trained_on) == 2 * BATCHES
    assert brain.optimizer_step == brain.start["optimizer_step"] + 2 * BATCHES


def test_training_from_there_is_training_from_that_state(folder):
    """The epoch after it, batch by batch, is what bare torch makes of the saved weights and the
    saved Adam.
    """
    source = Source()
    write_speechbrain(folder, "a", source, epoch=2, unixtime=1.5)
    brain = go_on(folder, epochs=3, max_grad_norm=0)
    data = points(2 * BATCHES)
    targets_of = {tuple(inputs.tolist()): target for inputs, target in data}
    for inputs in brain.trained_on:
        targets = torch.stack([targets_of[tuple(row.tolist())] for row in inputs])
        nn.functional.mse_loss(source.net(inputs), targets).backward()
        source.optimizer.step()
        source.optimizer.zero_grad()
    assert_same(brain.raw_modules.net.state_dict(), source.net.state_dict())


@pytest.mark.parametrize(("factor", "step"), [(1, 3), (2, 2), (2, 4)])
@pytest.mark.parametrize("version", ["0.5.16", "1.1.2"])
def test_a_run_goes_on_from_the_middle_of_an_epoch(folder, caplog, version, factor, step):
    """The epoch is done to its end with as many batches as were left; that they are others is
    said.
    """
    source = Source()
    write_speechbrain(folder, "b", source, epoch=3, unixtime=2.5, step=step, version=version)
    write_speechbrain(folder, "a", Source(2), epoch=2, unixtime=1.5, version=version)
    with caplog.at_level(logging.WARNING, "ddpkit"):
        brain = go_on(folder, epochs=3, grad_accumulation_factor=factor)
    assert any("order" in message for message in caplog.messages), caplog.messages
    assert (brain.start["epoch"], brain.start["step"]) == (3, step)
    assert_same(brain.start["weights"], source.net.state_dict())
    assert len(brain.trained_on) == BATCHES - step
    before = step if version.startswith("0.") else 2 * BATCHES + step
    assert brain.start["optimizer_step"] == before
    assert brain.optimizer_step == before + math.ceil((BATCHES - step) / factor)


def test_the_next_save_has_a_manifest_and_both_kinds_are_found(folder):
    write_speechbrain(folder, "a", Source(), epoch=2, unixtime=1.5, meta="loss: 0.5\n")
    brain = go_on(folder, epochs=3)
    new = brain.checkpointer.save_checkpoint(meta={"loss": 0.25})
    found = brain.checkpointer.find_checkpoints(min_key="loss")
    assert [one.path.name for one in found] == [new.path.name, "CKPT+a"]
    assert [(one.path / "manifest.json").exists() for one in found] == [True, False]
    mean = average_checkpoints(found, "model")
    states = [torch.load(one.paramfiles["model"], weights_only=True) for one in found]
    assert torch.allclose(mean["weight"], (states[0]["weight"] + states[1]["weight"]) / 2)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_weights_saved_through_a_wrapper(folder, prefix):
    source = Source()
    path = write_speechbrain(folder, "a", source, epoch=2, unixtime=1.5)
    state = {f"{prefix}{name}": value for name, value in source.net.state_dict().items()}
    torch.save(state, path / "model.ckpt")
    for wrap in (None, DataParallel):
        assert_same(go_on(folder, wrap=wrap).start["weights"], source.net.state_dict())


def test_a_looped_loader_takes_its_three_numbers(folder):
    """Two batches of the nominal epoch were done, and seven in all: the third of the second pass is
    next.
    """
    (folder / "CKPT+a").mkdir(parents=True)
    (folder / "CKPT+a" / "CKPT.yaml").write_text(
        "# yamllint disable\nend-of-epoch: false\nunixtime: 1.5\n"
    )
    (folder / "CKPT+a" / "loader.ckpt").write_text("2\n7\n14\n")
    looped = LoopedLoader(make_dataloader(list(range(10)), batch_size=2), 4)
    Checkpointer(folder, {"loader": looped}).recover_if_possible()
    assert (looped.step, looped.total_steps, looped.total_samples) == (2, 7, 14)
    assert [batch.tolist() for batch in looped] == [[4, 5], [6, 7]]
    assert (looped.total_steps, looped.total_samples) == (9, 18)


@pytest.mark.parametrize(("end_of_epoch", "following"), [("true", 4), ("false", 3)])
def test_a_stopper_takes_over_the_epoch_which_is_all_that_was_saved_of_it(
    folder,
    caplog,
    end_of_epoch,
    following,
):
    """SpeechBrain's stopper is saved by the hooks of the plain counter: its own are not
    registered.
    """
    (folder / "CKPT+a").mkdir(parents=True)
    (folder / "CKPT+a" / "CKPT.yaml").write_text(f"end-of-epoch: {end_of_epoch}\nunixtime: 1.5\n")
    (folder / "CKPT+a" / "counter.ckpt").write_text("3")
    stopper = EpochCounterWithStopper(9, limit_to_stop=2, limit_warmup=0, direction="min")
    with caplog.at_level(logging.WARNING, "ddpkit"):
        Checkpointer(folder, {"counter": stopper}).recover_if_possible()
    assert len(caplog.messages) == 1
    assert "patience begins anew" in caplog.messages[0]
    epochs = []
    for epoch in stopper:
        epochs.append(epoch)
        stopper.update_metric(1.0)
    # the first is the best, then two without improvement
    assert epochs == [following, following + 1, following + 2]


def test_a_loader_that_was_not_begun_begins(folder):
    """SpeechBrain writes the word None where a loader has not been iterated."""
    path = write_speechbrain(folder, "a", Source(), epoch=1, unixtime=1.5, step=2)
    (path / "dataloader-TRAIN.ckpt").write_text("None")
    (path / "brain.ckpt").write_text("avg_train_loss: 0.0\noptimizer_step: 0\nstep: 0\n")
    assert len(go_on(folder, epochs=1).trained_on) == BATCHES


# ------------------------------------------------------------------------------------------- meta


@pytest.mark.parametrize("module", ["numpy.core", "numpy._core"])
def test_meta_with_the_tags_of_older_versions(folder, module):
    """SpeechBrain 1.1.2 itself can no longer read these."""
    write_speechbrain(folder, "a", Source(), epoch=1, unixtime=1.5, meta="loss: 0.75\n")
    write_speechbrain(
        folder,
        "b",
        Source(),
        epoch=2,
        unixtime=2.5,
        meta=NUMPY_SCALAR.format(module=module),
    )
    checkpointer = Checkpointer(folder, {})
    best = checkpointer.find_checkpoint(min_key="loss")
    assert best.path.name == "CKPT+b"
    assert best.meta == {"end-of-epoch": True, "loss": 0.5, "shape": (1, 2), "unixtime": 2.5}


def test_a_metric_that_cannot_be_read_without_running_code_ranks_worst(folder):
    write_speechbrain(folder, "a", Source(), epoch=1, unixtime=1.5, meta="loss: 0.75\n")
    write_speechbrain(folder, "b", Source(), epoch=2, unixtime=2.5, meta=TENSOR)
    checkpointer = Checkpointer(folder, {})
    assert [one.path.name for one in checkpointer.find_checkpoints(min_key="loss")] == [
        "CKPT+a",
        "CKPT+b",
    ]
    newest = checkpointer.find_checkpoint()
    assert newest.path.name == "CKPT+b"
    assert isinstance(newest.meta["loss"], UnreadableValue)


# ------------------------------------------------------------------------------------------- damage


def truncate(path):
    path.write_bytes(path.read_bytes()[:-40])


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    weights = torch.load(path, weights_only=True)["weight"]
    content[content.index(weights.numpy().tobytes())] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("model.ckpt", truncate),
        ("model.ckpt", flip_a_byte),
        ("model.ckpt", empty),
        ("counter.ckpt", empty),
        ("CKPT.yaml", empty),
    ],
)
def test_what_is_damaged_is_said_and_the_one_before_is_used(folder, caplog, name, break_it):
    """What a kill while saving leaves, and what a bad disk does: files without a manifest tell that
    much.
    """
    source = Source()
    write_speechbrain(folder, "a", source, epoch=1, unixtime=1.5)
    newest = write_speechbrain(folder, "b", Source(2), epoch=2, unixtime=2.5)
    break_it(newest / name)
    with caplog.at_level(logging.WARNING, "ddpkit"):
        brain = go_on(folder, epochs=3)
    assert brain.start["epoch"] == 2
    assert_same(brain.start["weights"], source.net.state_dict())
    said = [message for message in caplog.messages if "is damaged and passed over" in message]
    assert len(said) == 1
    assert f"{newest}" in said[0]
    assert name in said[0]
    assert newest.is_dir()


def test_a_save_that_was_killed_before_all_files_were_there_is_an_error_that_names_the_file(folder):
    """Nobody can tell such a directory from one that never had the file: it is said, and nothing is
    trained.
    """
    write_speechbrain(folder, "a", Source(), epoch=1, unixtime=1.5)
    newest = write_speechbrain(folder, "b", Source(), epoch=2, unixtime=2.5)
    (newest / "optimizer.ckpt").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"CKPT\+b has no file for the recoverable "
        r"'optimizer'",
    ):
        go_on(folder)


# ------------------------------------------------------------------------------------- command line


def test_the_command_line_understands_them(folder, capsys, tmp_path):
    write_speechbrain(
        folder,
        "a",
        Source(),
        epoch=1,
        unixtime=1.5,
        meta=NUMPY_SCALAR.format(module="numpy._core"),
    )
    write_speechbrain(folder, "b", Source(), epoch=2, unixtime=2.5, step=3)
    assert main(["ckpt", "ls", str(folder)]) == 0
    listing = capsys.readouterr().out
    assert "in ?, batch 3" in listing
    assert main(["ckpt", "show", str(folder / "CKPT+a")]) == 0
    shown = capsys.readouterr().out
    for text in (
        "loss: 0.5",
        "4 number(s) in 2 tensor(s): 2 float64",
        ("metric_values: [0.75, 0.5]"),
        ("'lr': 0.05"),
    ):
        assert text in shown
    assert main(["ckpt", "verify", str(folder)]) == 0
    assert capsys.readouterr().out.count("whole as far as can be told without a manifest") == 2
    output = tmp_path / "mean.pt"
    assert (
        main(["ckpt", "average", str(folder), "--recoverable", "model", "--output", str(output)])
        == 0
    )
    assert_same(torch.load(output, weights_only=True), Source().net.state_dict())
