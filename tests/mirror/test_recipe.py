"""A recipe whose output folder is in an object store, as its command line or its YAML says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from ddpkit.checkpoints import Checkpointer
from ddpkit.errors import ConfigError
from ddpkit.experiment import create_experiment_directory
from ddpkit.hparams import load_hparams
from ddpkit.run_opts import parse_arguments
from ddpkit.train_logger import CSVTrainLogger, FileTrainLogger, JSONLTrainLogger, TrainLoggers
from tests.mirror.conftest import (
    Dead,
    Trained,
    checkpoints_in,
    fsspec,
    names_in,
    other_machine,
    train,
    weights,
)

RECIPE = """
name: seven
bucket: results
output_folder: !ref <bucket>/<name>
save_folder: !ref <output_folder>/save
"""


class Logs(Trained):
    """Also writes a row of a table for each epoch, before it saves."""

    dies_in = 0

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage.name == "TRAIN":
            self.hparams.train_logger.log_stats({"epoch": epoch}, {"loss": stage_loss})
        super().on_stage_end(stage, stage_loss, epoch)


class LogsAndDies(Logs):
    dies_in = 3


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Reads the command line of a recipe, and returns the values of its YAML."""
    file = tmp_path / "hparams.yaml"
    file.write_text(RECIPE)

    def read(*words):
        monkeypatch.setattr(sys, "argv", ["train.py", str(file), *words])
        path, run_opts, overrides = parse_arguments()
        hparams = load_hparams(path, overrides)
        return hparams, run_opts, overrides, path

    return read


def run(recipe, *words, kind=Logs, epochs=4):
    hparams, run_opts, overrides, path = recipe(*words)
    create_experiment_directory(hparams["output_folder"], path, overrides, save_env_desc=False)
    folder = Path(hparams["output_folder"])
    hparams["train_logger"] = TrainLoggers(
        FileTrainLogger(folder / "train_log.txt"),
        CSVTrainLogger(folder / "rows.csv"),
        JSONLTrainLogger(folder / "rows.jsonl"),
    )
    checkpointer = Checkpointer(hparams["save_folder"])
    return train(checkpointer, epochs, kind=kind, hparams=hparams, debug=run_opts.debug)


def text(url, name):
    return fsspec.open(f"{url}/{name}").open().read().decode()


def test_a_recipe_sees_a_folder_of_this_machine_alone(store, recipe):
    hparams, _, overrides, _ = recipe(f"--bucket={store}")
    assert Path(hparams["output_folder"]).is_dir()
    assert hparams["save_folder"] == f"{hparams['output_folder']}/save"
    assert "://" not in hparams["save_folder"]
    assert f'output_folder: "{hparams["output_folder"]}"' in overrides


def test_an_output_folder_of_a_disk_stays_as_it_is(recipe):
    hparams, _, overrides, _ = recipe("--bucket=results")
    assert hparams["output_folder"] == "results/seven"
    assert overrides == "bucket: results"
    assert "fsspec" not in overrides


@pytest.mark.costly
def test_all_of_the_output_folder_is_in_the_store_at_the_end(store, recipe):
    run(recipe, f"--output_folder={store}")
    other_machine()
    names = {name for name in names_in(store) if "CKPT" not in name and "/." not in f"/{name}"}
    assert names == {
        "hparams.yaml".replace("hparams", "hyperparams"),
        "log.txt",
        "metrics.jsonl",
        "rows.csv",
        "rows.jsonl",
        "save/latest",
        "test_recipe.py",
        "train_log.txt",
    }
    assert len(checkpoints_in(f"{store}/save")) == 1
    assert f"output_folder: {store}" in text(store, "hyperparams.yaml")


@pytest.mark.costly
def test_rows_of_a_run_that_goes_on_elsewhere_are_there_once(store, recipe, tmp_path):
    whole = run(recipe, f"--output_folder={tmp_path / 'whole'}")
    expected = {
        name: (tmp_path / "whole" / name).read_text() for name in ("train_log.txt", "rows.csv")
    }
    other_machine()
    with pytest.raises(Dead):
        run(recipe, f"--output_folder={store}", kind=LogsAndDies)
    other_machine()
    brain = run(recipe, f"--output_folder={store}")
    other_machine()
    assert torch.equal(weights(brain), weights(whole))
    assert {name: text(store, name) for name in expected} == expected
    events = [json.loads(line) for line in text(store, "metrics.jsonl").splitlines()]
    assert [event["event"] for event in events if event["event"] == "start"] == ["start"] * 2
    saves = [event["path"] for event in events if event["event"] == "checkpoint"]
    assert saves
    assert all(path.startswith(f"{store}/save/CKPT+") for path in saves)
    epochs = [event["meta"]["epoch"] for event in events if event["event"] == "stats"]
    assert epochs == [1, 2, 3, 4]


