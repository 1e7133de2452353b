"""MLflow's logger with a client in memory: what is refused, and how the run ends.

With the real MLflow: tests/ranks/test_trackers.py.
"""

from __future__ import annotations

import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from ddpkit.base import PROCESS
from ddpkit.train_logger import MLflowLogger


class Refused(Exception):
    """As MLflow raises it."""

    def __init__(self, status, words):
        super().__init__(words)
        self.status = status

    def get_http_status_code(self):
        return self.status


class Client:
    """A server in memory: names may have no `//` in them."""

    def __init__(self):
        self.metrics = []
        self.tags = {}
        self.status = "RUNNING"
        self.answers = threading.Event()
        self.answers.set()

    def create_run(self, experiment_id, tags, run_name):
        return SimpleNamespace(info=SimpleNamespace(run_id="run0"))

    def log_batch(self, run_id, metrics=(), tags=()):
        self.answers.wait()
        if bad := [value.key for value in (*metrics, *tags) if "//" in value.key]:
            raise Refused(400, f"Invalid value {bad}")
        self.metrics += [(metric.key, metric.value, metric.step) for metric in metrics]
        self.tags |= {tag.key: tag.value for tag in tags}

    def set_terminated(self, run_id, status):
        self.answers.wait()
        self.status = status


@pytest.fixture
def client(monkeypatch):
    made = Client()
    mlflow = ModuleType("mlflow")
    mlflow.__spec__ = ModuleSpec("mlflow", None)
    mlflow.MlflowClient = lambda tracking_uri: made
    mlflow.active_run = lambda: None
    entities = ModuleType("mlflow.entities")
    entities.Metric = lambda key, value, timestamp, step: SimpleNamespace(
        key=key, value=value, step=step
    )
    entities.RunTag = lambda key, value: SimpleNamespace(key=key, value=value)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    yield made
    made.answers.set()
    assert not PROCESS.at_hard_end


def test_what_mlflow_refuses_is_named_and_the_rest_is_there(client, caplog):
    train_logger = MLflowLogger()
    stats = {"loss": 0.5, "a//b": 1.0, "huge": 10**400, "note": "text"}
    for epoch in (1, 2):
        train_logger.log_stats({"epoch": epoch}, stats)
    train_logger.close()
    assert client.metrics == [
        (name, value, epoch)
        for epoch in (1, 2)
        for name, value in (("epoch", epoch), ("train/loss", 0.5))
    ]
    assert client.tags == {"train/note": "text"}
    said = [message.partition(":")[0] for message in caplog.messages]
    assert said == [
        "MLflow refuses the value 'train/a//b'",
        "MLflow refuses the value 'train/huge'",
    ]
    assert client.status == "FINISHED"


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("failed", RuntimeError("a mistake"), "FAILED"),
        ("is_stopped", True, "KILLED"),
    ],
)
def test_the_run_of_mlflow_ends_as_the_process_does(client, monkeypatch, name, value, status):
    train_logger = MLflowLogger()
    train_logger.begin_fit(0)
    monkeypatch.setattr(PROCESS, name, value)
    train_logger.close()
    assert client.status == status


def test_the_run_of_mlflow_has_failed_where_the_watchdog_ends_the_process(client):
    MLflowLogger().begin_fit(0)
    (close,) = PROCESS.at_hard_end
    close()
    assert client.status == "FAILED"


def test_the_run_of_mlflow_ends_where_python_starts_no_thread_any_more(client, monkeypatch, caplog):
    """As Python 3.12 at the end of a process."""
    train_logger = MLflowLogger()
    train_logger.begin_fit(0)

    def refuse(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as at_the_end:
        at_the_end.setattr(threading.Thread, "start", refuse)
        train_logger.close()
    assert client.status == "FINISHED"
    assert not caplog.messages


def test_a_server_that_has_gone_holds_the_end_up_no_longer_than_allowed(client, caplog):
    train_logger = MLflowLogger(timeout_seconds=0.05)
    train_logger.begin_fit(0)
    client.answers.clear()
    train_logger.log_stats({"epoch": 1})
    ending = threading.Thread(target=train_logger.close)
    ending.start()
    ending.join(10)
    assert not ending.is_alive()
    assert "MLflow has not taken 1 values" in caplog.text


def test_a_forked_process_does_not_end_the_run(client, monkeypatch):
    train_logger = MLflowLogger()
    train_logger.begin_fit(0)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("ddpkit.train_logger.mlflow.os.getpid", lambda: 1)
        train_logger.close()
    assert client.status == "RUNNING"
    train_logger.close()
    assert client.status == "FINISHED"
