"""The set-up itself: that it leaves nothing behind, does without namespaces, and says loudly where
it cannot.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.launching import wait_until

from . import packages, slurm_cluster
from .conftest import NOT_SET_UP, REQUIRE, Clusters, pytest_terminal_summary
from .harness import MARKER, Found, find
from .machines import OWNER, may_have_namespaces, sweep
from .packages import CannotSetUpError, need


def traces():
    """What a cluster of this run of the tests could leave: processes, interfaces, mounts, a
    name.
    """
    marked = [folder.name for folder in Path("/proc").glob("[0-9]*") if _is_marked(folder)]
    return {
        "processes": marked,
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        # but for those of the tests that run beside
        "mounts": sorted(
            one for one in Path("/proc/mounts").read_text().splitlines() if "/pytest-of-" not in one
        ),
        "host name": socket.gethostname(),
    }


def _is_marked(folder):
    try:
        return f"\0{OWNER}={os.getpid()}." in "\0" + folder.joinpath("environ").read_text(
            errors="replace"
        )
    except OSError:
        return False


@pytest.mark.parametrize("apart", [True, False], ids=["two machines", "loopback"])
def test_a_cluster_comes_twice_and_leaves_nothing(clusters, tmp_path, monkeypatch, apart):
    # or skip
    clusters[0].get("Slurm", lambda: clusters[1].enter_context(slurm_cluster.slurm_cluster()))
    if apart and not may_have_namespaces():
        pytest.skip("no namespaces here")
    monkeypatch.setattr(slurm_cluster, "may_have_namespaces", lambda: apart)
    before = traces()
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\nsrun sh -c 'echo task $SLURM_PROCID on $SLURMD_NODENAME'\n"
    )
    for _ in range(2):
        with slurm_cluster.slurm_cluster() as cluster:
            assert len(cluster.machines) == 2 * apart
            folder = cluster.folder
            with cluster.submit(tmp_path, "--nodes=2", "--ntasks-per-node=1", "job.sh") as job:
                assert job.wait(30) == "COMPLETED", job.report()
                assert {"task 0 on node1", "task 1 on node2"} <= set(job.output.splitlines())
        assert not folder.exists()
        assert wait_until(lambda: traces() == before, 5), (before, traces())


def test_a_job_that_runs_when_the_cluster_ends_leaves_nothing(clusters, tmp_path):
    # or skip
    clusters[0].get("Slurm", lambda: clusters[1].enter_context(slurm_cluster.slurm_cluster()))
    before = traces()
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\ntrap '' TERM\nsrun sh -c \"trap '' TERM; sleep 600\"\n"
    )
    with slurm_cluster.slurm_cluster() as cluster:
        said = cluster.run(
            "sbatch",
            "--parsable",
            "--nodes=2",
            "job.sh",
            folder=tmp_path,
            **{MARKER: ("left running")},
        )
        job = slurm_cluster.Job(cluster, said.strip(), tmp_path, "left running")
        job.until(lambda: job.state == "RUNNING", 10, "the start of the job")
        job.until(
            lambda: sum("sleep" in one.command for one in job.processes()) == 2,
            10,
            "its tasks",
        )
    assert wait_until(lambda: not job.processes(), 5), job.processes()
    assert wait_until(lambda: traces() == before, 5), (before, traces())


def test_what_a_killed_run_has_left_is_swept_up(tmp_path):
    """Its owner is a process that is no more: a number that no process has."""
    left = subprocess.Popen(["sleep", "600"], env={OWNER: "4999999.1.left"})
    kept = subprocess.Popen(["sleep", "600"], env={OWNER: slurm_cluster.owner_mark()})
    try:
        assert wait_until(lambda: find(OWNER, "4999999.1.left"), 5)
        sweep()
        assert left.wait(5) == -9
        assert kept.poll() is None
    finally:
        for process in (left, kept):
            process.kill()
            process.wait()


def test_programs_that_are_missing(monkeypatch):
    monkeypatch.setattr(packages.os, "geteuid", lambda: 1000)
    need({"sh": "dash"})
    with pytest.raises(CannotSetUpError, match="not installed: no-such-package, and only root"):
        need({"sh": "dash", "no-such-program": "no-such-package"})


class AptGet:
    """Stands in for apt-get and dpkg: it answers by turns, and brings the program with its last
    answer.
    """

    def __init__(self, monkeypatch, *answers):
        self.answers = list(answers)
        self.called = []
        monkeypatch.setattr(packages.os, "geteuid", lambda: 0)
        monkeypatch.setattr(
            packages,
            "_there",
            lambda program: program == "apt-get" or not self.answers,
        )
        monkeypatch.setattr(packages, "_no_services_started", contextlib.nullcontext)
        monkeypatch.setattr(packages, "_run", self.run)
        monkeypatch.setattr(packages.time, "sleep", lambda seconds: None)

    def run(self, *command, end):
        self.called.append(
            next(word for word in command[1:] if word in {"install", "update", "--configure"})
        )
        return self.answers.pop(0)


def test_a_mirror_that_fails_once_and_a_lock_that_somebody_has(monkeypatch):
    no = (100, "E: Unable to locate package; Temporary failure resolving")
    yes = (0, "")
    apt = AptGet(monkeypatch, no, no, (100, "E: Could not get lock"), yes, yes)
    need({"prog": "package"})
    assert apt.called == ["install", "update", "install", "update", "install"]


def test_an_installation_that_was_interrupted_is_completed(monkeypatch):
    apt = AptGet(
        monkeypatch,
        (100, "you must manually run 'dpkg --configure -a'"),
        (0, ""),
        (0, ""),
        (0, ""),
    )
    need({"prog": "package"})
    assert apt.called == ["install", "--configure", "update", "install"]


def test_it_is_given_up_at_last_and_told_why(monkeypatch):
    apt = AptGet(monkeypatch, *[(100, "E: no space left\n")] * 99)
    with pytest.raises(CannotSetUpError, match=r"did not bring prog: (?s:.*)no space left"):
        need({"prog": "package"})
    assert apt.called.count("install") == packages.ATTEMPTS


def cannot():
    raise CannotSetUpError("there is no moon")


class Reporter:
    """Stands in for pytest's."""

    def __init__(self):
        self.said = []

    def section(self, title, **_):
        self.said.append(title)

    def line(self, text):
        self.said.append(text)


