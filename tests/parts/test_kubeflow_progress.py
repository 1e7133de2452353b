"""Progress for Kubeflow Trainer: what is posted, by which process, and what a server that does not
take it costs.
"""

from __future__ import annotations

import math
import re
import threading
import time
from types import SimpleNamespace

import pytest

from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from ddpkit.parts import KubeflowProgress, kubeflow_progress
from ddpkit.parts.latest_poster import LatestPoster
from ddpkit.types import FitResult, Stage
from tests.recipes import Regression, make, points

from .status_server import CERTIFICATE, PATH, serving

DATA = points(8)
LOADERS = {
    "train_loader_kwargs": {"batch_size": 2},
    "valid_loader_kwargs": {"batch_size": 4},
}


class Logs(Regression):
    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.log("rows", float(len(batch[0])))


@pytest.fixture
def server():
    with serving() as server:
        yield server


@pytest.fixture
def in_train_job(server, tmp_path, monkeypatch):
    """Set the variables as the controller does; pauses are short."""
    (tmp_path / "token").write_text("first\n")
    monkeypatch.setenv(kubeflow_progress.URL, server.url)
    monkeypatch.setenv(kubeflow_progress.CA_CERTIFICATE, str(CERTIFICATE))
    monkeypatch.setenv(kubeflow_progress.TOKEN, str(tmp_path / "token"))
    monkeypatch.setattr(kubeflow_progress, "LEAST_SECONDS", 0.0)
    # a loaded machine takes its time
    monkeypatch.setattr(kubeflow_progress, "LAST_SECONDS", 60.0)
    return tmp_path / "token"


def fit(*, brain_class=Regression, epochs=2, **given):
    brain = make(brain_class, hparams={"parts": [KubeflowProgress()]}, **given)
    result = brain.fit(range(1, epochs + 1), DATA, DATA, **LOADERS)
    return brain, result


def threads_of_ours():
    return [thread for thread in threading.enumerate() if "Kubeflow" in thread.name]


def test_the_last_post_of_a_run_has_all_of_it(server, in_train_job):
    brain, result = fit(brain_class=Logs)
    headers, document = server.posts[-1]
    assert headers["path"] == PATH
    assert (headers["Authorization"], headers["Content-Type"]) == (
        "Bearer first",
        "application/json",
    )
    status = document["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 0)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", status["lastUpdatedTime"])
    metrics = {metric["name"]: metric["value"] for metric in status["metrics"]}
    assert metrics["optimizer_step"] == str(brain.optimizer_step)
    assert (metrics["epoch"], metrics["train_rows"]) == ("2", "2")
    assert float(metrics["train_loss"]) == pytest.approx(result.train_loss, rel=1e-5)
    assert float(metrics["valid_loss"]) == pytest.approx(result.valid_loss, rel=1e-5)
    percents = [status["progressPercentage"] for status in server.documents]
    assert percents == sorted(percents)
    assert threads_of_ours() == []


def test_token_and_certificate_are_read_for_each_post(server, in_train_job):
    part = KubeflowProgress()
    brain = SimpleNamespace(total_steps=10, optimizer_step=0, logged={}, avg_train_loss=0.5)
    with part.around_fit(brain):
        part.on_fit_start(brain)
        server.wait_for_posts(1)
        in_train_job.write_text("second")
        brain.optimizer_step = 4
        part.on_stage_end(brain, Stage.TRAIN, 0.25, 1)
        server.wait_for_posts(2)
        brain.optimizer_step = 5
        part.on_sync(brain)  # not due yet
        part._due = 0.0
        part.on_sync(brain)
        server.wait_for_posts(3)
    assert [headers["Authorization"] for headers, _ in server.posts] == [
        "Bearer first",
        "Bearer second",
        "Bearer second",
    ]
    first, middle, last = server.documents
    assert first["progressPercentage"] == 0
    assert "estimatedRemainingSeconds" not in first
    assert (middle["progressPercentage"], last["progressPercentage"]) == (40, 50)
    assert 0 < last["estimatedRemainingSeconds"] <= 60
    assert {"name": "train_loss", "value": "0.5"} in last["metrics"]


