"""Faults that are really there, and the command that finds them; and a machine without any.

Each runs in namespaces of its own for mounts, the host's name and the network, with a cable from
eth0 to nowhere.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass

import pytest

from ddpkit.launch import without_launch
from tests.house import PACKAGE, ROOT

pytestmark = pytest.mark.slow  # each imports torch

DOCTOR = f"{shlex.quote(sys.executable)} -m ddpkit doctor --json --timeout 20"
NETWORK = """
hostname node7
ip link set lo up
ip link add eth0 type veth peer name far
ip address add 10.77.0.7/24 dev eth0
ip link set eth0 up; ip link set far up
printf '127.0.0.1 localhost\\n10.77.0.7 node7\\n' > hosts
printf 'hosts: files\\n' > nsswitch
mount --bind hosts /etc/hosts
mount --bind nsswitch /etc/nsswitch.conf
"""


@dataclass
class Told:
    """What the command said."""

    code: int
    findings: dict

    def verdict(self, name):
        return [one["verdict"] for one in self.findings if one["name"] == name]

    def measured(self, name):
        return " ".join(one["measured"] for one in self.findings if one["name"] == name)

    @property
    def problems(self):
        return {one["name"] for one in self.findings if one["verdict"] == "problem"}


@pytest.fixture
def doctor(tmp_path):
    """Run lines of shell in namespaces of their own, and read the JSON of rank 0."""

    def run(command=DOCTOR, plant="", **environment):
        if os.geteuid() or shutil.which("ip") is None:
            pytest.skip("this test makes namespaces, which needs root and iproute2")
        script = f"set -e\n{NETWORK}\n{plant}\nset +e\n{command}"
        clean = {
            name: value
            for name, value in without_launch(os.environ).items()
            if not name.startswith(("OMP_", "NCCL_", "GLOO_", "TORCH_"))
        }
        done = subprocess.run(
            ["unshare", "--mount", "--uts", "--net", "sh", "-c", script],
            cwd=tmp_path,
            env={**clean, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        return Told(done.returncode, json.loads(done.stdout)["findings"])

    return run


def test_a_machine_without_faults_has_no_problem(doctor):
    told = doctor(f"{DOCTOR} --nproc 2")
    assert (told.code, told.problems) == (0, set())
    assert told.measured("host name") == "node7 is 10.77.0.7"
    assert told.measured("interface of gloo") == "eth0 (10.77.0.7) eth0 (10.77.0.7)"


@pytest.mark.exhaustive
def test_one_core_for_two_processes(doctor):
    told = doctor(f"taskset --cpu-list 0 {DOCTOR} --nproc 2")
    assert "processor cores" in told.problems
    assert told.measured("processor cores").startswith("1 core ")


@pytest.mark.exhaustive
def test_more_threads_than_cores_and_a_variable_that_makes_collectives_slow(doctor):
    many = str(2 * len(os.sched_getaffinity(0)))
    told = doctor(f"{DOCTOR} --nproc 2", OMP_NUM_THREADS=many, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert (told.code, told.problems) == (1, {"threads", "TORCH_DISTRIBUTED_DEBUG"})
    assert f"(OMP_NUM_THREADS={many})" in told.measured("threads")


def test_an_interface_that_is_not_there(doctor):
    told = doctor(GLOO_SOCKET_IFNAME="eth7", NCCL_SOCKET_IFNAME="eth7")
    assert (told.code, told.problems) == (1, {"interface of gloo", "interface of NCCL"})
    assert "there is no interface 'eth7'" in told.measured("interface of gloo")


@pytest.mark.exhaustive
def test_an_interface_that_is_down_and_an_output_folder_that_is_read_only(doctor):
    plant = """