@pytest.fixture
def config():
    class Config:
        stash = pytest.Stash()

    return Config()


def test_a_cluster_that_cannot_be_is_skipped_and_told(config, monkeypatch):
    monkeypatch.delenv(REQUIRE, raising=False)
    tried = []
    made = Clusters(config)
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match="there is no moon"):
            made.get("a tide", lambda: (tried.append(1), cannot()))
    assert len(tried) == 1, "it is not tried for every test"
    reporter = Reporter()
    pytest_terminal_summary(reporter, config)
    assert reporter.said[0] == "NOT TESTED on a real cluster: a tide"
    assert "there is no moon" in reporter.said[1]
    config.stash[NOT_SET_UP].clear()
    quiet = Reporter()
    pytest_terminal_summary(quiet, config)
    assert quiet.said == []


def test_where_clusters_are_required_it_is_a_failure(config, monkeypatch):
    monkeypatch.setenv(REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match="there is no moon"):
        Clusters(config).get("a tide", cannot)


def test_a_run_of_the_tests_says_it_at_its_end(tmp_path):
    """A real one, of a user who is not root and finds no Slurm."""
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import os, shutil
        os.geteuid = lambda: 1000
        which = shutil.which
        shutil.which = lambda name, *more, **named: None if "slurm" in name else which(name, *more, **named)
        """)  # noqa: E501
    )
    words = ["-q", "-p", "no:cacheprovider", "tests/clusters/test_slurm.py", "-k", "test_bare_srun"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, f"--basetemp={tmp_path / 'tmp'}"],
        cwd=root,
        env={**slurm_cluster.clean_environment(), "PYTHONPATH": f"{tmp_path}:{root}", REQUIRE: ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 skipped" in done.stdout
    assert "NOT TESTED on a real cluster: Slurm" in done.stdout


def test_a_process_is_found_by_what_is_in_its_environment():
    process = subprocess.Popen(["sleep", "60"], env={"A_MARK": "one=two"})
    try:
        assert wait_until(lambda: find("A_MARK", "one=two"), 5)
        [found] = find("A_MARK", "one=two")
        assert found == Found(process.pid, {"A_MARK": "one=two"}, ["sleep", "60"])
        assert not find("A_MARK", "one")
    finally:
        process.kill()
        process.wait()
