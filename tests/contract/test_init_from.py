"""A new run begins with the weights of a checkpoint or a file; what does not fit is told, and left
out if asked; a run that goes on does not look at them.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ddpkit import Brain
from ddpkit.checkpoints import mark_as_transfer, register_checkpoint_hooks
from ddpkit.errors import CheckpointError, ConfigError, MissingFileError
from tests.reading_blocks import block_rows
from tests.recipes import (
    QUIET,
    Killed,
    Regression,
    SavesAfterTraining,
    assert_same,
    make,
    points,
    weights,
)

DATA = points(4)


def slow(*values):
    """Mark values of a parameter that show no more than the others do, or nearly."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


class Net(nn.Module):
    def __init__(self, outputs=1, head="head", seed=3):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(3, 2).double()
        self.add_module(head, nn.Linear(2, outputs).double())

    def forward(self, rows):
        for layer in self.children():
            rows = layer(rows)
        return rows.mean(dim=1, keepdim=True)


def fit(brain, epochs=(1,)):
    brain.fit(epochs, DATA, train_loader_kwargs={"batch_size": 2})
    return brain


def trained(folder):
    """Return a Brain that has trained and saved."""
    return fit(make(SavesAfterTraining, net=Net(), folder=folder))


def begun(net, path, cls=Regression, **options):
    """Return a Brain that has begun with weights, and has learned nothing since."""
    brain = make(cls, net=net, opt=lambda p: torch.optim.SGD(p, lr=0.0), init_from=path, **options)
    return fit(brain)


def written(kind, brain, folder):
    """Write the weights of a Brain as others do."""
    state = weights(brain)
    bare = {name.removeprefix("net."): value for name, value in state.items()}
    path = folder / f"weights.{'safetensors' if kind == 'safetensors' else 'pt'}"
    if kind == "safetensors":
        save_file(bare, path)
    elif kind == "entries":
        torch.save(state, path)
    elif kind == "inner":
        torch.save({"state_dict": bare, "epoch": 7, "optimizer_states": [{}]}, path)
    elif kind == "wrapped":
        torch.save({f"module.{name}": value for name, value in bare.items()}, path)
    else:
        torch.save(bare, path)
    return path


@pytest.mark.parametrize("kind", ["inner", "wrapped", "safetensors", *slow("bare", "entries")])
def test_a_run_begins_with_the_weights_of_a_file(kind, tmp_path):
    old = trained(tmp_path / "old")
    brain = begun(Net(seed=9), written(kind, old, tmp_path))
    assert_same(weights(brain), weights(old))
    assert brain.optimizer_step == 2


@pytest.mark.parametrize("kind", ["folder", *slow("checkpoint", "its file")])
def test_a_run_begins_with_the_weights_of_a_checkpoint(kind, tmp_path, caplog):
    caplog.set_level("INFO", logger="ddpkit")
    old = trained(tmp_path / "old")
    (checkpoint,) = (tmp_path / "old").glob("CKPT*")
    path = {
        "checkpoint": checkpoint,
        "folder": tmp_path / "old",
        "its file": checkpoint / "net.ckpt",
    }
    brain = begun(Net(seed=9), path[kind], cls=SavesAfterTraining, folder=tmp_path / "new")
    assert_same(weights(brain), weights(old))
    row = block_rows(caplog.text)["init_from"]
    assert row.startswith("4 tensors of ")
    assert checkpoint.name in row


def test_several_modules_come_from_one_file_by_their_names(tmp_path):
    class Two(Regression):
        def compute_forward(self, batch, stage):
            return self.modules.head(self.modules.body(batch[0]))

    def modules(value):
        return {"body": nn.Linear(3, 2).double(), "head": nn.Linear(2, 1).double()}

    old = Two(modules(1), run_opts=QUIET)
    torch.save(old.modules.state_dict(), tmp_path / "all.pt")
    new = Two(modules(2), run_opts={**QUIET, "init_from": tmp_path / "all.pt"})
    fit(new)
    assert_same(weights(new), weights(old))
    torch.save(old.modules.body.state_dict(), tmp_path / "one.pt")
    with pytest.raises(
        ConfigError, match="the modules body, head: names in one file for all begin"
    ):
        fit(Two(modules(3), run_opts={**QUIET, "init_from": tmp_path / "one.pt"}))


def test_what_does_not_fit_is_told_all_at_once_and_nothing_is_trained(tmp_path):
    path = written("bare", trained(tmp_path / "old"), tmp_path)
    with pytest.raises(CheckpointError) as caught:
        begun(Net(outputs=2, head="top"), path)
    words = str(caught.value)
    assert "missing      net.top.weight (2, 2)" in words
    assert "missing      net.top.bias (2)" in words
    assert "unexpected   net.head.weight (1, 2)" in words
    with pytest.raises(
        ConfigError, match=r"other shape  net.head.weight \(1, 2\) in the file, \(2, 2\)"
    ):
        begun(Net(outputs=2), path)


