"""Cores, quotas and threads against the processes of a host."""

from __future__ import annotations

import pytest

from ddpkit.see.doctor.checks import processor_cores
from tests.see.doctor.sites import FOUR, found, machine_with, site_of

NEWER = {"proc/self/cgroup": "0::/job/task\n"}
OLDER = {"proc/self/cgroup": "3:memory:/x\n2:cpu,cpuacct:/docker/abc\n0::/\n"}


def cores(root, *, files=NEWER, affinity=range(8), threads=1, environ=None, **run):
    machine = machine_with(
        root,
        files,
        affinity=lambda: set(affinity),
        threads=lambda: threads,
        environ=environ or {},
    )
    return found(processor_cores, site_of(machine, **run))


def test_enough_cores_with_as_many_threads_are_well(tmp_path):
    findings = cores(tmp_path, threads=8)
    assert {one.verdict for one in findings.values()} == {"ok"}
    assert findings["processor cores"].measured == "8 cores (the affinity of the processes)"


@pytest.mark.parametrize(
    ("files", "source"),
    [
        (NEWER | {"sys/fs/cgroup/job/cpu.max": "200000 100000\n"}, "job/cpu.max"),
        (
            OLDER
            | {
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            },
            "docker/abc/cpu.cfs_quota_us",
        ),
        (  # in a container the group's own path is not below the mount
            OLDER
            | {
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            "cpu.cfs_quota_us",
        ),
    ],
)
def test_a_quota_of_a_control_group_counts_and_not_the_cores_that_are_seen(tmp_path, files, source):
    finding = cores(tmp_path, files=files, threads=8)
    assert finding["processor cores"].measured.startswith("2 cores of 8 (/sys/fs/cgroup")
    assert source in finding["processor cores"].measured
    assert finding["threads"].verdict == "look"
    assert finding["threads"].expected == "2 in each process"


def test_no_quota_is_no_limit(tmp_path):
    files = NEWER | {"sys/fs/cgroup/cpu.max": "max 100000\n"}
    assert cores(tmp_path, files=files, threads=8)["processor cores"].verdict == "ok"


def four(threads, affinity=range(8)):
    """What the four ranks of a host have told."""
    return [{"host": "a", "cores": list(affinity), "threads": threads} for _ in range(4)]


class Told:
    """Ranks that have told this."""

    is_first_on_host = True
    rank = 0

    def __init__(self, answers):
        self.answers = answers

    def exchange(self, name, value):
        return self.answers


def together(root, answers, **run):
    site = site_of(machine_with(root, NEWER, name=lambda: "a"), launch=FOUR, **run)
    object.__setattr__(site, "ranks", Told(answers))
    return found(processor_cores, site)


def test_several_processes_with_the_threads_of_the_whole_machine_each_are_a_problem(tmp_path):
    findings = together(tmp_path, four(threads=8))
    assert findings["threads"].verdict == "problem"
    assert (
        findings["threads"].measured == "8 + 8 + 8 + 8 in 4 processes (OMP_NUM_THREADS is not set)"
    )
    assert "export OMP_NUM_THREADS=2" in findings["threads"].advice
    assert together(tmp_path, four(threads=2))["threads"].verdict == "ok"
    assert together(tmp_path, four(threads=8), device="cuda")["threads"].verdict == "look"


def test_one_thread_alone_on_many_cores_is_looked_at(tmp_path):
    finding = cores(tmp_path, threads=1, environ={"OMP_NUM_THREADS": "1"})["threads"]
    assert (finding.verdict, finding.cost) == ("look", "7 cores will have nothing to do in a step")
    assert cores(tmp_path, threads=1, device="cuda")["threads"].verdict == "ok"


def test_fewer_cores_than_processes_are_a_problem_and_than_loader_workers_are_looked_at(tmp_path):
    few = four(threads=1, affinity=[3, 4])
    assert together(tmp_path, few)["processor cores"].verdict == "problem"
    assert together(tmp_path, four(threads=2), workers=2)["processor cores"].verdict == "look"
    assert together(tmp_path, four(threads=2), workers=1)["processor cores"].verdict == "ok"


def test_cores_that_each_rank_has_for_itself_are_counted_together(tmp_path):
    own = [{"host": "a", "cores": [rank], "threads": 1} for rank in range(4)]
    finding = together(tmp_path, own)["processor cores"]
    assert (finding.verdict, finding.details["cores"]) == ("ok", 4)


def test_a_quota_that_is_used_up_often_is_told(tmp_path):
    files = NEWER | {"sys/fs/cgroup/job/task/cpu.stat": "nr_periods 100\nnr_throttled 40\n"}
    finding = cores(tmp_path, files=files)["processor quota"]
    assert (finding.verdict, finding.measured) == ("look", "used up in 40% of its periods")