def test_where_the_length_is_not_known_there_is_no_percent(server, in_train_job):
    part = KubeflowProgress()
    brain = SimpleNamespace(total_steps=None, optimizer_step=3, logged={})
    with part.around_fit(brain):
        part.on_fit_start(brain)
        server.wait_for_posts(1)
    [status] = server.documents
    assert set(status) == {"lastUpdatedTime", "metrics"}


def test_a_second_call_of_fit_begins_at_zero_again_also_after_a_restart(server, in_train_job):
    part = KubeflowProgress()
    brain = SimpleNamespace(total_steps=10, optimizer_step=10, logged={})
    part.on_fit_end(brain, FitResult("epochs"))
    again = KubeflowProgress()
    again.load_state_dict(part.state_dict())
    brain.optimizer_step = 15
    with again.around_fit(brain):
        again.on_fit_start(brain)
        server.wait_for_posts(1)
    assert server.documents[0]["progressPercentage"] == 50


def test_a_run_that_goes_on_tells_of_the_whole_call(server, in_train_job, tmp_path):
    class Progress(KubeflowProgress):
        def on_fit_start(self, brain):
            super().on_fit_start(brain)
            server.wait_for_posts(1)  # before a newer one takes its place

    def train(**options):
        part = Progress()
        counter = EpochCounter(2)
        brain = make(
            folder=tmp_path / "save",
            hparams={"parts": [part]},
            recoverables={"counter": counter},
            **options,
        )
        brain.fit(counter, DATA, DATA, **LOADERS)
        return brain, part

    brain, part = train(optimizer_step_limit=3)
    brain.checkpointer.save_checkpoint()
    assert part.done_before == 0
    server.posts.clear()
    brain, _ = train()
    assert brain.optimizer_step == 8
    assert server.documents[0]["progressPercentage"] == 37
    assert server.documents[-1]["progressPercentage"] == 100


def test_names_and_numbers_of_metrics_have_limits():
    metrics = {f"{number} " + "x" * 100: math.nan for number in range(300)}
    found = kubeflow_progress.status(3, 1e300, metrics)["trainerStatus"]
    assert len(found["metrics"]) == 256
    assert {len(metric["name"]) for metric in found["metrics"]} == {64}
    assert found["metrics"][0]["value"] == "nan"
    assert found["estimatedRemainingSeconds"] == 2**31 - 1


@pytest.mark.parametrize("answer", [403, 500, None])
def test_a_server_that_refuses_costs_one_warning(server, in_train_job, caplog, answer):
    server.answers = [answer]
    _, result = fit()
    assert result.reason == "epochs"
    warnings = [record.getMessage() for record in caplog.records if "Kubeflow" in record.message]
    assert len(warnings) == 1
    assert "Training goes on" in warnings[0]
    if answer is not None:
        assert f"answers {answer}" in warnings[0]
        assert "Forbidden" in warnings[0]
    assert len(server.posts) > 1  # it is tried again with what is new


def test_no_warning_shows_the_token(server, in_train_job, caplog):
    in_train_job.write_text("secret\nmore\n")
    fit()
    assert "has several lines" in caplog.text
    assert "secret" not in caplog.text
    assert server.posts == []


def test_a_server_that_does_not_answer_is_not_waited_for(server, in_train_job, monkeypatch):
    monkeypatch.setattr(kubeflow_progress, "LAST_SECONDS", 0.1)
    server.answers = ["never"]
    part = KubeflowProgress()
    brain = SimpleNamespace(total_steps=10, optimizer_step=0, logged={}, avg_train_loss=0.5)
    with part.around_fit(brain):
        part.on_fit_start(brain)
        server.wait_for_posts(1)
        began = time.monotonic()
        for _ in range(100):
            part._due = 0.0
            part.on_sync(brain)
        part.on_fit_end(brain, FitResult("epochs"))
    assert time.monotonic() - began < 5.0
    server.is_over.set()
    for thread in threads_of_ours():
        thread.join(30)
    assert len(server.posts) <= 2  # of all that waited the newest alone is posted


def test_a_certificate_that_nobody_has_signed_is_refused(server, in_train_job, monkeypatch, caplog):
    monkeypatch.delenv(kubeflow_progress.CA_CERTIFICATE)
    fit(epochs=1)
    assert server.posts == []
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


