"""F16: a checkpoint that somebody made to do harm does none: it is refused, by name and at once."""

from __future__ import annotations

import collections
import hashlib
import io
import json
import os
import pickle
import shutil
import time
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from ddpkit.base.plain_yaml import UnreadableValue
from ddpkit.checkpointing import storage
from ddpkit.checkpoints import Checkpointer, average_checkpoints
from ddpkit.dataloader import SaveableDataLoader
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError, ConfigError
from tests.faults.storage_tools import Text
from tests.launching import soon

SECONDS = 3.0  # most take milliseconds


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


class Nested:
    """A state of torch inside of a pickle, which torch itself would load without a care."""

    def __init__(self, marker):
        self.inner = legacy(Evil(marker))

    def __reduce__(self):
        return torch.storage._load_from_bytes, (self.inner,)


def plain(value):
    return pickle.dumps(value)


def as_zip(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def legacy(value):
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def in_a_state(value):
    return as_zip(collections.OrderedDict(weight=torch.ones(1, 1), bias=value))


FORMS = (plain, as_zip, legacy, in_a_state)


def objects():
    """One of each kind of object that a run saves."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "scaler": torch.amp.GradScaler("cpu"),
        "counter": EpochCounter(3),
        "dataloader": SaveableDataLoader([1, 2, 3]),
        "text": Text(),
    }


def seal(folder):
    """Make a manifest that fits what is in a folder now: who forges files forges that, too."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"
    )
    manifest["files"] = {
        path.relative_to(folder).as_posix(): {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }
    write_manifest(folder, manifest)


def write_manifest(folder, manifest):
    manifest.pop("digest", None)
    manifest["digest"] = storage._manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def outside(tmp_path):
    """A file and a folder that are nobody's business."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.txt").write_text("secret")
    yield folder
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"secret.txt": "secret"}


@pytest.fixture
def marker(tmp_path):
    """What would be there if something were executed."""
    yield tmp_path / "executed"
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def checkpointer(tmp_path):
    checkpointer = Checkpointer(tmp_path / "save", objects())
    checkpointer.save_checkpoint(name="a")
    return checkpointer


@pytest.fixture
def victim(checkpointer):
    return checkpointer.checkpoints_dir / "CKPT+a"


def refused(checkpointer, name):
    """Everything that reads a checkpoint refuses this one, and says which file is why."""
    start = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        checkpointer.recover_if_possible()
    assert soon(start, SECONDS)
    assert name in str(raised.value)
    checkpointer.list_checkpoints()
    return str(raised.value)


# ------------------------------------------------------------------------------------------ pickles


@pytest.fixture(params=[None, "1"], ids=["", "forced"])
def _variable(request, monkeypatch):
    """What would make a bare ``torch.load`` unsafe."""
    if request.param:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", request.param)


@pytest.mark.usefixtures("_variable")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("evil", [Evil, Nested])
@pytest.mark.parametrize("name", list(objects()))
def test_a_malicious_pickle_in_any_file(checkpointer, victim, marker, name, evil, form):
    content = form(evil(marker))
    (victim / f"{name}.ckpt").write_bytes(content)
    seal(victim)
    refused(checkpointer, f"{name}.ckpt")
    found = checkpointer.list_checkpoints()
    with pytest.raises(CheckpointError, match=f"{name}.ckpt"):
        average_checkpoints(found, name)
    checkpointer.verify_mode = "off"
    (victim / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=f"{name}.ckpt"):
        checkpointer.recover_if_possible()


@pytest.mark.parametrize("evil", [Evil, Nested])
@pytest.mark.parametrize("form", FORMS)
def test_the_pickles_are_malicious(tmp_path, form, evil):
    content = form(evil(tmp_path / "done"))
    load = (
        pickle.loads
        if form is plain
        else lambda content: torch.load(io.BytesIO(content), weights_only=False)
    )
    load(content)
    assert (tmp_path / "done").exists()


# ---------------------------------------------------------------------------------------- CKPT.yaml

HEAD = "# yamllint disable\n# ddpkit: manifest.json lists the files beside this one\n"


YAMLS = {
    "deep": "unixtime: 1\na: " + "[" * 20_000,
    "long number": "unixtime: " + "9" * 400,
    "no mapping": "[1, 2]",
    "empty": "",
    "binary": "\0\1\2",
    "time is a list": "unixtime: [1]",
    "time is a call": "unixtime: !!python/object/apply:time.time []",
    "unhashable": "unixtime: 1\n? [a]\n: b",
    "an undefined alias": "unixtime: 1\na: *b",
    "a tensor of any size": (
        "unixtime: 1\na: !tensor {dtype: float64, shape: [1000000000000], values: []}"
    ),
    "a tensor of a module": "unixtime: 1\na: !tensor {dtype: onnx, shape: [1], values: [1]}",
}


@pytest.mark.parametrize("title", YAMLS)
def test_an_evil_meta_file(checkpointer, victim, title):
    (victim / "CKPT.yaml").write_text(HEAD + YAMLS[title])
    seal(victim)
    refused(checkpointer, "CKPT.yaml")
    assert checkpointer.list_checkpoints() == []


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.mkdir ['{marker}']",
        "!!python/object/new:os.mkdir ['{marker}']",
        "!!python/object/apply:subprocess.Popen [[mkdir, '{marker}']]",
        "!!python/object/apply:builtins.exec ['import os; os.mkdir(\"{marker}\")']",
        "!!python/module:antigravity",
        "!!python/name:os.mkdir",
        "!apply:os.mkdir ['{marker}']",
        "!new:pathlib.Path ['{marker}']",
        "!include:/etc/hostname",
    ],
)
def test_tags_of_the_meta_file_do_nothing(checkpointer, victim, marker, tag, monkeypatch):
    monkeypatch.setattr(
        yaml.SafeLoader,
        "yaml_constructors",
        dict(yaml.SafeLoader.yaml_constructors),
    )
    monkeypatch.setattr(
        yaml.SafeLoader,
        "yaml_multi_constructors",
        dict(yaml.SafeLoader.yaml_multi_constructors),
    )
    # as HyperPyYAML does
    yaml.SafeLoader.add_multi_constructor("!", lambda loader, suffix, node: marker.mkdir())
    (victim / "CKPT.yaml").write_text(
        HEAD + "unixtime: 1.0\nvalue: " + tag.format(marker=marker) + "\n"
    )
    seal(victim)
    # as far as it can be read it is: nothing depends on this value
    found = checkpointer.recover_if_possible()
    assert isinstance(found.meta["value"], UnreadableValue)
    assert checkpointer.find_checkpoint(min_key="value") == found


def test_a_huge_meta_file_is_not_read(checkpointer, victim):
    with (victim / "CKPT.yaml").open("ab") as handle:
        handle.truncate(1 << 40)
    refused(checkpointer, "CKPT.yaml")


# ------------------------------------------------------------------------------------ manifest.json

ENTRY = {"size": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
FILES = {
    "the folder above": {"../../outside/secret.txt": ENTRY},
    "the folder above, hidden": {"a/../../../outside/secret.txt": ENTRY},
    "absolute": {"/etc/passwd": ENTRY},
    "a list": ["model.ckpt"],
    "a text": "model.ckpt",
    "a number": 1,
    "nothing": None,
    "entries that are lists": {"model.ckpt": ["size", "sha256"]},
    "entries that are texts": {"model.ckpt": "size sha256"},
    "a size that is a text": {"model.ckpt": {"size": "6", "sha256": ""}},
    "a size that is negative": {"model.ckpt": {"size": -1, "sha256": ""}},
    "a size without end": {"model.ckpt": {"size": float("inf"), "sha256": ""}},
    "a sum that is none": {"model.ckpt": {"size": 1, "sha256": None}},
    "a zero byte": {"model\0.ckpt": ENTRY},
    "half a character": {"\ud800.ckpt": ENTRY},
    "a long name": {"x" * 5000: ENTRY},
    "no name": {"": ENTRY},
    "itself": {".": ENTRY},
}


@pytest.mark.parametrize("title", FILES)
def test_an_evil_list_of_files(checkpointer, victim, outside, title):
    manifest = json.loads((victim / "manifest.json").read_text())
    manifest["files"] = FILES[title]
    write_manifest(victim, manifest)
    refused(checkpointer, "CKPT+a: ")


TEXTS = {
    "deep": '{"files": ' + "[" * 200_000,
    "deep and closed": '{"digest": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "no mapping": "[1]",
    "a number": "1",
    "empty": "",
    "no text": "\0",
    "a long number": '{"digest": ' + "9" * 5000 + "}",
    "a name twice": '{"format": 1, "format": 1, "files": {}, "digest": ""}',
    "another format": '{"format": 99, "files": {}, "digest": ""}',
    "a huge header": '{"torch": "' + "x" * 20_000_000 + '"}',
}


@pytest.mark.parametrize("title", TEXTS)
def test_an_evil_manifest(checkpointer, victim, title):
    (victim / "manifest.json").write_text(TEXTS[title])
    refused(checkpointer, "manifest.json")


def test_a_manifest_of_any_size_is_not_read(checkpointer, victim):
    with (victim / "manifest.json").open("ab") as handle:
        handle.truncate(1 << 40)
    refused(checkpointer, "manifest.json")


# ------------------------------------------------------------------------------ files that are none


@pytest.mark.parametrize("name", ["CKPT.yaml", "manifest.json", "model.ckpt"])
@pytest.mark.parametrize("target", ["pipe", "/dev/zero", "nowhere"])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_pipe_or_a_device_in_place_of_a_file(checkpointer, victim, name, target, sealed):
    if not sealed:
        (victim / "manifest.json").unlink()
        (victim / "CKPT.yaml").write_text("unixtime: 1\n")
    (victim / name).unlink(missing_ok=True)
    if target == "pipe":
        os.mkfifo(victim / name)
    else:
        (victim / name).symlink_to(target)
    refused(checkpointer, name)


@pytest.mark.parametrize("compress", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_file_that_unpacks_to_more_than_it_holds(checkpointer, victim, compress):
    with zipfile.ZipFile(victim / "model.ckpt", "w", compress) as archive:
        archive.writestr("archive/data.pkl", b"")
        archive.writestr("archive/data/0", bytes(50_000_000))
    (victim / "manifest.json").unlink()
    (victim / "CKPT.yaml").write_text("unixtime: 1\n")
    message = refused(checkpointer, "model.ckpt")
    assert ("would unpack" in message) == bool(compress)


# ---------------------------------------------------------------------------------- links and names


def test_a_link_to_a_checkpoint_is_a_checkpoint_and_what_it_leads_to_is_never_deleted(
    checkpointer,
    tmp_path,
):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(checkpointer.checkpoints_dir / "CKPT+a", elsewhere)
    (checkpointer.checkpoints_dir / "CKPT+a").symlink_to(elsewhere)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    assert checkpointer.recover_if_possible().path.name == "CKPT+a"
    checkpointer.save_checkpoint(name="a")
    assert not (checkpointer.checkpoints_dir / "CKPT+a").is_symlink()
    shutil.rmtree(checkpointer.checkpoints_dir / "CKPT+a")
    (checkpointer.checkpoints_dir / "CKPT+a").symlink_to(elsewhere)
    checkpointer.delete_checkpoints(num_to_keep=0)
    assert [path.name for path in checkpointer.checkpoints_dir.iterdir()] == []
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_a_link_to_a_checkpoint_that_is_gone_is_no_reason_to_start_from_scratch(
    checkpointer,
    victim,
):
    shutil.rmtree(victim)
    victim.symlink_to("/nowhere/at/all")
    refused(checkpointer, "CKPT+a")


def test_what_a_link_in_a_checkpoint_leads_to_is_read_but_never_written(
    checkpointer,
    victim,
    outside,
):
    for number in range(3):
        (victim / f"link{number}.ckpt").symlink_to(outside / "secret.txt")
    (victim / "folder").symlink_to(outside)
    assert checkpointer.recover_if_possible() is not None
    checkpointer.save_checkpoint(name="a")
    (victim / "folder").symlink_to(outside)
    checkpointer.delete_checkpoints(num_to_keep=0)
    assert not victim.exists()


@pytest.mark.parametrize(
    "name",
    ["../../outside/secret", "..", "/etc/passwd", "a/b", "a\\b", "", "a\0b", 221 * "n", 111 * "ä"],
)
def test_a_recoverable_whose_name_leaves_the_folder(checkpointer, outside, name):
    with pytest.raises(ConfigError, match="cannot become a file name"):
        checkpointer.add_recoverable(name, Text())
    checkpointer.recoverables[name] = Text()  # as a recipe may
    with pytest.raises(ConfigError, match="cannot become a file name"):
        checkpointer.save_checkpoint()
    with pytest.raises(CheckpointError, match="no file for"):
        checkpointer.recover_if_possible()
    with pytest.raises(ConfigError, match="cannot become a file name"):
        Checkpointer(checkpointer.checkpoints_dir, {name: Text()})


def test_leftovers_that_are_links_are_removed_and_what_they_lead_to_is_not(
    checkpointer,
    outside,
):
    (checkpointer.checkpoints_dir / ".tmp-0123").symlink_to(outside)
    (checkpointer.checkpoints_dir / ".trash-4567").mkdir()
    (checkpointer.checkpoints_dir / ".trash-4567" / "inner").symlink_to(outside)
    checkpointer.save_checkpoint()
    names = {path.name for path in Path(checkpointer.checkpoints_dir).iterdir()}
    assert all(name.startswith("CKPT+") for name in names - {"latest"})