ip link add far0 type veth peer name far1
mkdir disk; mount -t tmpfs -o ro tmpfs disk
"""
    command = f"{DOCTOR} --output_folder disk/results"
    told = doctor(command, plant, GLOO_SOCKET_IFNAME="far0", NCCL_SOCKET_IFNAME="far0")
    assert told.code == 1
    assert told.problems >= {"interface of gloo", "interface of NCCL", "output folder"}
    assert "far0 is down" in told.measured("interface of gloo")
    assert "Read-only file system" in told.measured("output folder")


TWO_NODES = f"""
export OMP_NUM_THREADS=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29577
RANK=1 {DOCTOR} &
RANK=0 {DOCTOR}
code=$?
wait
exit $code
"""  # noqa: E501


@pytest.mark.exhaustive
def test_a_host_name_that_resolves_to_nothing_and_one_thread_short(doctor):
    told = doctor(plant="printf '127.0.0.1 localhost\\n' > hosts", OMP_NUM_THREADS="1")
    assert (told.code, told.verdict("host name")) == (0, ["look"])
    assert "node7 is nothing" in told.measured("host name")
    if len(os.sched_getaffinity(0)) > 1:  # with one core alone no thread is missing
        assert told.verdict("threads") == ["look"]


@pytest.mark.exhaustive
def test_a_port_that_is_taken(doctor):
    holder = (
        "import socket, sys, time; server = socket.create_server(('', 29578)); "
        "print(flush=True); time.sleep(60)"
    )
    plant = f"{sys.executable} -c {shlex.quote(holder)} > held & holder=$!\n"
    plant += "while ! test -s held; do sleep 0.05; done"
    done = "code=$?; kill $holder; exit $code"
    told = doctor(f"{DOCTOR}; {done}", plant, MASTER_PORT="29578")
    assert (told.code, told.problems) == (1, {"rendezvous port"})
    assert "is taken by " in told.measured("rendezvous port")
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    launched = doctor(f"{DOCTOR}; {done}", plant, MASTER_PORT="29578", **rank)
    assert (launched.code, "rendezvous" in launched.problems) == (1, True)
    assert "port 29578 of MASTER_PORT is taken" in launched.measured("rendezvous")


@pytest.mark.exhaustive
def test_a_small_dev_shm_few_open_files_and_a_full_output_folder(doctor):
    plant = """
mount -t tmpfs -o size=64m tmpfs /dev/shm
mkdir disk; mount -t tmpfs -o size=1m tmpfs disk; head -c 1m /dev/zero > disk/x || true
"""
    told = doctor(f"prlimit --nofile=200 {DOCTOR} --output_folder disk/results", plant)
    assert told.code == 1
    assert told.problems == {"shared memory", "open files", "output folder", "disk space"}
    assert told.measured("shared memory") == "67.1 MB of 67.1 MB are free in /dev/shm"
    assert "No space left on device" in told.measured("output folder")


@pytest.mark.exhaustive
def test_another_version_on_one_rank_and_a_host_name_that_resolves_to_loopback(doctor, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "older" / "ddpkit")
    init = tmp_path / "older" / "ddpkit" / "__init__.py"
    text = init.read_text()
    init.write_text(text.replace('__version__ = "', '__version__ = "0.0.1+'))
    plant = "printf '127.0.0.1 localhost\\n127.0.1.1 node7\\n' > hosts"
    command = TWO_NODES.replace("RANK=1 ", f"RANK=1 PYTHONPATH={tmp_path / 'older'} ")
    told = doctor(command, plant)
    assert (told.code, told.problems) == (1, {"versions", "host name", "interface of gloo"})
    assert "on rank 0" in told.measured("versions")
    assert "0.0.1+" in told.measured("versions")
    assert "node7 is 127.0.1.1, the loopback" in told.measured("host name")


@pytest.mark.exhaustive
def test_a_machine_that_others_keep_busy(doctor):
    cores = len(os.sched_getaffinity(0))
    busy = f"{sys.executable} -c 'while True: pass' & others=\"$others $!\"\n"
    told = doctor(f"{DOCTOR}; code=$?; kill $others; exit $code", busy * cores)
    assert (told.code, told.verdict("busy cores")) == (0, ["look"])
    assert "python" in told.measured("busy cores")


def test_a_rank_that_never_comes(doctor):
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as sock:
        sock.bind(("", 0))
        port = str(sock.getsockname()[1])
    told = doctor(DOCTOR.replace("20", "1"), MASTER_PORT=port, **rank)
    assert (told.code, told.problems) == (1, {"rendezvous"})
    assert "rank 1 (1) of 2 processes did not come" in told.measured("rendezvous")