def test_a_long_list_is_cut(tmp_path):
    layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(9)))
    torch.save({"0.weight": torch.ones(1, 1)}, tmp_path / "one.pt")
    with pytest.raises(CheckpointError, match=r"missing      ... and 12 more"):
        begun(layers, tmp_path / "one.pt")


@pytest.mark.parametrize("skip", ["head.*", *slow("all", "net.head.*", "head.weight,head.bias")])
def test_what_does_not_fit_is_left_out_if_asked(skip, tmp_path, caplog):
    old = trained(tmp_path / "old")
    path = written("bare", old, tmp_path)
    net = Net(outputs=2, seed=9)
    head = net.head.weight.clone()
    brain = begun(net, path, init_skip=skip)
    assert torch.equal(net.body.weight, old.modules.net.body.weight)
    assert torch.equal(net.head.weight, head)
    assert "other shape  net.head.weight" in caplog.text
    assert brain.optimizer_step == 2


def test_only_what_was_named_is_left_out(tmp_path):
    path = written("bare", trained(tmp_path / "old"), tmp_path)
    with pytest.raises(CheckpointError, match=r"unexpected   net.head.weight") as caught:
        begun(Net(outputs=2, head="top"), path, init_skip="top.*")
    assert "missing" not in str(caught.value)


def test_weights_that_fit_nothing_are_refused_whatever_may_be_left_out(tmp_path):
    torch.save({"encoder.weight": torch.ones(2)}, tmp_path / "other.pt")
    with pytest.raises(ConfigError, match="has none of the weights of this run"):
        begun(Net(), tmp_path / "other.pt", init_skip="all")


def test_of_weights_that_two_layers_share_a_file_needs_one(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False).double()
            self.last = nn.Linear(3, 3, bias=False).double()
            self.last.weight = self.first.weight

        def forward(self, rows):
            return self.last(self.first(rows)).mean(dim=1, keepdim=True)

    save_file({"first.weight": torch.eye(3).double()}, tmp_path / "tied.safetensors")
    net = Tied()
    begun(net, tmp_path / "tied.safetensors")
    assert torch.equal(net.last.weight, torch.eye(3).double())


class DiesBeforeItSaves(SavesAfterTraining):
    """Dies when the checkpoints of the run before were moved, and nothing is saved yet."""

    def on_fit_start(self):
        raise Killed


@pytest.mark.parametrize(
    "given",
    ["latest/net.ckpt", "", *slow("latest", "best", "CKPT+a", "CKPT+a/net.ckpt", "link")],
)
def test_a_run_begins_anew_from_its_own_folder_at_each_start(given, tmp_path, caplog):
    caplog.set_level("INFO", logger="ddpkit")
    save = tmp_path / "save"
    old = fit(make(net=Net(), folder=save))
    old.checkpointer.save_and_keep_only(name="a", meta={"loss": 1}, min_keys=["loss"])
    (save / "link").symlink_to(save / "CKPT+a")
    options = {"folder": save, "resume": "never"}
    with pytest.raises(Killed):
        begun(Net(seed=8), save / given, DiesBeforeItSaves, **options)
    assert not list(save.glob("CKPT+*"))
    brain = begun(Net(seed=9), save / given, SavesAfterTraining, **options)
    assert_same(weights(brain), weights(old))
    assert "a run that has begun anew has moved it" in caplog.text


@pytest.mark.slow
def test_of_several_that_were_moved_the_latest_counts(tmp_path):
    save = tmp_path / "save"
    for number, seed in enumerate((1, 2, 3)):
        brain = begun(Net(seed=seed), None, folder=save, resume="never")
        brain.checkpointer.save_checkpoint(name="a")
        assert len(list(save.glob("earlier-*"))) == number
    with pytest.raises(Killed):
        begun(Net(), save / "CKPT+a", DiesBeforeItSaves, folder=save, resume="never")
    assert_same(weights(begun(Net(), save / "CKPT+a")), weights(brain))


def test_a_path_that_is_not_there_is_told_before_anything_is_moved(tmp_path):
    trained(tmp_path / "save")
    with pytest.raises(MissingFileError):
        begun(Net(), tmp_path / "none.pt", folder=tmp_path / "save", resume="never")
    assert list((tmp_path / "save").glob("CKPT+*"))
    assert not list((tmp_path / "save").glob("earlier-*"))


