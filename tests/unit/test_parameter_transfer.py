"""Pretrained parameters: where they come from, how they are loaded, and what is refused."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from ddpkit.checkpoints import (
    mark_as_loader,
    mark_as_saver,
    mark_as_transfer,
    register_checkpoint_hooks,
)
from ddpkit.distributed import run_on_main
from ddpkit.errors import CheckpointError, ConfigError, MissingFileError
from ddpkit.parameter_transfer import Pretrainer
from tests.speechbrain_marks import mark


class FetchSource(NamedTuple):
    """As SpeechBrain's."""

    FetchFrom: int
    path: str


def saved(path, value, size=2):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"weight": torch.full((1, size), float(value)), "bias": torch.zeros(1)}, path)
    return path


def value_of(model):
    return model.weight[0, 0].item()


def test_modules_come_from_their_files(tmp_path):
    first = nn.Linear(2, 1)
    second = nn.Linear(2, 1)
    pretrainer = Pretrainer(
        tmp_path / "none",
        {"first": first},
        {"first": saved(tmp_path / "best.pt", 3)},
    )
    pretrainer.loadables["second"] = second
    saved(tmp_path / "hub" / "second.ckpt", 4)
    files = pretrainer.collect_files(default_source=str(tmp_path / "hub"))
    pretrainer.load_collected()
    assert (value_of(first), value_of(second)) == (3, 4)
    assert {name: path.name for name, path in files.items()} == {
        "first": "best.pt",
        "second": "second.ckpt",
    }
    assert not (tmp_path / "none").exists()


def test_another_path_replaces_the_first(tmp_path):
    model = nn.Linear(2, 1)
    pretrainer = Pretrainer(loadables={"model": model})
    for value in (1, 2):
        pretrainer.paths["model"] = str(saved(tmp_path / f"{value}.ckpt", value))
        pretrainer.collect_files()
        pretrainer.load_collected()
        assert value_of(model) == value
    (tmp_path / "2.ckpt").unlink()
    with pytest.raises(MissingFileError, match=r"2\.ckpt, for 'model', is not a file on disk"):
        pretrainer.collect_files()


def test_a_link_that_is_itself_the_source_is_left_alone(tmp_path):
    (tmp_path / "model.ckpt").symlink_to(saved(tmp_path / "blob" / "file", 5))
    model = nn.Linear(2, 1)
    pretrainer = Pretrainer(
        tmp_path / "blob" / "..",
        {"model": model},
        {"model": tmp_path / "model.ckpt"},
    )
    pretrainer.collect_files()
    pretrainer.load_collected()
    assert value_of(model) == 5


@pytest.mark.parametrize(
    "source",
    ["speechbrain/asr-crdnn/model.ckpt", "https://example.org/model.ckpt"],
)
@pytest.mark.parametrize("is_link", [False, True])
def test_what_was_put_there_stands_for_a_source_that_is_elsewhere(tmp_path, source, is_link):
    if is_link:
        (tmp_path / "model.ckpt").symlink_to(saved(tmp_path / "cache" / "blob", 5))
    else:
        saved(tmp_path / "model.ckpt", 5)
    model = nn.Linear(2, 1)
    pretrainer = Pretrainer(tmp_path, {"model": model}, {"model": source})
    assert pretrainer.collect_files() == {"model": tmp_path / "model.ckpt"}
    pretrainer.load_collected()
    assert value_of(model) == 5


def test_what_is_on_disk_needs_no_collecting(tmp_path):
    model = nn.Linear(2, 1)
    path = FetchSource(1, str(saved(tmp_path / "a.ckpt", 6)))
    Pretrainer(tmp_path / "none", {"model": model}, {"model": path}).load_collected()
    assert value_of(model) == 6
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("condition", [False, lambda: 0])
def test_a_condition_leaves_an_object_out(condition):
    pretrainer = Pretrainer(loadables={"model": nn.Linear(2, 1)}, conditions={"model": condition})
    assert pretrainer.is_loadable("another")
    assert not pretrainer.is_loadable("model")
    assert pretrainer.collect_files() == {}
    pretrainer.load_collected()
    pretrainer.conditions["model"] = True
    with pytest.raises(ConfigError, match="'model' has no path"):
        pretrainer.collect_files()


@register_checkpoint_hooks
class Marked:
    """Loads a checkpoint otherwise than pretrained parameters."""

    found = None

    @mark_as_saver
    def save(self, path):
        path.write_text("saved")

    @mark_as_loader
    def load(self, path, end_of_epoch):
        self.found = ("loader", path.read_text(), end_of_epoch)

    @mark_as_transfer
    def take(self, path):
        self.found = ("transfer", path.read_text())


