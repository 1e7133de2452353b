from __future__ import annotations

import copy
import errno
import logging
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from ddpkit import checkpoints
from ddpkit.checkpointing import folder as checkpoint_folder, storage
from ddpkit.checkpoints import (
    Checkpoint,
    Checkpointer,
    average_checkpoints,
    average_state_dicts,
    ckpt_recency,
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from ddpkit.errors import CheckpointError, ConfigError
from tests.recipes import Value


@pytest.fixture
def value():
    return Value()


@pytest.fixture
def checkpointer(tmp_path, value):
    return Checkpointer(tmp_path / "save", {"value": value})


def save(checkpointer, value=None, **meta):
    """Save with a clock that ticks one second per save, unless a time is given."""
    if value is not None:
        checkpointer.recoverables["value"].value = value
    meta.setdefault("unixtime", 1000.0 + len(checkpointer.list_checkpoints()))
    return checkpointer.save_checkpoint(meta=meta)


def values(checkpointer, key="n"):
    return sorted((ckpt.meta[key] for ckpt in checkpointer.list_checkpoints()), key=str)


def names(checkpointer):
    return sorted(
        path.name for path in checkpointer.checkpoints_dir.iterdir() if not path.is_symlink()
    )


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


# ------------------------------------------------------------------------------------------- layout


def test_the_layout_is_that_of_the_contract(checkpointer):
    ckpt = checkpointer.save_checkpoint(meta={"epoch": 3})
    assert ckpt.path.parent == checkpointer.checkpoints_dir
    date, clock, number = ckpt.path.name.removeprefix("CKPT+").split("+")
    assert len(date) == 10
    assert len(clock) == 8
    assert number == "00"
    assert sorted(path.name for path in ckpt.path.iterdir()) == [
        "CKPT.yaml",
        "manifest.json",
        "value.ckpt",
    ]
    text = (ckpt.path / "CKPT.yaml").read_text()
    assert text.startswith("# yamllint disable\n")
    meta = yaml.safe_load(text)
    assert meta == ckpt.meta
    assert meta["end-of-epoch"] is True
    assert meta["epoch"] == 3
    assert abs(meta["unixtime"] - ckpt.path.stat().st_mtime) < 60
    assert ckpt.paramfiles == {"value": ckpt.path / "value.ckpt"}
    assert names(checkpointer) == [ckpt.path.name]


def test_checkpoints_of_the_same_second_are_numbered(checkpointer, monkeypatch):
    monkeypatch.setattr(checkpoint_folder.time, "strftime", lambda *form: "2026-01-02+03-04-05")
    for _ in range(3):
        checkpointer.save_checkpoint()
    assert names(checkpointer) == [f"CKPT+2026-01-02+03-04-05+0{number}" for number in range(3)]


def test_a_named_checkpoint(checkpointer):
    assert checkpointer.save_checkpoint(name="best").path.name == "CKPT+best"
    assert names(checkpointer) == ["CKPT+best"]


@pytest.mark.parametrize("name", ["a/b", "../x", "..", "a\\b", "", "a\0", "a" * 241, "é" * 121, 3])
def test_names_that_leave_the_folder_are_refused(checkpointer, tmp_path, name):
    with pytest.raises(ConfigError, match="the name of a checkpoint"):
        checkpointer.save_checkpoint(name=name)
    with pytest.raises(ConfigError, match="the name of a recoverable"):
        checkpointer.add_recoverable(name, Value())
    with pytest.raises(ConfigError, match="the name of a recoverable"):
        Checkpointer(tmp_path, {name: Value()})
    checkpointer.recoverables[name] = Value()  # the contract allows editing it
    with pytest.raises(ConfigError, match="the name of a recoverable"):
        checkpointer.save_checkpoint()
    assert names(checkpointer) == []


@pytest.mark.parametrize("name", ["a" * 221, "é" * 111])
def test_a_name_that_leaves_no_room_for_that_of_a_shard_is_refused(checkpointer, name):
    with pytest.raises(ConfigError, match="the name of a recoverable, .* 1 to 220 bytes"):
        checkpointer.add_recoverable(name, Value())


@pytest.mark.parametrize(
    "name",
    ["a" * 220, "é" * 110, "日本語", "a\nb", "\udc80", "-rf", "a*[b]?", "CKPT", "."],
)
def test_any_other_name_will_do(tmp_path, name):
    checkpointer = Checkpointer(tmp_path, {name: Value(3), f"{name[:100]}x": nn.Linear(1, 1)})
    checkpointer.save_checkpoint(name=name)
    saved = checkpointer.save_checkpoint(name=name)  # replaces
    other = Checkpointer(tmp_path, {name: Value(), f"{name[:100]}x": nn.Linear(1, 1)})
    assert other.recover_if_possible() == saved
    assert other.recoverables[name].value == 3
    assert (
        other.recoverables[f"{name[:100]}x"].weight
        == checkpointer.recoverables[f"{name[:100]}x"].weight
    )
    other.delete_checkpoints(num_to_keep=0)
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_does_not_take_the_place_of_a_module_nor_a_module_that_of_an_optimizer(
    tmp_path,
):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    for first, second in ((model, optimizer), (optimizer, model)):
        checkpointer = Checkpointer(tmp_path, {"model": first})
        names = f"'model' is a {type(first).__name__}: with a {type(second).__name__} in its place"
        with pytest.raises(ConfigError, match=names):
            checkpointer.add_recoverables({"model": second})
        assert checkpointer.recoverables == {"model": first}
        checkpointer.add_recoverable("model", copy.deepcopy(first))  # another of its kind may


def test_no_recoverables_are_fine(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    ckpt = checkpointer.save_checkpoint(meta={"a": 1})
    assert ckpt.paramfiles == {}
    assert checkpointer.recover_if_possible() == ckpt


def test_the_folder_is_made_at_construction_with_its_parents(tmp_path):
    Checkpointer(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError,
        match="checkpoints_dir='.*file/save' cannot be written: Not a directory",
    ):
        Checkpointer(tmp_path / "file" / "save")


def test_a_folder_that_vanished_is_named(checkpointer):
    checkpointer.checkpoints_dir.rmdir()
    with pytest.raises(CheckpointError, match="cannot save or delete .*No such file or directory"):
        checkpointer.save_checkpoint()


def test_an_object_that_nothing_can_save_is_named_before_anything_is_written(checkpointer):
    checkpointer.recoverables["thing"] = object()
    with pytest.raises(RuntimeError, match="recoverable 'thing', of type object, cannot be saved"):
        checkpointer.save_checkpoint()
    assert names(checkpointer) == []


def test_the_line_that_tells_of_a_save_has_the_level_that_was_asked_for(checkpointer, caplog):
    with caplog.at_level(logging.DEBUG):
        checkpointer.save_checkpoint(verbosity=logging.DEBUG)
        checkpointer.save_checkpoint(end_of_epoch=False)
    levels = {record.message.split(" checkpoint")[0]: record.levelname for record in caplog.records}
    assert levels == {"Saved an end-of-epoch": "DEBUG", "Saved an intra-epoch": "INFO"}


def test_checkpoints_are_equal_and_hash_by_path():
    one = Checkpoint(Path("a"), {"t": torch.ones(2)}, {})
    two = Checkpoint(Path("a"), {"t": torch.zeros(2)}, {})
    assert one == two
    assert not one != two  # noqa: SIM202 -- both operators
    assert len({one, two, Checkpoint(Path("b"), {}, {})}) == 2
    assert one != ("a", {}, {})


# --------------------------------------------------------------------------------------- round trip


def test_everything_comes_back(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    checkpointer = Checkpointer(
        tmp_path,
        {"model": model, "optimizer": optimizer, "scheduler": scheduler},
    )
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    before = [parameter.clone() for parameter in model.parameters()]
    saved = checkpointer.save_checkpoint()
    nn.init.zeros_(model.weight)
    optimizer.state.clear()
    scheduler.last_epoch = 0
    assert checkpointer.recover_if_possible() == saved
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.state[model.weight]["momentum_buffer"] is not None
    assert scheduler.last_epoch == 1


@pytest.mark.parametrize("end_of_epoch", [True, False])
def test_loaders_are_told_whether_an_epoch_had_ended(tmp_path, end_of_epoch):
    @register_checkpoint_hooks
    class Told:
        told = None

        @mark_as_saver
        def save(self, path):
            path.write_text("")

        @mark_as_loader
        def load(self, path, end_of_epoch):
            self.told = end_of_epoch

    told = Told()
    checkpointer = Checkpointer(tmp_path, {"told": told})
    checkpointer.save_checkpoint(end_of_epoch=end_of_epoch)
    checkpointer.recover_if_possible()
    assert told.told is end_of_epoch


def test_custom_hooks_go_before_those_of_the_class(tmp_path):
    calls = []

    def saver(obj, path):
        calls.append(obj)
        path.write_text("x")

    def loader(obj, path, end_of_epoch):
        calls.append((obj, path.read_text(), end_of_epoch))

    value = Value()
    for checkpointer in (
        Checkpointer(
            tmp_path / "a",
            {"v": value},
            custom_load_hooks={"v": loader},
            custom_save_hooks={"v": saver},
        ),
        Checkpointer(tmp_path / "b"),
    ):
        checkpointer.add_recoverable("v2", value, custom_load_hook=loader, custom_save_hook=saver)
        checkpointer.save_checkpoint()
        checkpointer.recover_if_possible()
    assert calls == [value, value, *[(value, "x", True)] * 2, value, (value, "x", True)]


def test_a_saver_may_make_a_folder(tmp_path):
    def saver(obj, path):
        path.mkdir()
        (path / "part").write_text("1")

    loaded = []
    checkpointer = Checkpointer(tmp_path)
    checkpointer.add_recoverable(
        "parts",
        object(),
        lambda obj, path, end: loaded.append((path / "part").read_text()),
        saver,
    )
    ckpt = checkpointer.save_checkpoint()
    checkpointer.recover_if_possible()
    assert loaded == ["1"]
    (ckpt.path / "parts.ckpt" / "part").write_text("2")
    with pytest.raises(CheckpointError, match="parts.ckpt/part fails its checksum"):
        checkpointer.recover_if_possible()


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("asynchronous", [False, True])
def test_meta_that_is_too_large_to_be_read_again_is_refused(checkpointer, asynchronous):
    checkpointer.asynchronous = asynchronous
    with pytest.raises(CheckpointError, match="its meta takes 1.* bytes"):
        checkpointer.save_checkpoint(meta={"text": "x" * (17 << 20)})
    assert list(checkpointer.checkpoints_dir.iterdir()) == []


def test_meta_of_any_kind_can_be_found_again(checkpointer):
    meta = {
        "loss": np.float64(0.5),
        "array": np.arange(2),
        "shape": (1, 2),
        "tensor": torch.tensor([1.5]),
        "file": Path("a"),
        "nan": float("nan"),
        "inf": float("-inf"),
    }
    saved = checkpointer.save_checkpoint(meta=meta)
    for ckpt in (saved, checkpointer.find_checkpoint(min_key="loss")):
        assert ckpt.meta["loss"] == 0.5
        assert ckpt.meta["array"] == [0, 1]
        assert ckpt.meta["shape"] == [1, 2]
        assert torch.equal(ckpt.meta["tensor"], torch.tensor([1.5]))
        assert ckpt.meta["file"] == "a"
        assert math.isnan(ckpt.meta["nan"])
        assert ckpt.meta["inf"] == float("-inf")


def test_a_checkpoint_that_could_not_be_found_again_is_not_saved(checkpointer):
    with pytest.raises(CheckpointError, match="unixtime"):
        checkpointer.save_checkpoint(meta={"unixtime": "yesterday"})
    assert names(checkpointer) == []


def test_listing_a_hostile_checkpoint_runs_nothing(checkpointer, tmp_path):
    target = tmp_path / "touched"
    evil = checkpointer.checkpoints_dir / "CKPT+evil"
    evil.mkdir()
    (evil / "CKPT.yaml").write_text(
        f"unixtime: 1\na: !!python/object/apply:os.system ['touch {target}']\n"
    )
    assert [ckpt.path.name for ckpt in checkpointer.list_checkpoints()] == ["CKPT+evil"]
    # has the key, though no number
    assert checkpointer.find_checkpoint(max_key="a").path.name == "CKPT+evil"
    assert not target.exists()


def test_a_checkpoint_made_by_speechbrain_is_loaded(tmp_path):
    path = tmp_path / "CKPT+2025-01-02+03-04-05+00"
    path.mkdir()
    meta = {
        "unixtime": 1735786800.5,
        "end-of-epoch": True,
        "WER": np.float64(12.5),
        "shape": (1, 2),
    }
    (path / "CKPT.yaml").write_text("# yamllint disable\n" + yaml.dump(meta))
    old = nn.Linear(2, 1)
    torch.save(old.state_dict(), path / "model.ckpt")
    (path / "counter.ckpt").write_text("7")
    new = nn.Linear(2, 1)
    checkpointer = Checkpointer(tmp_path, {"model": new})
    found = checkpointer.recover_if_possible(min_key="WER")
    assert found.meta["WER"] == 12.5
    assert set(found.paramfiles) == {"model", "counter"}
    assert torch.equal(old.weight, new.weight)
    flip_a_byte(path / "model.ckpt")
    (path / "model.ckpt").write_bytes((path / "model.ckpt").read_bytes()[:-30])
    with pytest.raises(CheckpointError, match="model.ckpt cannot be read"):
        checkpointer.recover_if_possible()


# ------------------------------------------------------------------------------------------ finding


def test_the_newest_is_best_unless_told_otherwise(checkpointer):
    for n in range(3):
        save(checkpointer, n=n, unixtime=100 - n)
    assert checkpointer.find_checkpoint().meta["n"] == 0
    assert checkpointer.find_checkpoint(max_key="n").meta["n"] == 2
    assert checkpointer.find_checkpoint(min_key="n").meta["n"] == 0
    assert (
        checkpointer.find_checkpoint(importance_key=lambda ckpt: -abs(ckpt.meta["n"] - 1)).meta["n"]
        == 1
    )
    assert (
        checkpointer.find_checkpoint(ckpt_predicate=lambda ckpt: ckpt.meta["n"] > 0).meta["n"] == 1
    )
    assert [ckpt.meta["n"] for ckpt in checkpointer.find_checkpoints(max_key="n")] == [2, 1, 0]
    assert [
        ckpt.meta["n"] for ckpt in checkpointer.find_checkpoints(max_key="n", max_num_checkpoints=2)
    ] == [2, 1]
    assert checkpointer.find_checkpoints(max_num_checkpoints=0) == []
    assert checkpointer.find_checkpoint(max_key="no such key") is None
    assert sorted(map(ckpt_recency, checkpointer.list_checkpoints())) == [98.0, 99.0, 100.0]


def test_only_checkpoints_with_the_key_count(checkpointer):
    save(checkpointer, loss=1.0, n=0)
    save(checkpointer, n=1)
    assert checkpointer.find_checkpoint(min_key="loss").meta["n"] == 0
    assert len(checkpointer.find_checkpoints(min_key="loss")) == 1


def test_among_equals_the_newest_is_best(checkpointer):
    for n in range(3):
        save(checkpointer, n=n, loss=1.0, unixtime=[2, 3, 1][n])
    for options in ({"min_key": "loss"}, {"max_key": "loss"}, {"importance_key": lambda ckpt: 0}):
        assert [ckpt.meta["n"] for ckpt in checkpointer.find_checkpoints(**options)] == [1, 0, 2]


def test_two_kinds_of_keys_are_an_error(checkpointer):
    for method in (
        checkpointer.find_checkpoint,
        checkpointer.recover_if_possible,
        checkpointer.find_checkpoints,
    ):
        with pytest.raises(ValueError, match="max_key and min_key are given"):
            method(max_key="a", min_key="b")
    with pytest.raises(ValueError, match="islice"):
        checkpointer.find_checkpoints(max_num_checkpoints=-1)


@pytest.mark.parametrize(
    "bad",
    [float("nan"), None, "low", torch.tensor(float("nan")), torch.ones(2), [1]],
)
def test_what_is_no_number_ranks_worst(checkpointer, bad):
    for n, loss in enumerate([3.0, bad, 1.0, bad, 2.0]):
        save(checkpointer, n=n, loss=loss)
    assert [c.meta["n"] for c in checkpointer.find_checkpoints(min_key="loss")] == [2, 4, 0, 3, 1]
    assert [c.meta["n"] for c in checkpointer.find_checkpoints(max_key="loss")] == [0, 4, 2, 3, 1]


@pytest.mark.parametrize(
    "importance",
    [lambda c: c.meta["loss"], lambda c: (c.meta["loss"], c.meta["n"])],
)
def test_nan_ranks_worst_by_an_importance_key_too(checkpointer, importance):
    for n, loss in enumerate([3.0, float("nan"), 1.0]):
        save(checkpointer, n=n, loss=loss)
    assert [c.meta["n"] for c in checkpointer.find_checkpoints(importance_key=importance)] == [
        0,
        2,
        1,
    ]


def test_tensor_metrics_are_numbers(checkpointer):
    for n, loss in enumerate([torch.tensor(3.0), torch.tensor([1.0]), 2]):
        save(checkpointer, n=n, loss=loss)
    assert [c.meta["n"] for c in checkpointer.find_checkpoints(min_key="loss")] == [1, 2, 0]


# ----------------------------------------------------------------------------------------- deleting


def test_nan_never_deletes_the_best(checkpointer):
    for n, loss in enumerate([3.0, float("nan"), 1.0, float("nan"), 2.0]):
        checkpointer.save_and_keep_only(
            meta={"n": n, "loss": loss, "unixtime": n},
            keep_recent=False,
            min_keys=["loss"],
        )
    assert values(checkpointer) == [2]


def test_the_best_by_every_key_are_kept(checkpointer):
    for n, (loss, acc) in enumerate([(1, 1), (2, 9), (3, 3), (4, 4)]):
        save(checkpointer, n=n, loss=loss, acc=acc)
    checkpointer.delete_checkpoints(min_keys=["loss"], max_keys=["acc"])
    assert values(checkpointer) == [0, 1, 3]
    checkpointer.delete_checkpoints(min_keys=["loss"], importance_keys=[])
    assert values(checkpointer) == [0]


def test_num_to_keep(checkpointer):
    for n in range(5):
        save(checkpointer, n=n)
    checkpointer.delete_checkpoints(num_to_keep=3)
    assert values(checkpointer) == [2, 3, 4]
    with pytest.raises(ValueError, match="num_to_keep=-1"):
        checkpointer.delete_checkpoints(num_to_keep=-1)
    with pytest.raises(ValueError, match="num_to_keep=-1"):
        checkpointer.save_and_keep_only(num_to_keep=-1)
    checkpointer.delete_checkpoints(num_to_keep=0)
    assert names(checkpointer) == []


def test_only_what_matches_the_predicate_or_has_the_key_is_deleted(checkpointer):
    for n in range(4):
        save(checkpointer, n=n, **({"even": True} if n % 2 == 0 else {"loss": n}))
    checkpointer.delete_checkpoints(num_to_keep=0, ckpt_predicate=lambda ckpt: "even" in ckpt.meta)
    assert values(checkpointer) == [1, 3]
    save(checkpointer, n=5)
    checkpointer.delete_checkpoints(num_to_keep=1, min_keys=["loss"], importance_keys=[])
    assert values(checkpointer) == [1, 5]


def test_save_and_keep_only_returns_nothing_and_keeps_the_newest_as_well(checkpointer):
    for n, loss in enumerate([1.0, 2.0, 3.0]):
        assert (
            checkpointer.save_and_keep_only(
                meta={"n": n, "loss": loss, "unixtime": n},
                min_keys=["loss"],
            )
            is None
        )
    assert values(checkpointer) == [0, 2]
    checkpointer.save_and_keep_only(meta={"n": 3, "loss": 9.0, "unixtime": 3}, num_to_keep=0)
    assert values(checkpointer) == []


def test_no_call_changes_what_the_next_one_does(checkpointer):
    keys = []
    checkpointer.save_and_keep_only(meta={"n": 0, "unixtime": 0}, importance_keys=keys)
    assert keys == []
    checkpointer.delete_checkpoints()
    for n in (1, 2):
        checkpointer.save_and_keep_only(meta={"n": n, "unixtime": n}, keep_recent=False)
    assert values(checkpointer) == [0, 1, 2]
    meta = {"n": 3}
    checkpointer.save_checkpoint(meta=meta)
    assert meta == {"n": 3}


def test_a_save_lists_the_folder_a_constant_number_of_times(checkpointer):
    listings = []
    active = True

    def hook(event, args):
        if (
            active
            and event in {"os.listdir", "os.scandir"}
            and Path(str(args[0])) == checkpointer.checkpoints_dir
        ):
            listings.append(args[0])

    sys.addaudithook(hook)  # cannot be taken away again: `active` ends it
    counts = []
    for n in range(8):
        listings.clear()
        checkpointer.save_and_keep_only(meta={"n": n}, num_to_keep=100, min_keys=["n"])
        counts.append(len(listings))
    active = False
    assert len(set(counts)) == 1
    assert 1 <= counts[0] <= 6
    assert len(checkpointer.list_checkpoints()) == 8


def test_saving_under_a_name_again_leaves_no_stale_file(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Value(1), "b": Value(2)})
    checkpointer.save_checkpoint(name="x", meta={"old": 1})
    del checkpointer.recoverables["b"]
    again = checkpointer.save_checkpoint(name="x")
    assert set(again.paramfiles) == {"a"}
    assert "old" not in again.meta
    assert names(checkpointer) == ["CKPT+x"]


# ------------------------------------------------------------------------------------ missing files


@pytest.mark.parametrize("added", [False, True])
def test_a_missing_file_is_an_error_that_names_it_however_the_object_was_added(tmp_path, added):
    Checkpointer(tmp_path, {"a": Value()}).save_checkpoint()
    checkpointer = Checkpointer(tmp_path, {"a": Value()} if added else {"a": Value(), "b": Value()})
    if added:
        checkpointer.add_recoverables({"b": Value()})
    assert checkpointer.optional_recoverables == {"a": False, "b": False}
    with pytest.raises(RuntimeError, match=r"no file for the recoverable 'b'; only \['a'\]"):
        checkpointer.recover_if_possible()
    checkpointer.recoverables["c"] = checkpointer.recoverables.pop("b")  # edited directly
    with pytest.raises(RuntimeError, match="no file for the recoverable 'c'"):
        checkpointer.recover_if_possible()


def test_what_may_be_missing(tmp_path, caplog):
    Checkpointer(tmp_path, {"a": Value(5)}).save_checkpoint()
    value = Value()
    checkpointer = Checkpointer(tmp_path, {"a": value, "dataloader-TRAIN": Value()})
    checkpointer.add_recoverable("b", Value(), optional_load=True)
    checkpointer.recover_if_possible()
    assert value.value == 5
    assert "no file for 'dataloader-TRAIN'" in caplog.text
    assert "no file for 'b'" in caplog.text
    caplog.clear()
    partial = Checkpointer(tmp_path, {"a": Value(), "c": Value()}, allow_partial_load=True)
    partial.recover_if_possible()
    assert "no file" not in caplog.text


def test_nothing_is_loaded_when_something_is_missing(tmp_path):
    Checkpointer(tmp_path, {"a": Value(5)}).save_checkpoint()
    value = Value()
    checkpointer = Checkpointer(tmp_path, {"a": value, "b": Value()})
    with pytest.raises(CheckpointError):
        checkpointer.recover_if_possible()
    assert value.value == 0


def test_a_loader_that_fails_is_named(checkpointer):
    checkpointer.save_checkpoint()
    checkpointer.custom_load_hooks["value"] = lambda obj, path, end: 1 / 0
    with pytest.raises(
        CheckpointError,
        match=r"'value' from .*value.ckpt: ZeroDivisionError",
    ) as raised:
        checkpointer.recover_if_possible()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_recoverables_must_be_a_mapping(checkpointer, tmp_path):
    with pytest.raises(AttributeError, match="mapping"):
        checkpointer.add_recoverables([("a", Value())])
    with pytest.raises(AttributeError, match="mapping"):
        Checkpointer(tmp_path, [Value()])


# ------------------------------------------------------------------------------------------- damage


def remove_file(ckpt):
    ckpt.paramfiles["value"].unlink()


def truncate(ckpt):
    os.truncate(ckpt.paramfiles["value"], 10)


def rot(ckpt):
    flip_a_byte(ckpt.paramfiles["value"])


def empty_meta(ckpt):
    (ckpt.path / "CKPT.yaml").write_text("")


def broken_meta(ckpt):
    (ckpt.path / "CKPT.yaml").write_bytes(b"a: [\xff")


def no_meta(ckpt):
    (ckpt.path / "CKPT.yaml").unlink()


def no_manifest(ckpt):
    (ckpt.path / "manifest.json").unlink()


DAMAGE = {
    remove_file: "value.ckpt is missing",
    truncate: "value.ckpt has 10 bytes instead of",
    rot: "value.ckpt fails its checksum",
    empty_meta: "CKPT.yaml is empty",
    broken_meta: "CKPT.yaml cannot be read",
    no_meta: "CKPT.yaml cannot be read",
    no_manifest: "manifest.json is missing",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_reported_and_the_next_best_is_used(
    checkpointer,
    value,
    caplog,
    damage,
):
    good = save(checkpointer, 1, n=1)
    bad = save(checkpointer, 2, n=2)
    damage(bad)
    assert checkpointer.recover_if_possible() == good
    assert value.value == 1
    assert bad.path.name in caplog.text
    assert DAMAGE[damage] in caplog.text
    caplog.clear()
    checkpointer.find_checkpoint()
    assert caplog.text == ""  # once is enough


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_does_not_start_from_scratch_without_a_word(checkpointer, value, damage):
    bad = save(checkpointer, 2)
    damage(bad)
    for method in (
        checkpointer.recover_if_possible,
        checkpointer.find_checkpoint,
        checkpointer.find_checkpoints,
    ):
        with pytest.raises(CheckpointError, match="is whole") as raised:
            method()
        assert bad.path.name in str(raised.value)
        assert DAMAGE[damage] in str(raised.value)
    good = save(checkpointer, 3)
    assert checkpointer.recover_if_possible() == good


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_never_deleted_nor_counted(checkpointer, damage):
    good = save(checkpointer, 1, n=1)
    bad = save(checkpointer, 2, n=2)
    damage(bad)
    if damage is rot:
        checkpointer.find_checkpoint()  # only reading every byte shows it
    checkpointer.delete_checkpoints(num_to_keep=1)
    assert good.path.exists()
    assert bad.path.exists()
    checkpointer.delete_checkpoints(num_to_keep=0)
    assert not good.path.exists()
    assert bad.path.exists()


def test_loading_a_damaged_checkpoint_by_hand_is_refused(checkpointer, value):
    ckpt = save(checkpointer, 5)
    value.value = 0
    rot(ckpt)
    with pytest.raises(CheckpointError, match="is damaged: value.ckpt fails its checksum"):
        checkpointer.load_checkpoint(ckpt)
    assert value.value == 0


def test_loading_by_hand(checkpointer, value):
    first = save(checkpointer, 1)
    save(checkpointer, 2)
    checkpointer.load_checkpoint(first)
    assert value.value == 1


def test_how_closely_to_look_can_be_chosen(checkpointer, value):
    save(checkpointer, 1)
    bad = save(checkpointer, 2)
    (bad.path / "extra.txt").write_text("a user's note")
    text = (bad.path / "CKPT.yaml").read_text()
    (bad.path / "CKPT.yaml").write_text(text.replace("end-of-epoch: true", "end-of-epoch: trua"))
    checkpointer.verify_mode = "size"
    assert checkpointer.find_checkpoint() == bad
    checkpointer.verify_mode = "full"
    assert checkpointer.find_checkpoint() != bad
    checkpointer.verify_mode = "off"
    truncate(bad)
    assert checkpointer.find_checkpoint() == bad


def test_other_directories_and_files_are_no_checkpoints(checkpointer):
    folder = checkpointer.checkpoints_dir
    (folder / "CKPT+empty").mkdir()
    (folder / "CKPT+file").write_text("")
    (folder / "other").mkdir()
    assert checkpointer.list_checkpoints() == []
    assert checkpointer.recover_if_possible() is None
    ckpt = checkpointer.save_checkpoint()
    checkpointer.delete_checkpoints(num_to_keep=0)
    assert not ckpt.path.exists()
    assert names(checkpointer) == ["CKPT+empty", "CKPT+file", "other"]


# ------------------------------------------------------------------------------------- failed saves


def test_a_saver_that_fails_leaves_nothing_and_names_itself(checkpointer):
    good = save(checkpointer, 1)

    def saver(obj, path):
        path.write_text("half")
        raise KeyError("gone")

    checkpointer.add_recoverable("other", object(), lambda *args: None, saver)
    with pytest.raises(CheckpointError, match="recoverable 'other': KeyError: 'gone'") as raised:
        checkpointer.save_checkpoint()
    assert str(checkpointer.checkpoints_dir) in str(raised.value)
    assert names(checkpointer) == [good.path.name]


def test_a_full_disk_is_named_although_torch_hides_it(tmp_path, monkeypatch):
    class FullDisk(storage.FileOperations):
        def write(self, path, writer):
            if path.suffix == ".ckpt":
                path.touch()
                path = Path("/dev/full")
            super().write(path, writer)

    checkpointer = Checkpointer(tmp_path, {"model": nn.Linear(300, 300)})
    good = checkpointer.save_checkpoint()
    monkeypatch.setattr(storage, "FILES", FullDisk())
    with pytest.raises(CheckpointError, match="no space left") as raised:
        checkpointer.save_and_keep_only()
    assert raised.value.__cause__.errno == errno.ENOSPC
    assert " bytes free" in str(raised.value)
    assert names(checkpointer) == [good.path.name]
    assert checkpointer.find_checkpoint() == good


def test_leftovers_are_removed_by_the_next_save_and_not_by_a_reader(checkpointer):
    (checkpointer.checkpoints_dir / ".tmp-0123").mkdir()
    (checkpointer.checkpoints_dir / ".trash-0123").mkdir()
    assert checkpointer.find_checkpoint() is None
    assert names(checkpointer) == [".tmp-0123", ".trash-0123"]
    ckpt = checkpointer.save_checkpoint()
    assert names(checkpointer) == [ckpt.path.name]


def test_death_between_the_two_renames_loses_nothing(checkpointer, value, monkeypatch):
    class Dead(BaseException):
        pass

    class Dying(storage.FileOperations):
        def rename(self, source, target):
            if target.name.startswith("CKPT"):
                raise Dead
            super().rename(source, target)

    value.value = 1
    checkpointer.save_checkpoint(name="best")
    with monkeypatch.context() as patch:
        patch.setattr(storage, "FILES", Dying())
        with pytest.raises(Dead):
            checkpointer.save_checkpoint(name="best")
    assert "CKPT+best" not in names(checkpointer)
    value.value = 0
    again = Checkpointer(checkpointer.checkpoints_dir, {"value": value})
    assert again.recover_if_possible().path.name == "CKPT+best"
    assert value.value == 1


# ---------------------------------------------------------------------------------------- averaging


def test_averaging_changes_no_input_and_keeps_counters():
    def state(weight, batches):
        return {
            "w": torch.tensor([weight, 1.0]),
            "half": torch.tensor([weight], dtype=torch.float16),
            "complex": torch.tensor([weight + 1j]),
            "batches": torch.tensor(batches),
            "mask": torch.tensor([True]),
            "name": "x",
        }

    states = [state(1.0, 3), state(2.0, 5), state(6.0, 100)]
    before = [{key: value.clone() for key, value in s.items() if key != "name"} for s in states]
    average = average_state_dicts(iter(states))
    assert torch.equal(average["w"], torch.tensor([3.0, 1.0]))
    assert average["half"].dtype == torch.float16
    assert average["half"].item() == 3.0
    assert average["complex"].item() == 3 + 1j
    assert average["batches"].item() == 3
    assert average["batches"].dtype == torch.int64
    assert average["mask"].item() is True
    assert average["name"] == "x"
    for state_before, state_after in zip(before, states, strict=True):
        assert all(torch.equal(state_before[key], state_after[key]) for key in state_before)
    average["w"].zero_()
    average["batches"].zero_()
    assert torch.equal(states[0]["w"], before[0]["w"])
    assert states[0]["batches"].item() == 3


def test_half_precision_does_not_overflow():
    states = [{"w": torch.tensor([60000.0], dtype=torch.float16)}] * 3
    assert (
        average_state_dicts(states)["w"].item() == torch.tensor(60000.0, dtype=torch.float16).item()
    )


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "no state"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], "'a', 'b'"),
        (
            [{"a": torch.ones(1)}, {"a": torch.ones(2)}],
            r"differ in names or shapes: \['a'\]",
        ),
        ([{"a": torch.ones(1)}, {"a": 1.0}], r"differ in names or shapes: \['a'\]"),
        ([{"a": torch.ones(1)}, {3: torch.ones(1)}], "'3', 'a'"),
        ([5], "an int cannot be averaged"),
        ([{"a": torch.ones(1)}, [torch.ones(1)]], "a list cannot be averaged"),
    ],
)
def test_what_cannot_be_averaged_is_named(states, message):
    with pytest.raises(ConfigError, match=message):
        average_state_dicts(states)