def test_files_stand_in_the_store_before_the_checkpoint_that_counts_them(
    store, recipe, monkeypatch
):
    kind = type(fsspec.filesystem("memory"))
    written = []
    plain, plain_put = kind.pipe_file, kind.put_file
    monkeypatch.setattr(
        kind,
        "pipe_file",
        lambda self, path, *args, **kw: written.append(path) or plain(self, path, *args, **kw),
    )
    monkeypatch.setattr(
        kind,
        "put_file",
        lambda self, file, path, *args, **kw: (
            written.append(path) or plain_put(self, file, path, *args, **kw)
        ),
    )
    run(recipe, f"--output_folder={store}", epochs=1)
    tables = [number for number, path in enumerate(written) if path.endswith("rows.csv")]
    manifests = [number for number, path in enumerate(written) if path.endswith("manifest.json")]
    assert tables[0] < manifests[0]


@pytest.mark.costly
def test_with_never_the_logs_of_an_earlier_run_are_moved_aside_in_the_store(store, recipe):
    run(recipe, f"--output_folder={store}", epochs=1)
    other_machine()
    run(recipe, f"--output_folder={store}", "--resume=never", epochs=1)
    other_machine()
    moved = {name.rpartition("/")[2] for name in names_in(store) if name.startswith("earlier-")}
    assert {"log.txt", "metrics.jsonl"} <= moved
    starts = [line for line in text(store, "metrics.jsonl").splitlines() if '"start"' in line]
    assert len(starts) == 1


def test_a_rehearsal_leaves_the_store_alone(store, recipe):
    run(recipe, f"--output_folder={store}", "--debug", kind=Logs)
    other_machine()
    assert names_in(store) == []


def test_a_folder_that_is_given_by_its_url_is_mirrored_too(store):
    create_experiment_directory(store, save_env_desc=False)
    train_logger = FileTrainLogger(f"{store}/train_log.txt")
    train_logger.log_stats({"epoch": 1}, {"loss": 0.5})
    other_machine()
    assert "train loss: 5.00e-01" in text(store, "train_log.txt")


@pytest.mark.parametrize("kind", [FileTrainLogger, CSVTrainLogger, JSONLTrainLogger])
def test_a_logger_refuses_a_url_that_nothing_mirrors(kind):
    with pytest.raises(ConfigError, match="--output_folder=<URL>"):
        kind("s3://bucket/run/rows")


def test_a_url_that_leads_out_of_the_mirror_is_refused(store):
    Checkpointer(store)
    with pytest.raises(ConfigError, match="has a part that leads elsewhere"):
        FileTrainLogger(f"{store}/a/../../log.txt")


def test_predictions_go_into_the_store(store, recipe):
    brain = run(recipe, f"--output_folder={store}", epochs=1)
    brain.predict([(torch.zeros(3, dtype=torch.float64), 0)], output=f"{store}/out.jsonl")
    other_machine()
    assert "out.jsonl" in names_in(store)


@pytest.mark.parametrize("url", ["s3://", "s3:///", "gs:///run", "memory://"])
def test_a_url_without_a_bucket_is_refused(recipe, url):
    with pytest.raises(ConfigError, match="names no bucket"):
        recipe(f"--output_folder={url}")
    with pytest.raises(ConfigError, match="names no bucket"):
        Checkpointer(url)


@pytest.mark.parametrize("word", ["hidden", "hid@den", "hid/den@x"])
def test_a_url_with_a_password_is_refused_and_not_shown(recipe, word):
    url = f"s3://key:{word}@bucket/run"
    with pytest.raises(ConfigError, match="holds a user and a password") as caught:
        recipe(f"--output_folder={url}")
    assert "hid" not in str(caught.value)
    with pytest.raises(ConfigError, match="holds a user and a password") as caught:
        Checkpointer(url)
    assert "hid" not in str(caught.value)
