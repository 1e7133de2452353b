"""An output folder in a store on two hosts, of which none sees the disk of the other."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.mirror import launched

from .harness import tail
from .test_two_hosts import STATIC

SCRIPT = Path(launched.__file__)
REPOSITORY = SCRIPT.parents[2]


@contextlib.contextmanager
def disks_apart(hosts, folder):
    """Have each host see nothing where the other one has its disk."""
    with contextlib.ExitStack() as stack:
        for number, machine in enumerate(hosts.machines):
            other = folder / f"disk{1 - number}"
            other.mkdir(exist_ok=True)
            machine.run("mount", "-t", "tmpfs", "none", str(other))
            stack.callback(machine.run, "umount", str(other))
        yield


@pytest.mark.parametrize("words", [(), ("--strategy=fsdp",), ("--ckpt_local=~/scratch",)])
def test_a_run_goes_on_with_what_each_host_has_copied_to_its_own_disk(hosts, tmp_path, words):
    def start(kill):
        command = [str(SCRIPT), f"file://{tmp_path}/bucket/run", str(tmp_path), str(kill), *words]
        paths = filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        with (
            disks_apart(hosts, tmp_path),
            hosts.torchrun(
                tmp_path,
                *command,
                "--ckpt_interval_steps=4",
                options=STATIC,
                PYTHONPATH=os.pathsep.join(paths),
            ) as runs,
        ):
            codes = [run.wait(100).code for run in runs]
            said = "\n".join(tail(path) for run in runs for path in run.paths)
        assert (codes == [0, 0]) == (not kill), said
        return said

    start(30)
    if "--ckpt_local=~/scratch" not in words:
        for disk in tmp_path.glob("disk*"):
            shutil.rmtree(disk)
    start(0)
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 36
    loaded = [Path((tmp_path / f"loaded{rank}.txt").read_text()) for rank in range(2)]
    assert all(path.is_relative_to(tmp_path / f"disk{rank}") for rank, path in enumerate(loaded))
    assert loaded[0].name == loaded[1].name
