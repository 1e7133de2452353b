"""Which files a run has, and what is said of a folder that is none."""

from __future__ import annotations

import pytest

from ddpkit.checkpointing import FolderLock
from ddpkit.errors import ConfigError, MissingFileError
from ddpkit.see import find_runs


def a_run(folder, name="metrics.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("")
    return folder


def test_a_run_is_a_folder_or_its_log(tmp_path):
    folder = a_run(tmp_path / "1234")
    by_folder, by_log = find_runs([folder, folder / "metrics.jsonl"])
    assert by_folder.metrics == by_log.metrics == folder / "metrics.jsonl"
    assert [by_folder.label, by_log.label] == ["1234", "1234 (2)"]
    (tests_alone,) = find_runs([a_run(tmp_path / "5", "metrics.test_only.jsonl")])
    assert tests_alone.metrics.name == "metrics.test_only.jsonl"


def test_labels_are_as_long_as_they_must_be(tmp_path):
    runs = find_runs([a_run(tmp_path / "digits" / "1"), a_run(tmp_path / "gan" / "1")])
    assert [run.label for run in runs] == ["digits/1", "gan/1"]


def test_a_folder_that_is_no_run_is_refused_with_what_was_looked_for(tmp_path):
    words = r"no metrics\.jsonl and no metrics\.test_only\.jsonl.*output_folder"
    with pytest.raises(ConfigError, match=words):
        find_runs([tmp_path])
    with pytest.raises(MissingFileError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])


def test_runs_below_or_above_a_wrong_folder_are_named(tmp_path):
    run = a_run(tmp_path / "results" / "digits" / "1234")
    with pytest.raises(ConfigError, match="Runs below it: .*digits/1234'"):
        find_runs([tmp_path / "results"])
    (run / "save").mkdir()
    with pytest.raises(ConfigError, match="The run is perhaps .*digits/1234'"):
        find_runs([run / "save"])


def test_a_run_is_going_on_while_its_folder_is_locked(tmp_path):
    folder = a_run(tmp_path / "1234")
    (run,) = find_runs([folder])
    assert not run.is_running()
    with FolderLock(folder, ".run.lock").hold():
        assert run.is_running()
    assert not run.is_running()
