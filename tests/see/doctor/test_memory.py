"""Memory: free, limited, shared, locked, swapped; and what may be started."""

from __future__ import annotations

import os
import resource
from types import SimpleNamespace

import pytest

from ddpkit.see.doctor.checks import locked_memory, memory, process_limit, shared_memory
from tests.see.doctor.sites import FOUR, found, machine_with, site_of

PAGE = os.sysconf("SC_PAGE_SIZE")
KB = 1024


def meminfo(free_gb=64, swap_used_gb=0):
    return (
        f"MemTotal: {65 * 10**9 // KB} kB\nMemAvailable: {int(free_gb * 1e9) // KB} kB\n"
        f"SwapTotal: {8 * 10**9 // KB} kB\nSwapFree: {int((8 - swap_used_gb) * 1e9) // KB} kB\n"
    )


OWN = {"proc/self/statm": f"0 {int(0.5e9) // PAGE} 0 0 0 0 0\n"}  # 0.5 GB
GROUP = OWN | {"proc/self/cgroup": "4:memory:/job\n0::/\n", "proc/meminfo": meminfo()}
LIMITED = {
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2000000000\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1900000000\n",
    "sys/fs/cgroup/memory/job/memory.stat": "active_file 400000000\ninactive_file 100000000\n",
    "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
}
NEWER = {
    "proc/self/cgroup": "0::/job\n",
    "sys/fs/cgroup/job/memory.max": "max\n",
    "sys/fs/cgroup/memory.max": "2000000000\n",
    "sys/fs/cgroup/memory.current": "1400000000\n",
    "sys/fs/cgroup/job/memory.events": "oom 3\noom_kill 3\n",
}


def test_much_free_memory_is_well(tmp_path):
    findings = found(memory, site_of(machine_with(tmp_path, GROUP)))
    assert [one.verdict for one in findings.values()] == ["ok", "ok"]
    assert findings["memory"].measured == "64.0 GB are free"


@pytest.mark.parametrize(("free", "verdict"), [(1.9, "problem"), (5.9, "look"), (6.1, "ok")])
def test_free_memory_is_compared_with_what_the_processes_take(tmp_path, free, verdict):
    files = OWN | {"proc/meminfo": meminfo(free)}
    finding = found(memory, site_of(machine_with(tmp_path, files), launch=FOUR))["memory"]
    assert (finding.verdict, finding.expected) == (verdict, "at least 6.0 GB")


@pytest.mark.parametrize("limited", [GROUP | LIMITED, GROUP | NEWER])
def test_a_limit_of_a_control_group_counts_less_what_is_in_use_but_files(tmp_path, limited):
    findings = found(memory, site_of(machine_with(tmp_path, limited)))
    assert findings["memory"].verdict == "look"
    assert findings["memory"].measured.startswith("600.0 MB are free, by /sys/fs/cgroup/")
    assert findings["killed for memory"].measured.startswith("3 processes since")


def test_swap_in_use_is_told(tmp_path):
    files = GROUP | {"proc/meminfo": meminfo(swap_used_gb=2)}
    finding = found(memory, site_of(machine_with(tmp_path, files)))["swap"]
    assert (finding.verdict, finding.measured) == ("look", "2.0 GB in use")


def shm(total, free):
    return lambda folder: SimpleNamespace(f_frsize=1, f_blocks=total, f_bavail=free)


@pytest.mark.parametrize(
    ("total", "free", "workers", "verdict"),
    [
        (64e6, 64e6, None, "problem"),  # docker's
        (64e6, 64e6, 2, "problem"),
        (64e6, 64e6, 0, "ok"),  # no worker, no need
        (8e9, 8e9, 2, "ok"),
        (8e9, 50e6, 2, "problem"),  # full of what others have left
        (0.5e9, 0.5e9, 8, "look"),
        (0.5e9, 0.5e9, None, "look"),
    ],
)
def test_shared_memory_is_compared_with_the_batches_of_loader_workers(
    tmp_path,
    total,
    free,
    workers,
    verdict,
):
    machine = machine_with(tmp_path, {}, disk=shm(total, free))
    finding = found(shared_memory, site_of(machine, workers=workers))["shared memory"]
    assert finding.verdict == verdict
    assert "--shm-size" in finding.advice


def test_nccl_takes_shared_memory_without_workers(tmp_path):
    machine = machine_with(tmp_path, {}, disk=shm(64e6, 64e6))
    site = site_of(machine, workers=0, device="cuda", launch=FOUR)
    assert found(shared_memory, site)["shared memory"].verdict == "problem"


def test_little_locked_memory_is_a_problem_with_infiniband_alone(tmp_path):
    def limit(number):
        assert number == resource.RLIMIT_MEMLOCK
        return 64 * KB

    assert found(locked_memory, site_of(machine_with(tmp_path, {}, limit=limit))) == {}
    with_card = machine_with(tmp_path, {"sys/class/infiniband/mlx5_0": ""}, limit=limit)
    assert found(locked_memory, site_of(with_card))["locked memory"].verdict == "problem"
    free = machine_with(tmp_path, {}, limit=lambda number: -1)
    assert found(locked_memory, site_of(free))["locked memory"].verdict == "ok"


def test_few_processes_that_may_be_started_are_a_problem(tmp_path):
    files = {
        "proc/self/cgroup": "8:pids:/job\n0::/\n",
        "sys/fs/cgroup/pids/job/pids.max": "300\n",
        "sys/fs/cgroup/pids/job/pids.current": "50\n",
    }
    machine = machine_with(tmp_path, files, limit=lambda number: 100, is_root=lambda: True)
    finding = found(process_limit, site_of(machine, launch=FOUR))["process limit"]
    assert finding.verdict == "problem"
    assert finding.measured == "250 may be started (/sys/fs/cgroup/pids/job/pids.max)"
    assert found(process_limit, site_of(machine))["process limit"].verdict == "ok"
    as_user = machine_with(tmp_path, files, limit=lambda number: 20, is_root=lambda: False)
    assert "ulimit -u" in found(process_limit, site_of(as_user))["process limit"].measured
