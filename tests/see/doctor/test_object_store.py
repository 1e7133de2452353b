"""The output folder in stores that answer, refuse, keep nobody out, are slow or silent."""

from __future__ import annotations

import json
import threading
import uuid
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ddpkit.cli import main
from ddpkit.object_store import Objects, repetition
from ddpkit.see import Request, run_doctor
from ddpkit.see.doctor.checks import object_store, output_folder, shared_folder
from ddpkit.see.doctor.order import CHECKS
from tests.s3_server import needs_s3
from tests.see.doctor.sites import TWO_HOSTS, found, site_of

NAMES = {"object store", "lock of the store", "store latency"}
REQUESTS = ["list", "create", "create again", "write", "read", "delete"]


@pytest.fixture
def url():
    yield f"memory://{uuid.uuid4().hex}/run"
    fsspec.filesystem("memory").store.clear()


def on(url, **run):
    return found(object_store, site_of(output_url=url, **run))


def refused(monkeypatch, method):
    def refuse(self, *args, **options):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, method, refuse)


def test_a_store_that_may_be_used_is_well_and_nothing_stays_in_it(url):
    findings = on(url)
    assert set(findings) == NAMES
    assert {finding.verdict for finding in findings.values()} == {"ok"}
    access = findings["object store"]
    assert access.measured.startswith(f"{url} answers")
    assert list(access.details["seconds"]) == REQUESTS
    assert min(access.details["seconds"].values()) > 0
    assert all(f"{request} " in access.measured for request in REQUESTS)
    assert Objects(url).sizes() == {}


def test_the_checks_of_a_folder_are_left_out(url):
    site = site_of(launch=TWO_HOSTS, output_url=url)
    assert found(output_folder, site) == found(shared_folder, site) == {}
    assert found(object_store, site_of(output_folder=Path("results"))) == {}


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("find", "cannot list .ddpkit-doctor-"),
        ("pipe_file", "cannot create .ddpkit-doctor-"),
        ("cat_file", "cannot read .ddpkit-doctor-"),
        ("rm_file", "cannot delete .ddpkit-doctor-"),
    ],
)
def test_a_right_that_is_missing_is_a_problem_that_names_it(url, monkeypatch, method, words):
    refused(monkeypatch, method)
    findings = on(url)
    assert set(findings) == {"object store"}
    assert findings["object store"].verdict == "problem"
    assert words in findings["object store"].measured
    assert "must allow to list, read, write and delete" in findings["object store"].measured
    if method != "rm_file":
        assert Objects(url)._filesystem.store == {}


def test_a_store_that_keeps_nobody_out_is_looked_at(url, monkeypatch):
    monkeypatch.setattr(Objects, "create", lambda self, *args: self.write(*args))
    findings = on(url)
    assert findings["object store"].verdict == "ok"
    assert findings["lock of the store"].verdict == "look"
    assert "nothing stops a second run" in findings["lock of the store"].cost


def test_a_store_that_returns_something_else_is_a_problem(url, monkeypatch):
    monkeypatch.setattr(Objects, "read", lambda self, name: b"")
    findings = on(url)
    assert "does not return what was written" in findings["object store"].measured
    assert Objects(url).sizes() == {}


@pytest.mark.parametrize(("seconds", "verdict"), [(0.1, "ok"), (0.8, "look")])
def test_a_slow_store_is_looked_at(url, monkeypatch, seconds, verdict):
    clock = iter(range(100))
    monkeypatch.setattr(object_store.time, "perf_counter", lambda: seconds * next(clock))
    assert on(url)["store latency"].verdict == verdict


def test_a_store_that_never_answers_holds_nothing_up(url, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *args, **options: answers.wait())
    finding = on(url, timeout=1.0)["object store"]
    answers.set()
    assert finding.verdict == "problem"
    assert finding.measured == f"{url} has not answered for 0.5 s, last to: read"


@pytest.mark.parametrize(
    ("given", "words"),
    [("s3:///run", "names no bucket"), ("s4://bucket/run", "s4://bucket/run cannot be opened")],
)
def test_a_url_that_is_none_is_a_problem(given, words):
    assert words in on(given)["object store"].measured


def test_a_mistake_of_the_check_is_not_taken_for_one_of_the_store(url, monkeypatch):
    monkeypatch.setattr(Objects, "sizes", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        on(url)


OF_FOLDERS = [check for check in CHECKS if check.name in {"output folder", "object store"}]


def test_the_command_takes_a_url(url):
    said = []
    request = Request(device="cpu", output_folder=url, as_json=True)
    assert run_doctor(request, said.append, checks=OF_FOLDERS) == 0
    assert {each["name"] for each in json.loads(said[0])["findings"]} == NAMES


def test_the_command_takes_the_url_of_a_recipe(url, tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hparams.yaml").write_text(f"output_folder: {url}\n")
    said = []
    recipe = (str(tmp_path / "train.py"), str(tmp_path / "hparams.yaml"))
    request = Request(device="cpu", recipe=recipe, as_json=True)
    assert run_doctor(request, said.append, checks=OF_FOLDERS) == 0
    assert {each["name"] for each in json.loads(said[0])["findings"]} == NAMES


class TestOnS3:
    """What a real server answers."""

    pytestmark = needs_s3

    @pytest.fixture(autouse=True)
    def environment(self, s3, monkeypatch):
        fsspec.filesystem("s3").clear_instance_cache()
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        yield
        fsspec.filesystem("s3").clear_instance_cache()

    def test_a_bucket_that_is_there_is_well_and_nothing_stays_in_it(self, s3, capsys):
        url = s3.folder()
        main(["doctor", "--device=cpu", "--json", "--output_folder", url])
        findings = json.loads(capsys.readouterr().out)["findings"]
        verdicts = {each["name"]: each["verdict"] for each in findings}
        assert verdicts["object store"] == verdicts["lock of the store"] == "ok"
        assert "output folder" not in verdicts
        assert Objects(url).sizes() == {}

    def test_a_bucket_that_is_not_there_is_a_problem(self):
        measured = on("s3://no-such-bucket/run")["object store"].measured
        assert "Its bucket must be there: make it, or correct the URL." in measured

    def test_a_server_that_is_not_there_is_a_problem(self, monkeypatch):
        monkeypatch.setattr(repetition, "FIRST_PAUSE_SECONDS", 0.01)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        assert "No s3 server answers" in on("s3://bucket/run")["object store"].measured

    def test_credentials_that_are_not_there_are_a_problem(self, monkeypatch, tmp_path):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "none"))
        assert "Set AWS_ACCESS_KEY_ID" in on("s3://bucket/run")["object store"].measured
