"""The folder that mirrors a store, on disks with room and without; and the room for checkpoints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpkit.see import Request, run_doctor
from ddpkit.see.doctor.checkpoint_space import checkpoint_space
from ddpkit.see.doctor.checks import mirror_folder
from ddpkit.see.doctor.machine import Machine
from ddpkit.see.doctor.order import CHECKS
from ddpkit.see.estimate.checkpoint_room import checkpoint_room
from tests.disks import mounted
from tests.see.doctor.sites import found, site_of

URL = "s3://bucket/seven"
NAMES = {"mirror", "disk latency", "disk space", "inodes"}


@pytest.fixture
def temporary(monkeypatch):
    """Have the folder for temporary files be another."""

    def use(folder):
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr("tempfile.tempdir", None)
        return folder

    return use


def with_free(number):
    disk = SimpleNamespace(
        f_frsize=1, f_bavail=number, f_blocks=10 * number, f_files=10**6, f_favail=10**6
    )
    return dataclasses.replace(Machine(environ={}), disk=lambda folder: disk)


def test_the_mirror_is_in_the_folder_for_temporary_files_and_nothing_stays_there(
    tmp_path, temporary
):
    folder = temporary(tmp_path)
    findings = found(mirror_folder, site_of(with_free(10**11), output_url=URL))
    assert set(findings) == NAMES
    assert findings["mirror"].measured.startswith(f"{folder}/ddpkit-mirrors-")
    assert URL in findings["mirror"].source
    assert findings["disk space"].verdict == "ok"
    assert list(folder.iterdir()) == []


def test_of_a_folder_on_a_disk_nothing_is_looked_at():
    assert found(mirror_folder, site_of(output_folder=Path("results"))) == {}


def test_with_ckpt_local_it_is_there(tmp_path, temporary):
    temporary(tmp_path)
    scratch = tmp_path / "scratch"
    findings = found(mirror_folder, site_of(output_url=URL, ckpt_local=str(scratch)))
    assert findings["mirror"].measured.startswith(f"{scratch}/seven-")
    assert not scratch.exists()


def test_a_small_disk_in_memory_is_told_with_what_helps(tmp_path, temporary):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as folder:
        temporary(folder)
        findings = found(mirror_folder, site_of(output_url=URL))
        assert findings["mirror"].verdict == "look"
        assert "on tmpfs which is in memory" in findings["mirror"].measured
        space = findings["disk space"]
        assert space.verdict == "problem"
        assert "two checkpoints" in space.source
        assert "TMPDIR" in space.advice
        assert "--ckpt_local=/scratch" in space.advice


def test_a_read_only_disk_is_a_problem(tmp_path, temporary):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "ro", "tmpfs") as folder:
        scratch = str(folder / "scratch")
        temporary(tmp_path)
        finding = found(mirror_folder, site_of(output_url=URL, ckpt_local=scratch))["mirror"]
        assert finding.verdict == "problem"
        assert "Read-only file system" in finding.measured


SIZE = 2_000_000


@pytest.mark.parametrize(
    ("free", "verdict"),
    [(SIZE - 1, "problem"), (SIZE, "look"), (2 * SIZE - 1, "look"), (2 * SIZE, "ok")],
)
def test_two_checkpoints_of_a_recipe_need_room(tmp_path, temporary, free, verdict):
    folder = temporary(tmp_path)
    finding = checkpoint_space(site_of(with_free(free), output_url=URL), SIZE)
    assert (finding.name, finding.verdict) == ("checkpoint space", verdict)
    assert f"{folder}/ddpkit-mirrors-" in finding.measured
    assert f"the mirror of {URL}" in finding.measured
    assert "takes about 2.0 MB" in finding.measured
    assert finding.expected == "room for 2, 4.0 MB"
    finding = checkpoint_space(site_of(with_free(free), output_folder=Path("results")), SIZE)
    assert "are free in results, and" in finding.measured
    assert "give another --output_folder" in finding.advice


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hparams.yaml").write_text(f"output_folder: {URL}\n")
    return str(tmp_path / "train.py"), str(tmp_path / "hparams.yaml")


def test_the_command_takes_the_folder_of_a_recipe_and_its_own(recipe, tmp_path):
    checks = [check for check in CHECKS if check.name == "mirror"]

    def path_of(**given):
        said = []
        run_doctor(Request(device="cpu", as_json=True, **given), said.append, checks=checks)
        return json.loads(said[0])["findings"][0]["details"]["path"]

    assert "/ddpkit-mirrors-" in path_of(recipe=recipe)
    there = (*recipe, f"--ckpt_local={tmp_path}")
    assert path_of(recipe=there).startswith(f"{tmp_path}/seven-")
    own = path_of(recipe=there, ckpt_local="/own", output_folder="s3://bucket/eight")
    assert own.startswith("/own/eight-")


def test_an_estimate_says_what_is_free_where_checkpoints_go(recipe, tmp_path):
    words = checkpoint_room([*recipe, f"--ckpt_local={tmp_path}"], SIZE)
    assert words.startswith("A checkpoint takes about 2.0 MB, and ")
    assert f"are free in {tmp_path}/seven-" in words
    assert words.endswith(f", the mirror of {URL}.")
    words = checkpoint_room([*recipe, f"--output_folder={tmp_path}"], 10**18)
    assert f"are free in {tmp_path}. Two are there at a time" in words
    assert checkpoint_room(recipe, 0) == ""
    assert checkpoint_room([recipe[0], "--lr=1"], SIZE) == "A checkpoint takes about 2.0 MB."
