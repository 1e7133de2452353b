"""A store that lists new files late, and files that are gone: what a run goes on with is there."""

from __future__ import annotations

import json
import uuid

import pytest

from ddpkit.mirror import mirror_of
from ddpkit.mirror.files import FILE_INDEX
from ddpkit.object_store import Objects
from ddpkit.train_logger import CSVTrainLogger
from tests import faulty_store
from tests.mirror.conftest import Checkpointer, Dead, Trained, other_machine, train


class Logs(Trained):
    """Writes a row of a table for each epoch, before it saves."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage.name == "TRAIN":
            self.hparams.train_logger.log_stats({"epoch": epoch}, {"loss": stage_loss})
        super().on_stage_end(stage, stage_loss, epoch)


class LogsAndDies(Logs):
    dies_in = 3


@pytest.fixture
def url(store, monkeypatch):
    """The URL of an empty folder of a store that lists nothing new."""
    faulty_store.register()
    faulty_store.FaultyFileSystem.store.clear()
    faulty_store.reset(late=True)
    yield f"faulty://{uuid.uuid4().hex}/run"
    other_machine()
    faulty_store.reset()


def run(url, kind=Logs):
    folder = mirror_of(url)
    hparams = {"train_logger": CSVTrainLogger(folder / "rows.csv")}
    train(Checkpointer(folder / "save"), 4, kind=kind, hparams=hparams)


def objects():
    return faulty_store.FaultyFileSystem(skip_instance_cache=True)


def content(url, name):
    return objects().cat_file(f"{url.removeprefix('faulty://')}/{name}").decode()


def epochs_in(url):
    return [line.partition(",")[0] for line in content(url, "rows.csv").splitlines()[1:]]


def test_rows_that_are_not_listed_yet_are_there_once(url):
    with pytest.raises(Dead):
        run(url, LogsAndDies)
    other_machine()
    run(url)
    other_machine()
    assert epochs_in(url) == ["1", "2", "3", "4"]
    assert "rows.csv" in json.loads(content(url, FILE_INDEX.name))["files"]


def test_a_file_that_has_grown_since_it_was_listed_is_read_whole(url):
    with pytest.raises(Dead):
        run(url, LogsAndDies)
    name = f"{url.removeprefix('faulty://')}/rows.csv"
    objects().catch_up()
    faulty_store.FAULTS.listed[f"/{name}"]["size"] = 3
    other_machine()
    run(url)
    other_machine()
    assert epochs_in(url) == ["1", "2", "3", "4"]


def test_a_file_that_is_listed_and_gone_keeps_nobody_from_going_on(url):
    folder = mirror_of(url)
    run(url)
    (folder / "notes.txt").write_text("")
    other_machine()
    objects().catch_up()
    folder = mirror_of(url)
    checkpointer = Checkpointer(folder / "save")
    with checkpointer.hold_folder():
        assert (folder / "notes.txt").exists()
        (folder / "notes.txt").unlink()
    other_machine()
    assert "notes.txt" not in json.loads(content(url, FILE_INDEX.name))["files"]
    folder = mirror_of(url)
    with Checkpointer(folder / "save").hold_folder():
        assert not (folder / "notes.txt").exists()
        assert (folder / "rows.csv").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"files": [3]}', '{"files": ["a\\u0000"]}'])
def test_an_index_that_says_nothing_leaves_the_listing(url, text, caplog):
    run(url)
    other_machine()
    place = url.removeprefix("faulty://")
    objects().pipe_file(f"{place}/{FILE_INDEX.name}", text.encode())
    objects().catch_up()
    folder = mirror_of(url)
    with Checkpointer(folder / "save").hold_folder():
        assert (folder / "rows.csv").exists()
    assert "cannot be understood" in caplog.text


def test_an_index_that_names_other_folders_leads_nowhere(url, monkeypatch):
    run(url)
    other_machine()
    place = url.removeprefix("faulty://")
    bad = ["../evil", "/evil", "a/../../evil", ".run.json"]
    names = [*bad, "rows.csv"]
    objects().pipe_file(f"{place}/{FILE_INDEX.name}", json.dumps({"files": names}).encode())
    asked = []
    size = Objects.size
    monkeypatch.setattr(Objects, "size", lambda self, name: asked.append(name) or size(self, name))
    folder = mirror_of(url)
    with Checkpointer(folder / "save").hold_folder():
        assert asked
    assert not {*bad}.intersection(asked)
