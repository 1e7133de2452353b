"""Real ranks: main makes the folder, all know it or why not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from ddpkit.distributed import if_main_process
from ddpkit.experiment import LOCK_NAME, close_experiment, create_experiment_directory
from ddpkit.logger import get_logger


def create(folder, hyperparams=None, main_only=False):
    try:
        if not main_only or if_main_process():
            create_experiment_directory(folder, hyperparams, {"seed": 4})
            assert Path(folder).is_dir()
            get_logger("ddpkit.tests").error("from rank %d", dist.get_rank())
    finally:
        close_experiment()


def create_before_the_group():
    folder = os.environ["FOLDER"]
    try:
        create_experiment_directory(folder)
    finally:
        close_experiment()


@pytest.mark.costly
@pytest.mark.parametrize("main_only", [False, True])
def test_main_writes_and_nobody_hangs(ranks, tmp_path, main_only):
    recipe = tmp_path / "train.yaml"
    recipe.write_text("seed: 3\nfolder: !ref results/<seed>\n")
    ranks.run(create, str(tmp_path / "out"), str(recipe), main_only)
    names = {"env.log", "hyperparams.yaml", "log.txt", "metrics.jsonl", "test_experiment.py"}
    found = {path.name for path in (tmp_path / "out").iterdir()} - {LOCK_NAME}
    assert found == names | (set() if main_only else {"log.rank1.txt"})
    assert "folder: results/4" in (tmp_path / "out" / "hyperparams.yaml").read_text()
    assert "from rank 0" in (tmp_path / "out" / "log.txt").read_text()
    assert "processes: 2" in (tmp_path / "out" / "env.log").read_text()
    if not main_only:
        assert "[rank: 1] from rank 1" in (tmp_path / "out" / "log.rank1.txt").read_text()
    (event,) = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert (event["event"], event["world_size"]) == ("start", 2)


@pytest.mark.costly
def test_a_folder_that_cannot_be_made_fails_on_every_rank(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    outcomes = ranks.outcomes(create, str(tmp_path / "file" / "out"))
    assert [outcome.error_type for outcome in outcomes] == ["ConfigError"] * 2
    for outcome in outcomes:
        assert (
            f"experiment_directory='{tmp_path}/file/out' cannot be written: Not a directory"
            in outcome.error
        )


def test_missing_hyperparams_fail_on_every_rank(ranks, tmp_path):
    outcomes = ranks.outcomes(create, str(tmp_path / "out"), str(tmp_path / "none.yaml"))
    assert [outcome.error_type for outcome in outcomes] == ["MissingFileError"] * 2
    assert all("none.yaml' does not exist" in outcome.error for outcome in outcomes)


@pytest.mark.costly
def test_before_the_process_group_main_alone_writes(ranks, tmp_path):
    folder = tmp_path / "out"
    ranks.run(create_before_the_group, init=False, env={"FOLDER": str(folder)})
    assert Path(folder, "metrics.jsonl").read_text().count("\n") == 1
    assert not list(folder.glob("*rank1*"))