def test_averaging_checkpoints(tmp_path):
    model = nn.Linear(1, 1)
    checkpointer = Checkpointer(tmp_path, {"model": model})
    for weight in (1.0, 2.0, 6.0):
        nn.init.constant_(model.weight, weight)
        nn.init.constant_(model.bias, 1.0)
        checkpointer.save_checkpoint()
    found = checkpointer.find_checkpoints(max_num_checkpoints=3)
    model.load_state_dict(average_checkpoints(found, "model"))
    assert model.weight.item() == 3.0
    calls = []

    def loader(path, map_location):
        calls.append(map_location)
        return path

    assert average_checkpoints(found, "model", loader, list) == [
        ckpt.paramfiles["model"] for ckpt in found
    ]
    assert calls == ["cpu"] * 3
    with pytest.raises(CheckpointError, match="no file for 'other'"):
        average_checkpoints(found, "other")


def test_recipes_import_it_all_from_here():
    for name in checkpoints.__all__:
        assert hasattr(checkpoints, name)
    wanted = {
        "Checkpointer",
        "DEFAULT_LOAD_HOOKS",
        "DEFAULT_SAVE_HOOKS",
        "DEFAULT_TRANSFER_HOOKS",
        "torch_save",
    }
    wanted |= {
        "torch_recovery",
        "torch_parameter_transfer",
        "mark_as_transfer",
        "register_checkpoint_hooks",
    }
    assert wanted <= set(checkpoints.__all__)


