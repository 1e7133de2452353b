"""``python -m ddpkit skypilot``: the task that it writes, and what it refuses to write."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import yaml

from ddpkit.cli import main
from ddpkit.cli.skypilot import run
from ddpkit.errors import ConfigError

from .job_schemas import problems
from .test_kubernetes import WORDS, recipe  # noqa: F401 -- a fixture

USUAL = ("train.py", "hparams.yaml", "--nodes=2", "--accelerators=H100:8")
NODE = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}


@pytest.fixture
def write(recipe, capsys):  # noqa: F811
    """Write a task that the published schema takes."""

    def write(*words):
        assert main(["skypilot", *words]) == 0
        task = yaml.safe_load(capsys.readouterr().out)
        assert problems(task, "skypilot_task") == []
        return task

    return write


def call_of_torchrun(task):
    """What reaches torchrun on node 1."""
    script = task["run"].replace("exec torchrun", "printf '%s\\0'")
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, **NODE}, capture_output=True, check=True
    )
    return done.stdout.decode().split("\0")[:-1]


def test_the_usual_task(write):
    task = write(*USUAL)
    assert (task["name"], task["num_nodes"], task["workdir"]) == ("train", 2, ".")
    assert task["resources"] == {
        "accelerators": "H100:8",
        "job_recovery": {"max_restarts_on_errors": 3},
    }
    assert task["envs"] == {"OMP_NUM_THREADS": "1"}
    assert "setup" not in task
    assert "volumes" not in task
    assert call_of_torchrun(task) == [
        "--nnodes=2",
        "--nproc-per-node=8",
        "--node-rank=1",
        "--master-addr=10.0.0.1",
        "--master-port=29500",
        "train.py",
        "hparams.yaml",
    ]


def test_every_option_is_in_the_file(write):
    task = write(
        *USUAL,
        "--spot",
        "--cpus=32+",
        "--memory=64",
        "--infra=k8s",
        "--image=docker:team/speech:1",
        "--nproc-per-node=4",
        "--max-restarts=0",
        "--volume=speech-work",
        "--mount-path=/data",
        "--job-name=speech-1",
        "--env=NCCL_DEBUG=INFO",
        "--setup=pip install -r requirements.txt",
        "--setup=echo 'a: b'  # done\necho c",
    )
    assert task["resources"] == {
        "infra": "k8s",
        "accelerators": "H100:8",
        "cpus": "32+",
        "memory": "64",
        "image_id": "docker:team/speech:1",
        "use_spot": True,
        "job_recovery": {"max_restarts_on_errors": 0},
    }
    assert (task["name"], task["volumes"]) == ("speech-1", {"/data": "speech-work"})
    assert task["envs"] == {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO"}
    assert task["setup"] == "pip install -r requirements.txt\necho 'a: b'  # done\necho c\n"
    assert "--nproc-per-node=4" in call_of_torchrun(task)


def test_machines_without_gpus(write):
    task = write(*USUAL[:3], "--cpus=16+", "--nproc-per-node=4")
    assert task["envs"] == {"OMP_NUM_THREADS": "4"}
    assert "--nproc-per-node=4" in call_of_torchrun(task)


@pytest.mark.parametrize(("cpus", "threads"), [("16", "8"), ("7.5", "3"), ("16.0+", "8")])
def test_threads_of_processes_on_cpus(write, cpus, threads):
    task = write(*USUAL[:3], f"--cpus={cpus}", "--nproc-per-node=2")
    assert task["envs"]["OMP_NUM_THREADS"] == threads


def test_what_goes_to_the_recipe_arrives_as_it_was(write):
    task = write(*USUAL, "--", *WORDS)
    assert call_of_torchrun(task)[-len(WORDS) :] == WORDS


def test_a_name_that_yaml_takes_for_something_else_is_a_name(recipe, write):  # noqa: F811
    (recipe / "on.py").touch()
    assert write("on.py", *USUAL[1:])["name"] == "on"


def test_a_setup_that_begins_indented_is_whole(write):
    task = write(*USUAL, "--setup", "", "--setup", "  a", "--setup", "b")
    assert task["setup"].split("\n") == ["", "  a", "b", ""]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tran.py", *USUAL[2:]), "there is no file 'tran.py'"),
        (USUAL[:3], "without --accelerators, how many processes on a node?"),
        ((*USUAL, "--volume=a", "--mount-path=data"), "--mount-path='data' is a path on the nodes"),
        ((*USUAL, "--job-name=9"), "--job-name='9' must have lower-case letters"),
        ((*USUAL, "--env==1"), "--env='=1' is no variable"),
    ],
)
def test_what_cannot_work_is_refused(recipe, words, message):  # noqa: F811
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(words)
