"""Variables that hurt, versions and clocks of ranks that differ, and what others take of the
machine.
"""

from __future__ import annotations

import dataclasses
import os
import time

import pytest

from ddpkit.launch import find_launch
from ddpkit.see import Request, run_doctor
from ddpkit.see.doctor.check import EACH_RANK, TOGETHER, Check
from ddpkit.see.doctor.checks import busy_cores, clocks, variables, versions
from ddpkit.see.doctor.load import Load, measure_load
from ddpkit.see.doctor.machine import Machine
from tests.see.doctor.sites import FOUR, HERE, found, site_of


def hurting(launch=FOUR, device="cuda", **environ):
    findings = found(variables, site_of(Machine(environ=environ), launch=launch, device=device))
    return {name: one.verdict for name, one in findings.items()}


HURT = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_DEBUG": "INFO",
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "PYTHONPROFILEIMPORTTIME": "1",
    "PYTHONTRACEMALLOC": "25",
    "MALLOC_CHECK_": "3",
    "OMP_NUM_THREADS": "all",
    "LD_PRELOAD": "/usr/lib/libasan.so.8",
}


def test_each_variable_that_hurts_is_told_by_its_name():
    findings = hurting(**HURT)
    assert set(findings) == set(HURT)
    problems = {name for name, verdict in findings.items() if verdict == "problem"}
    assert problems >= {"NCCL_P2P_DISABLE", "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG"}


def test_values_that_switch_nothing_on_do_not_hurt():
    well = {
        "NCCL_P2P_DISABLE": "0",
        "CUDA_LAUNCH_BLOCKING": "",
        "NCCL_DEBUG": "WARN",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
        "OMP_NUM_THREADS": "4,2",
        "NCCL_NVLS_ENABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "LD_PRELOAD": "/usr/lib/libjemalloc.so.2",
    }
    assert hurting(**well) == {"variables": "ok"}


def test_what_does_nothing_here_is_looked_at_and_no_problem():
    assert hurting(device="cpu", NCCL_P2P_DISABLE="1") == {"NCCL_P2P_DISABLE": "look"}
    assert hurting(launch=HERE, TORCH_DISTRIBUTED_DEBUG="DETAIL") == {
        "TORCH_DISTRIBUTED_DEBUG": "look"
    }


def on_a_rank(check, who, **replaced):
    """What the ranks say; rank 1 has another machine."""
    said = []
    own = replaced if find_launch().rank == 1 else {}
    machine = dataclasses.replace(Machine(environ={}), **own)
    code = run_doctor(Request(device="cpu"), said.append, machine, [Check("x", check.look, who)])
    return code, " ".join(" ".join(said).split())


def other_torch():
    versions_of_rank_1 = {**Machine().versions(), "torch": "2.8.0"}
    return on_a_rank(versions, TOGETHER, versions=lambda: versions_of_rank_1)


@pytest.mark.costly
def test_another_torch_on_one_rank_is_a_problem_that_names_the_rank(ranks):
    (code, text), _ = ranks.run(other_torch, init=False)
    assert code == 1
    assert "2.8.0 on rank 1" in text
    assert "on rank 0" in text


def other_variable():
    return on_a_rank(variables, EACH_RANK, environ={"NCCL_CUMEM_ENABLE": "0"})


def test_a_variable_that_is_not_the_same_on_all_ranks_is_told(ranks):
    (code, text), _ = ranks.run(other_variable, init=False)
    assert code == 0
    assert "NCCL_CUMEM_ENABLE: not set on rank 0, 0 on rank 1" in text


def soon():
    return time.time() + 90.0


def late_clock():
    return on_a_rank(clocks, TOGETHER, clock=soon, name=lambda: "late")


def test_a_clock_that_is_far_ahead_on_one_host_is_a_problem(ranks):
    each_alone = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    (code, text), _ = ranks.run(late_clock, init=False, env=each_alone)
    assert "2 processes on 2 hosts" in text
    assert code == 1
    assert "PROBLEM clock found +90.0" in text
    assert "(late)" in text


def on_a_host_that_nobody_counts():
    del os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_RANK"] = "0"
    seen = []

    def look(site):
        seen.append((site.run.processes_here, site.run.has_several_hosts))
        return []

    run_doctor(Request(device="cpu"), print, Machine(environ={}), [Check("x", look, EACH_RANK)])
    return seen


def test_how_many_ranks_a_host_has_they_tell_each_other_where_no_launcher_says_it(ranks):
    assert ranks.run(on_a_host_that_nobody_counts, init=False) == [[(1, True)]] * 2


@pytest.mark.parametrize(("busy", "verdict"), [(0.4, "ok"), (3.0, "look")])
def test_cores_that_others_keep_busy_are_told_with_who(busy, verdict):
    load = Load(8, busy, (("python", 4711, busy),), stolen=0.2)
    findings = found(busy_cores, site_of(Machine(environ={}, load=lambda left_out: load)))
    assert findings["busy cores"].verdict == verdict
    assert f"python (pid 4711) {busy} cores" in findings["busy cores"].measured
    assert findings["stolen time"].verdict == "look"


def test_what_others_take_is_measured_without_the_ranks_of_the_command():
    load = measure_load(set())
    assert 0.0 <= load.busy_cores <= load.cores