def test_a_key_that_no_checkpoint_has_is_worth_a_warning(checkpointer, caplog):
    caplog.set_level("INFO")
    assert checkpointer.recover_if_possible() is None
    assert caplog.records[-1].levelname == "INFO"
    save(checkpointer, error=0.5)
    assert checkpointer.recover_if_possible(min_key="eror") is None
    assert caplog.records[-1].levelname == "WARNING"
    assert "has 'eror' in its meta: nothing is loaded" in caplog.messages[-1]
    assert caplog.messages[-1].endswith(
        " The keys with numbers are: 'error'. Did you mean 'error'?"
    )
    assert checkpointer.recover_if_possible(max_key="accuracy") is None
    assert caplog.messages[-1].endswith(" The keys with numbers are: 'error'.")


def test_without_checkpoints_there_is_no_key_to_name(checkpointer, caplog):
    assert checkpointer.recover_if_possible(min_key="error") is None
    assert caplog.messages[-1].endswith(" There are no checkpoints.")


# ------------------------------------------------------------------------------- a clock that jumps


def test_a_clock_that_is_set_back_does_not_make_the_newest_old(tmp_path, monkeypatch):
    def run(now, number):
        monkeypatch.setattr(checkpoint_folder.time, "time", lambda: now)
        checkpointer = Checkpointer(tmp_path, {"value": Value(number)})
        checkpointer.recover_if_possible()
        for name in ("a", "b"):
            checkpointer.recoverables["value"].value = number
            checkpointer.save_and_keep_only(name=f"{number}{name}", num_to_keep=1)
        return [path.name for path in tmp_path.glob("CKPT*")]

    assert run(2e9, 1) == ["CKPT+1b"]
    assert run(1e9, 2) == ["CKPT+2b"], "thirty years back"
    assert run(2e9 + 1, 3) == ["CKPT+3b"]
    assert int(Checkpointer(tmp_path).find_checkpoint().meta["unixtime"]) == 2e9 + 1


