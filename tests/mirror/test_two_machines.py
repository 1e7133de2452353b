"""Two nodes with a disk each: rank 0's paths say nothing on the other one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.launching import Run, free_port, torchrun

pytestmark = pytest.mark.launch

SCRIPT = str(Path(__file__).with_name("launched.py"))
WORDS = ("--ckpt_interval_steps=4",)
STEPS = 36


class Nodes:
    """Starts trainings on two nodes.

    Args:
        folder: has their disks.
    """

    def __init__(self, folder):
        self.folder = folder
        self.count = 0

    def start(self, url, *words, kill=0):
        """Run a training to its end, or to its kill; return what each node said."""
        self.count += 1
        port = free_port()
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        nodes = []
        for node in range(2):
            launcher = [
                *torchrun(1)[:1],
                "--nnodes=2",
                "--nproc_per_node=1",
                "--master_addr=127.0.0.1",
                f"--master_port={port}",
                f"--node_rank={node}",
            ]
            command = [*launcher, SCRIPT, url, str(self.folder), str(kill), *WORDS, *words]
            name = f"start{self.count}-node{node}"
            nodes.append(Run(command, self.folder, environment, name=name, warm=True))
        ended = [node.wait(300) for node in nodes]
        assert all((one.code == 0) == (not kill) for one in ended), ended[0].err + ended[1].err
        return [one.err for one in ended]

    def lose_disks(self):
        for disk in self.folder.glob("disk*"):
            shutil.rmtree(disk)

    def loaded(self, rank):
        """Return the directory that a rank has gone on from."""
        return Path((self.folder / f"loaded{rank}.txt").read_text())

    def result(self):
        return json.loads((self.folder / "result.json").read_text())


@pytest.fixture
def nodes(tmp_path):
    return Nodes(tmp_path)


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/bucket/run"


@pytest.mark.exhaustive
def test_each_machine_reads_its_own_copy(nodes, url):
    nodes.start(url, kill=30)
    nodes.lose_disks()
    nodes.start(url)
    assert nodes.result()["steps"] == STEPS
    for rank in range(2):
        assert nodes.loaded(rank).is_relative_to(nodes.folder / f"disk{rank}")
    assert nodes.loaded(0).name == nodes.loaded(1).name


@pytest.mark.exhaustive
def test_what_is_divided_comes_to_each_machine_too(nodes, url):
    nodes.start(url, "--strategy=fsdp", kill=30)
    nodes.lose_disks()
    nodes.start(url, "--strategy=fsdp")
    assert nodes.result()["steps"] == STEPS
    for rank in range(2):
        assert nodes.loaded(rank).is_relative_to(nodes.folder / f"disk{rank}")


def test_what_only_rank_0_has_on_its_disk_comes_to_the_other_machine(nodes, url):
    words = ("--ckpt_local=~/scratch",)
    nodes.start(url, *words, kill=12)
    nodes.start(url, *words)
    assert nodes.result()["steps"] == STEPS
    assert nodes.loaded(1).is_relative_to(nodes.folder / "disk1" / "scratch")
    assert nodes.loaded(0).name == nodes.loaded(1).name


@pytest.mark.exhaustive
def test_first_weights_are_read_on_each_machine(nodes, url):
    nodes.start(url, kill=30)
    nodes.lose_disks()
    nodes.start(f"{url}-second", f"--init_from={url}/save")
    assert nodes.result()["steps"] == STEPS
