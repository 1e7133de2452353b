"""Real launchers and a real S3 server: killed near a save, and gone on with on an empty disk."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ddpkit.object_store import StoreLock
from tests.launching import Run, free_port, python, torchrun
from tests.s3_server import needs_s3

pytestmark = [pytest.mark.launch, *needs_s3]

SCRIPT = str(Path(__file__).with_name("launched.py"))
WORDS = ("--ckpt_interval_steps=4",)


@pytest.fixture
def environment(s3):
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**s3.environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def lose_disks(folder):
    for disk in folder.glob("disk*"):
        shutil.rmtree(disk)


@pytest.mark.parametrize("kills", [(20, 45)])
def test_two_processes_of_torchrun_end_with_the_bits_of_the_uninterrupted_run(
    s3, environment, tmp_path, kills
):
    def start(url, folder, kill):
        folder.mkdir(exist_ok=True)
        command = torchrun(2, SCRIPT, url, str(folder), str(kill), *WORDS)
        run = Run(command, folder, environment, name=f"kill{kill}", warm=True)
        return run.wait(300).code

    assert start(s3.folder(), tmp_path / "whole", 0) == 0
    url = s3.folder()
    for kill in kills:
        assert start(url, tmp_path / "killed", kill) != 0
        lose_disks(tmp_path / "killed")
    assert start(url, tmp_path / "killed", 0) == 0
    whole = result_of(tmp_path / "whole")
    again = result_of(tmp_path / "killed")
    assert {name: again[name] for name in ("weights", "steps", "rows")} == {
        name: whole[name] for name in ("weights", "steps", "rows")
    }


@pytest.mark.exhaustive
def test_each_of_two_nodes_copies_down_what_the_run_goes_on_from(s3, environment, tmp_path):
    url = s3.folder()

    def start(kill):
        port = free_port()
        common = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1"]
        nodes = [
            Run(
                [
                    *torchrun(1)[:1],
                    *common,
                    f"--master_port={port}",
                    f"--node_rank={node}",
                    SCRIPT,
                    url,
                    str(tmp_path),
                    str(kill),
                    *WORDS,
                ],
                tmp_path,
                environment,
                name=f"kill{kill}-node{node}",
                warm=True,
            )
            for node in range(2)
        ]
        return [node.wait(300).code for node in nodes]

    assert 0 not in start(30)
    lose_disks(tmp_path)
    assert start(0) == [0, 0]
    told = (tmp_path / "kill0-node1.stderr").read_text()
    assert result_of(tmp_path)["steps"] == 36
    assert "Traceback" not in told


@pytest.mark.exhaustive
def test_a_second_run_is_refused(s3, environment, tmp_path, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    url = s3.folder()

    def start(name):
        (tmp_path / name).mkdir()
        command = python(SCRIPT, url, str(tmp_path / name), "0", *WORDS)
        return Run(command, tmp_path, environment, name=name, warm=True).wait(200)

    with StoreLock(url, ".run.lock").hold():
        refused = start("second")
    assert refused.code != 0
    assert "is in use by another run" in refused.err
    assert start("third").code == 0