def test_a_time_without_end_moves_no_other(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"value": Value()})
    checkpointer.save_checkpoint({"unixtime": math.inf})
    assert math.isfinite(checkpointer.save_checkpoint().meta["unixtime"])


def test_what_a_replacement_has_left_does_not_stop_a_deletion(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"value": Value()})
    checkpointer.save_checkpoint(name="one")
    old = tmp_path / ".trash-of-CKPT+one"
    old.mkdir()
    (old / "value.ckpt").touch()
    checkpointer.delete_checkpoints(num_to_keep=0)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------- relative folders


def test_a_relative_folder_stays_where_it_was_when_the_working_directory_changes(
    tmp_path,
    monkeypatch,
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    value = Value(1)
    checkpointer = Checkpointer("save", {"value": value})
    assert checkpointer.checkpoints_dir == tmp_path / "save"
    monkeypatch.chdir(tmp_path / "elsewhere")
    saved = checkpointer.save_checkpoint(name="a")
    assert saved.path == tmp_path / "save" / "CKPT+a"
    value.value = 2
    checkpointer.checkpoints_dir = Path("other")
    assert checkpointer.checkpoints_dir == tmp_path / "elsewhere" / "other"
    assert checkpointer.recover_if_possible() is None
    checkpointer.checkpoints_dir = "../save"
    assert checkpointer.recover_if_possible().path.samefile(saved.path)
    assert value.value == 1
    assert names(checkpointer) == ["CKPT+a"]


def test_a_folder_keeps_its_links(tmp_path, monkeypatch):
    (tmp_path / "far" / "run").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "far" / "run")
    monkeypatch.chdir(tmp_path)
    assert Checkpointer("run/save").checkpoints_dir == tmp_path / "run" / "save"
    beside = Checkpointer("run/../save")
    assert beside.checkpoints_dir.samefile(tmp_path / "far" / "save"), (
        "as the system reads it: beside what it links to"
    )