@register_checkpoint_hooks
class OnlyLoaded:
    found = None

    @mark_as_loader
    def load(self, path, end_of_epoch):
        self.found = ("loader", path.read_text(), end_of_epoch)


class SpeechBrains(nn.Module):
    found = None

    @mark("transfer")
    def take(self, path):
        self.found = ("transfer", path.read_text())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Marked, ("transfer", "text")),
        (SpeechBrains, ("transfer", "text")),
        (OnlyLoaded, ("loader", "text", False)),
    ],
)
def test_an_object_says_how_it_is_loaded_unless_the_recipe_does(tmp_path, kind, expected):
    (tmp_path / "text.ckpt").write_text("text")
    thing = kind()
    pretrainer = Pretrainer(loadables={"text": thing}, paths={"text": tmp_path / "text.ckpt"})
    pretrainer.load_collected()
    assert thing.found == expected
    pretrainer.custom_hooks["text"] = lambda obj, path: setattr(obj, "found", path.name)
    pretrainer.load_collected()
    assert thing.found == "text.ckpt"


def test_parameters_that_only_one_side_has_are_told(tmp_path, caplog):
    model = nn.Linear(2, 1, bias=False)
    Pretrainer(loadables={"m": model}, paths={"m": saved(tmp_path / "m.ckpt", 7)}).load_collected()
    assert value_of(model) == 7
    assert "has bias, which the Linear does not have" in caplog.text


@pytest.mark.parametrize(
    ("held", "names"),
    [({"model": {}, "epoch": 3}, "model, epoch"), ({}, "nothing")],
)
def test_a_file_with_none_of_the_parameters_is_refused(tmp_path, held, names):
    torch.save(held, tmp_path / "m.ckpt")
    words = f"m.ckpt has none of the parameters of this Linear, such as 'weight'; it has {names}."
    with pytest.raises(CheckpointError, match=words):
        Pretrainer(
            loadables={"m": nn.Linear(2, 1)},
            paths={"m": tmp_path / "m.ckpt"},
        ).load_collected()
    nothing = nn.ReLU()
    Pretrainer(loadables={"m": nothing}, paths={"m": tmp_path / "m.ckpt"}).load_collected()


@pytest.mark.parametrize("content", [b"", b"hello", b"<html>404</html>"])
def test_a_file_of_something_else_is_told_in_words(tmp_path, content):
    (tmp_path / "m.ckpt").write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match="m.ckpt: it is damaged, or was not written by torch.save.",
    ):
        Pretrainer(
            loadables={"m": nn.Linear(2, 1)},
            paths={"m": tmp_path / "m.ckpt"},
        ).load_collected()


class Code:
    def __reduce__(self):
        return (print, ("code has run",))


def test_a_file_that_could_run_code_is_refused(tmp_path, capsys):
    torch.save({"weight": Code()}, tmp_path / "m.ckpt")
    with pytest.raises(CheckpointError):
        Pretrainer(
            loadables={"m": nn.Linear(2, 1)},
            paths={"m": tmp_path / "m.ckpt"},
        ).load_collected()
    assert "code has run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "source",
    ["https://example.org/m.ckpt", "speechbrain/asr/m.ckpt", "folder"],
)
def test_what_is_not_on_disk_is_told_before_anything_is_loaded(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    model = nn.Linear(2, 1)
    before = value_of(model)
    paths = {"model": saved(tmp_path / "good.ckpt", 8), "other": source}
    pretrainer = Pretrainer("links", {"model": model, "other": nn.Linear(2, 1)}, paths)
    for call in (
        pretrainer.collect_files,
        pretrainer.load_collected,
        lambda: run_on_main(pretrainer.collect_files),
    ):
        with pytest.raises(
            MissingFileError,
            match=f"{source}, for 'other'.*Download it first .*links/other.ckpt",
        ):
            call()
    assert value_of(model) == before
    assert not (tmp_path / "links").exists()


def test_what_nothing_loads_is_told(tmp_path):
    path = saved(tmp_path / "a.ckpt", 1)
    with pytest.raises(ConfigError, match="nothing loads 'thing', an object: .*custom_hooks"):
        Pretrainer(loadables={"thing": object()}, paths={"thing": path}).load_collected()
    with pytest.raises(
        ConfigError,
        match="'thing' has no path: .* with a default_source on every rank",
    ):
        Pretrainer(loadables={"thing": nn.Linear(2, 1)}).load_collected()
