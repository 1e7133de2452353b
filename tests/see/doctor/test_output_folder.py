"""The output folder on disks that are full, small, read-only, slow or of the wrong kind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpkit.base import FileSystem
from ddpkit.see.doctor.checks import output_folder, shared_folder
from ddpkit.see.doctor.file_systems import file_system_of
from ddpkit.see.doctor.machine import Machine
from tests.disks import fill, mounted
from tests.see.doctor.sites import TWO_HOSTS, found, machine_with, site_of

LARGE = SimpleNamespace(
    f_frsize=4096,
    f_bavail=10**8,
    f_blocks=10**9,
    f_files=10**6,
    f_favail=10**6,
)


def on(folder, **replaced):
    machine = dataclasses.replace(Machine(environ={}), **replaced)
    return found(output_folder, site_of(machine, output_folder=folder))


def test_a_folder_on_a_disk_with_room_is_well_and_nothing_stays_in_it(tmp_path):
    findings = on(tmp_path / "not" / "yet" / "there", disk=lambda folder: LARGE)
    assert set(findings) == {"output folder", "disk latency", "disk space", "inodes"}
    assert findings["disk space"].verdict == findings["inodes"].verdict == "ok"
    assert findings["output folder"].measured.startswith(f"{tmp_path}/not/yet/there on ")
    assert list(tmp_path.iterdir()) == []


def test_a_small_disk_in_memory_and_a_full_one_are_told(tmp_path):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as folder:
        findings = on(folder / "results")
        assert findings["disk space"].verdict == "problem"
        assert findings["output folder"].verdict == "look"
        assert "on tmpfs which is in memory" in findings["output folder"].measured
        fill(folder)
        assert on(folder)["output folder"].verdict == "problem"
        assert "No space left on device" in on(folder)["output folder"].measured


def test_a_read_only_disk_and_one_without_inodes_are_problems(tmp_path):
    options = "size=600m,nr_inodes=5"
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", options, "tmpfs") as folder:
        inodes = on(folder)["inodes"]
        assert (inodes.verdict, inodes.measured) == ("problem", "4 more files may be made")
    with mounted(tmp_path / "other", "-t", "tmpfs", "-o", "ro", "tmpfs") as folder:
        findings = on(folder / "results")
        assert findings["output folder"].verdict == "problem"
        assert "Read-only file system" in findings["output folder"].measured
        assert "disk latency" not in findings


def test_a_file_in_the_place_of_the_folder_is_a_problem(tmp_path):
    tmp_path.joinpath("results").write_text("")
    assert on(tmp_path / "results" / "run1")["output folder"].verdict == "problem"


MOUNTS = """\
27 1 254:0 / / rw,relatime - overlay overlay rw
28 27 0:30 / /data\\040of\\040us rw,nolock - nfs4 server:/data rw
29 27 0:31 / /data rw - tmpfs tmpfs rw
30 27 0:32 / /data rw - ext4 /dev/sdb rw
"""


def test_the_deepest_and_last_mount_has_the_folder(tmp_path):
    machine = machine_with(tmp_path, {"proc/self/mountinfo": MOUNTS})
    assert file_system_of(machine, Path("/data/x")).kind == "ext4"
    assert file_system_of(machine, Path("/database")).kind == "overlay"
    assert file_system_of(machine, Path("/data of us/x")) == FileSystem(
        "nfs4",
        "/data of us",
        ("rw", "nolock"),
    )


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [("overlay", "rw", "ends with the container"), ("nfs4", "rw,nolock", "nothing stops a second")],
)
def test_a_file_system_of_another_kind_is_looked_at(tmp_path, kind, options, words):
    files = {"proc/self/mountinfo": f"27 1 254:0 / / {options} - {kind} x rw\n"}
    machine = machine_with(tmp_path / "machine", files, disk=lambda folder: LARGE)
    site = site_of(machine, output_folder=tmp_path)
    finding = found(output_folder, site)["output folder"]
    assert finding.verdict == "look"
    assert words in finding.measured


@pytest.mark.parametrize(("seconds", "verdict"), [(0.01, "ok"), (0.3, "look"), (2.0, "problem")])
def test_a_disk_that_takes_long_for_a_small_file_is_told(tmp_path, monkeypatch, seconds, verdict):
    clock = iter(range(100))
    monkeypatch.setattr(output_folder.time, "perf_counter", lambda: seconds * next(clock))
    assert on(tmp_path)["disk latency"].verdict == verdict


class Hosts:
    """Two hosts; this is the second, and the first has written a file of this name."""

    def __init__(self, name):
        self.rank = 1
        self.is_main = False
        self.is_first_on_host = True
        self.name = name

    def exchange(self, name, value):
        return [self.name, value]


@pytest.mark.parametrize(("name", "verdict"), [("there", "ok"), ("not-there", "problem")])
def test_a_folder_that_is_another_one_on_another_host_is_a_problem(tmp_path, name, verdict):
    tmp_path.joinpath("there").write_text("")
    site = site_of(launch=TWO_HOSTS, output_folder=tmp_path)
    object.__setattr__(site, "ranks", Hosts(name))
    assert found(shared_folder, site)["shared folder"].verdict == verdict