def test_a_relative_path_to_resume_from_is_found_once_more_from_elsewhere(tmp_path, monkeypatch):
    value = Value(1)
    Checkpointer(tmp_path / "old", {"value": value}).save_checkpoint(name="a")
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer("new", {"value": value})
    checkpointer.resume = "old/CKPT+a"
    found = checkpointer.recover_if_possible()
    monkeypatch.chdir("/")
    checkpointer.load_checkpoint(found)
    assert checkpointer.last_loaded == tmp_path / "old" / "CKPT+a"


# ----------------------------------------------------------------------------- what is not taken up


def test_what_no_recoverable_has_taken_up_is_known(tmp_path):
    everything = {name: Value(number) for number, name in enumerate("abc")}
    Checkpointer(tmp_path, everything).save_checkpoint(name="one")
    checkpointer = Checkpointer(tmp_path, {"a": Value()})
    assert checkpointer.not_taken == ()
    found = checkpointer.recover_if_possible()
    assert checkpointer.not_taken == ("b", "c")
    checkpointer.recoverables = {"b": Value()}
    checkpointer.load_checkpoint(found)
    assert checkpointer.not_taken == ("c",), "a was taken up before"
    checkpointer.save_checkpoint(name="two")
    checkpointer.recover_if_possible()
    assert checkpointer.not_taken == ()