def test_a_run_that_goes_on_says_that_it_does_not_use_them(tmp_path, caplog):
    caplog.set_level("INFO", logger="ddpkit")
    torch.save(Net(seed=1).state_dict(), tmp_path / "base.pt")
    options = {"folder": tmp_path / "run", "init_from": tmp_path / "base.pt"}
    whole = fit(
        make(SavesAfterTraining, net=Net(), init_from=tmp_path / "base.pt", folder=tmp_path / "a"),
        (1, 2),
    )
    fit(make(SavesAfterTraining, net=Net(), **options))
    (tmp_path / "base.pt").unlink()
    caplog.clear()
    brain = fit(make(SavesAfterTraining, net=Net(seed=8), **options), (2,))
    assert_same(weights(brain), weights(whole))
    row = block_rows(caplog.text)["init_from"]
    assert row.endswith("is not used: the run goes on from a checkpoint of its own")


def test_a_second_call_of_fit_goes_on_with_what_the_first_has_learned(tmp_path):
    torch.save(Net(seed=1).state_dict(), tmp_path / "base.pt")
    once = fit(make(net=Net(), init_from=tmp_path / "base.pt"), (1, 2))
    twice = make(net=Net(), init_from=tmp_path / "base.pt")
    fit(twice, (1,))
    fit(twice, (2,))
    assert_same(weights(twice), weights(once))


def test_the_average_of_weights_begins_with_them_and_is_a_source_itself(tmp_path):
    torch.save(Net(seed=1).state_dict(), tmp_path / "base.pt")
    brain = begun(
        Net(), tmp_path / "base.pt", cls=SavesAfterTraining, folder=tmp_path / "run", ema_decay=0.5
    )
    (average,) = (tmp_path / "run").glob("CKPT*/ema.ckpt")
    other = begun(Net(seed=4), average)
    assert_same(weights(other), weights(brain))
    assert torch.equal(weights(other)["net.body.weight"], Net(seed=1).body.weight)


def test_an_evaluation_alone_looks_at_them_if_there_is_no_checkpoint(tmp_path, caplog):
    caplog.set_level("INFO", logger="ddpkit")
    net = Net(seed=1)
    torch.save(net.state_dict(), tmp_path / "base.pt")
    brain = make(net=Net(), init_from=tmp_path / "base.pt", test_only=True)
    fit(brain)
    brain.evaluate(DATA, test_loader_kwargs={"batch_size": 2})
    assert torch.equal(weights(brain)["net.body.weight"], net.body.weight)
    assert block_rows(caplog.text)["weights"].startswith("4 tensors of ")
    assert "the weights are the initial ones" not in caplog.text
    caplog.clear()
    brain.run_opts["test_only"] = False
    fit(brain)
    assert block_rows(caplog.text)["init_from"].startswith("4 tensors of ")


def test_a_class_that_takes_weights_over_by_itself_does_so(tmp_path):
    @register_checkpoint_hooks
    class Own(Net):
        taken = None

        @mark_as_transfer
        def _take(self, path):
            self.taken = path.name

    trained(tmp_path / "old")
    net = Own(outputs=2)
    begun(net, tmp_path / "old", cls=SavesAfterTraining, folder=tmp_path / "new")
    assert net.taken == "net.ckpt"


class Evil:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize(
    ("make_file", "error", "words"),
    [
        (lambda _: None, MissingFileError, "there is no such file or folder"),
        (lambda path: path.mkdir(), ConfigError, "is a folder without checkpoints"),
        (lambda path: path.write_bytes(b"no weights"), CheckpointError, "is damaged"),
        (lambda path: torch.save(Evil(), path), CheckpointError, "would run code"),
        (lambda path: torch.save([1], path), ConfigError, "holds a list, and no weights by name"),
        (lambda path: torch.save({"net": {"a": 1}}, path), ConfigError, "Its entries are 'net'"),
        (lambda path: torch.save({}, path), ConfigError, "Its entries are none"),
    ],
)
def test_what_are_no_weights_is_refused_in_a_sentence(make_file, error, words, tmp_path):
    make_file(tmp_path / "weights.pt")
    with pytest.raises(error, match=words):
        begun(Net(), tmp_path / "weights.pt")


def test_a_damaged_file_of_safetensors_is_refused(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"12345678")
    with pytest.raises(CheckpointError, match="cannot load .*a.safetensors"):
        begun(Net(), tmp_path / "a.safetensors")


def test_a_damaged_checkpoint_is_refused_and_of_a_folder_the_one_before_is_taken(tmp_path):
    brain = make(SavesAfterTraining, net=Net(), folder=tmp_path / "old")
    fit(brain, (1,))
    first = weights(brain)
    fit(brain, (2,))
    checkpoints = sorted((tmp_path / "old").glob("CKPT*"))
    file = checkpoints[-1] / "net.ckpt"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="no checkpoint there is whole: .*net.ckpt"):
        begun(Net(), checkpoints[-1])
    assert_same(weights(begun(Net(), tmp_path / "old")), first)


def test_a_brain_without_modules_is_refused(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    brain = Brain(run_opts={**QUIET, "init_from": tmp_path / "a.pt"})
    with pytest.raises(ConfigError, match="has none of the weights of this run"):
        brain.fit([1], DATA)
