"""The real trackers, on two ranks: a run that is killed goes on in the tracker's run, and no step
stands there twice where the tracker lets the logger see to it.
"""

from __future__ import annotations

import sqlite3
import warnings
from pathlib import Path

import pytest

from ddpkit.distributed import if_main_process
from tests.ecosystem import OFFLINE, needs
from tests.rank_pool import RankPool
from tests.train_logger.recipes import ENDS, KILLED, NEWEST, train

pytestmark = needs("mlflow", "trackio", "wandb")


@pytest.fixture(scope="module")
def own_ranks():
    """Ranks that end with this module, and with them what it has imported."""
    with RankPool(timeout=300) as pool:
        yield pool


def let_trackers_warn():
    """Warnings in the code of trackers are theirs; these ranks end with the module."""
    warnings.simplefilter("ignore")


def by_mlflow(folder, dies_at):
    from ddpkit.train_logger import MLflowLogger

    let_trackers_warn()
    train_logger = MLflowLogger("lines", f"sqlite:///{folder}/mlflow.db", run_name="first")
    train(folder, train_logger, dies_at, is_tested=True)
    train_logger.close()
    return train_logger.run_id


def test_mlflow_has_each_step_of_a_killed_run_once(own_ranks, tmp_path):
    killed = own_ranks.run(by_mlflow, str(tmp_path), KILLED, world_size=2)
    through = own_ranks.run(by_mlflow, str(tmp_path), None, world_size=2)
    assert killed[0]
    assert killed[1] is None
    assert through == [killed[0]] * 2  # the second rank has it from the checkpoint
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        rows = database.execute(
            "select key, step, value from metrics order by key, step"
        ).fetchall()
        status = database.execute("select name, status from runs").fetchall()
    steps = {}
    for key, step, _ in rows:
        steps.setdefault(key, []).append(step)
    assert steps == {
        "epoch": ENDS,
        "train/loss": ENDS,
        "train/error": ENDS,
        "valid/loss": ENDS,
        "valid/error": ENDS,
        "test/loss": [NEWEST],
        "test/error": [NEWEST],
    }
    assert status == [("first", "FINISHED")]


def by_trackio(folder, dies_at):
    from ddpkit.train_logger import TrackioLogger

    let_trackers_warn()
    train_logger = TrackioLogger("lines", auto_log_cpu=False, auto_log_gpu=False)
    train(folder, train_logger, dies_at, is_tested=True)
    if if_main_process():
        train_logger.run.finish()
    return train_logger.run_id


def test_trackio_goes_on_in_its_run(own_ranks, tmp_path):
    env = {**OFFLINE, "TRACKIO_DIR": str(tmp_path / "trackio")}
    killed = own_ranks.run(by_trackio, str(tmp_path), KILLED, world_size=2, env=env)
    through = own_ranks.run(by_trackio, str(tmp_path), None, world_size=2, env=env)
    assert killed[0]
    assert through == [killed[0]] * 2
    with sqlite3.connect(tmp_path / "trackio" / "lines.db") as database:
        rows = database.execute("select run_name, step from metrics order by step").fetchall()
    # Trackio keeps the value of the step that was made twice, and the test's
    assert rows == [(killed[0], step) for step in (4, 8, 8, NEWEST, 12)]


def by_wandb(folder, dies_at):
    from ddpkit.train_logger import WandBLogger

    let_trackers_warn()
    train_logger = WandBLogger(project="lines", mode="offline", dir=folder)
    train(folder, train_logger, dies_at, is_tested=True)
    if if_main_process():
        train_logger.run.finish()
    return train_logger.run_id


def test_wandb_goes_on_in_its_run(own_ranks, tmp_path):
    killed = own_ranks.run(by_wandb, str(tmp_path), KILLED, world_size=2)
    through = own_ranks.run(by_wandb, str(tmp_path), None, world_size=2)
    assert killed[0]
    assert through == [killed[0]] * 2
    files = sorted(Path(tmp_path, "wandb").glob("offline-run-*/run-*.wandb"))
    assert [path.name for path in files] == [f"run-{killed[0]}.wandb"] * 2
    assert all(path.stat().st_size for path in files)


def unreachable():
    from ddpkit.train_logger import MLflowLogger

    let_trackers_warn()
    # a port of this machine at which nobody listens
    MLflowLogger("lines", "http://127.0.0.1:9", timeout_seconds=1.0).begin_fit(0)


def test_a_server_that_does_not_answer_is_told_before_the_first_epoch(own_ranks):
    (outcome,) = own_ranks.outcomes(unreachable, world_size=1)
    assert outcome.error_type == "ConfigError"
    assert "MLflow cannot be opened" in outcome.error