def test_outside_of_a_train_job_nothing_is_posted(monkeypatch):
    monkeypatch.delenv(kubeflow_progress.URL, raising=False)
    part = KubeflowProgress()
    brain = SimpleNamespace(total_steps=10, optimizer_step=0, logged={}, avg_train_loss=0.5)
    with part.around_fit(brain):
        part.on_fit_start(brain)
        part.on_sync(brain)
        assert threads_of_ours() == []
    [row] = part.start_rows(brain).values()
    assert row == "not posted to Kubeflow: KUBEFLOW_TRAINER_SERVER_URL is not set"


@pytest.mark.parametrize(
    "url",
    [
        "controller",
        "http://[::1",
        "https://controller:port/status",
        "https://controller:99999/status",
        "ftp://controller/status",
        "https:///status",
        "https://controller/a b",
        "https://controller\n/status",
    ],
)
def test_an_address_that_is_none_is_said_before_the_training(monkeypatch, url):
    monkeypatch.setenv(kubeflow_progress.URL, url)
    told = f"KUBEFLOW_TRAINER_SERVER_URL={url!r} is no address, such as https://HOST:PORT/PATH"
    with pytest.raises(ConfigError, match=re.escape(told)):
        fit()
    brain = SimpleNamespace(total_steps=10, optimizer_step=0, logged={}, avg_train_loss=0.5)
    part = KubeflowProgress()
    with part.around_fit(brain), pytest.raises(ConfigError, match=re.escape(told)):
        part.on_fit_start(brain)
    assert threads_of_ours() == []


class Fails(Regression):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        raise KeyError("the recipe fails")


def test_a_run_that_fails_leaves_no_thread_and_does_not_say_100(server, in_train_job):
    with pytest.raises(KeyError, match="the recipe fails"):
        fit(brain_class=Fails)
    for thread in threads_of_ours():
        thread.join(30)
    assert threads_of_ours() == []
    assert all(status["progressPercentage"] < 100 for status in server.documents)


def _posts_of_a_rank(environment):
    import os

    os.environ.update(environment)
    kubeflow_progress.LEAST_SECONDS = 0.0
    kubeflow_progress.LAST_SECONDS = 60.0
    try:
        brain, _ = fit()
    finally:
        for name in environment:
            del os.environ[name]
    return [value.item() for value in brain.modules.net.weight.flatten()]


@pytest.mark.costly
def test_of_two_processes_the_main_one_posts(ranks, server, in_train_job):
    environment = {
        kubeflow_progress.URL: server.url,
        kubeflow_progress.CA_CERTIFICATE: str(CERTIFICATE),
        kubeflow_progress.TOKEN: str(in_train_job),
    }
    weights = ranks.run(_posts_of_a_rank, environment, world_size=2)
    assert weights[0] == weights[1]
    hundreds = [status for status in server.documents if status["progressPercentage"] == 100]
    assert len(hundreds) == 1


@pytest.mark.parametrize("seconds", [0, 4.9, -1, "30", None, True, math.inf, math.nan])
def test_seconds_that_cannot_be_used_are_refused(seconds):
    with pytest.raises(ConfigError, match=re.escape(f"KubeflowProgress: seconds={seconds!r}")):
        KubeflowProgress(seconds)


def test_a_document_that_waits_gives_way_to_a_newer_one():
    got = []
    is_free = threading.Event()

    def post(document):
        is_free.wait(30)
        got.append(document)

    poster = LatestPoster("a list", post, pause=0.0)
    for number in range(1, 4):
        poster.offer(number)
    is_free.set()
    assert poster.close(30)
    assert got[-1] == 3
    assert len(got) <= 2


def test_errors_in_other_words_cost_one_warning(caplog):
    posts = []

    def post(document):
        posts.append(document)
        raise OSError(f"error number {document}")

    poster = LatestPoster("a list of errors", post, pause=0.0)
    for number in range(2):
        poster.offer(number)
        deadline = time.monotonic() + 30
        while number not in posts and time.monotonic() < deadline:
            time.sleep(0.01)
    assert poster.close(30)
    assert posts == [0, 1]
    assert caplog.text.count("a list of errors does not take news") == 1