# ------------------------------------------------------------------------------------------- 8 bits


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantized_weights_are_refused_by_name(dtype):
    with pytest.raises(ConfigError, match=r"net\.codes has 8 bits: such codes have no mean"):
        average_state_dicts([{"net.codes": torch.ones(2).to(dtype)}])


def test_a_name_is_not_used_again_within_a_second(checkpointer, monkeypatch):
    monkeypatch.setattr(checkpoint_folder.time, "strftime", lambda *_: "2026-01-02+03-04-05")
    found = []
    for _ in range(3):
        found.append(checkpointer.save_checkpoint().path.name)
        checkpointer.delete_checkpoints(num_to_keep=0)
    assert found == [f"CKPT+2026-01-02+03-04-05+{number:02d}" for number in range(3)]


def test_the_name_of_a_checkpoint_of_an_earlier_process_is_not_used_again_either(
    checkpointer,
    monkeypatch,
):
    monkeypatch.setattr(checkpoint_folder.time, "strftime", lambda *_: "2026-01-02+03-04-05")
    checkpointer.save_checkpoint()
    again = Checkpointer(checkpointer.checkpoints_dir, {"value": Value()})
    again.delete_checkpoints(num_to_keep=0)
    assert again.save_checkpoint().path.name == "CKPT+2026-01-02+03-04-05+01"


def test_a_checkpoint_that_was_saved_under_the_name_of_another_is_another(checkpointer):
    first = checkpointer.save_checkpoint(name="best")
    second = checkpointer.save_checkpoint(name="best")
    assert first.path == second.path
    assert first != second
    assert len({first, second}) == 2
    assert second == checkpointer.find_checkpoint()
    assert {second: "loss"}[checkpointer.find_checkpoint()] == "loss"


def test_a_save_in_the_second_of_one_by_another_process_takes_a_free_name(
    tmp_path,
    value,
    monkeypatch,
):
    monkeypatch.setattr("time.strftime", lambda *_: "2020-01-01+00-00-00")
    first, second = (Checkpointer(tmp_path, {"value": value}).save_checkpoint() for _ in range(2))
    assert [one.path.name[-2:] for one in (first, second)] == ["00", "01"]
