"""GPUs by what a real H200 answered, and planted faults: each is found, and none where all is
well.
"""

from __future__ import annotations

import dataclasses
import json

import pynvml
import pytest

from ddpkit.errors import ConfigError, MissingExtraError
from ddpkit.launch import LaunchInfo
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.checks import gpu_ranks, gpus
from ddpkit.see.doctor.checks.gpu_ranks import Seat
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM
from ddpkit.see.doctor.gpus.by_torch import ByTorch
from ddpkit.see.doctor.gpus.driver import Driver, Gpu
from ddpkit.see.doctor.gpus.nvml import read_driver
from ddpkit.see.doctor.gpus.sight import GpuSight
from ddpkit.see.doctor.gpus.visible import visible_gpus
from ddpkit.see.doctor.machine import Machine
from ddpkit.see.doctor.planned_run import PlannedRun
from ddpkit.see.doctor.ranks import Ranks

from .recorded_nvml import (
    LINKS,
    RecordedLoad,
    RecordedNvml,
    change,
    driver_of,
    machine_of,
    recorded,
    torch_of,
)

MIB = 2**20


def site_of(rest, work=None, seen=None, load=None, environ=None, device="cuda", **run):
    """Return a machine whose driver answers by one recording at rest, and by another at work."""
    answers = [driver_of(rest), driver_of(work or rest)]
    sight = GpuSight(
        driver=lambda: answers.pop(0),
        by_torch=lambda: torch_of(driver_of(rest)) if seen is None else seen,
        device_of=lambda kind, _: f"{kind}:0" if kind == "cuda" else kind,
        load=load or RecordedLoad(),
    )
    launch = LaunchInfo()
    return Site(
        Machine(environ=environ or {}, gpus=sight),
        PlannedRun(launch, device, **run),
        Ranks(launch),
    )


def found(site):
    findings = list(gpus.look(site))
    names = [one.name for one in findings]
    assert len(names) == len(set(names))
    assert all(one.measured and one.expected and one.source for one in findings)
    assert all(one.cost and one.advice for one in findings if one.verdict != OK)
    return {one.name: one for one in findings}


def bad(findings):
    return {name: one.verdict for name, one in findings.items() if one.verdict != OK}


def two(**of_second):
    """Return two H200 with NVLink, the second with other answers, at rest and at work."""
    return [
        change(machine_of(2, name, links=LINKS), 1, **of_second)
        for name in ("h200_at_rest", "h200_at_work")
    ]


# -------------------------------------------------------------------------- machines that are well


def test_the_real_h200_is_well_and_each_finding_has_its_value():
    seen = found(site_of(recorded("h200_at_rest"), recorded("h200_at_work")))
    assert bad(seen) == {}
    assert {name: one.measured for name, one in seen.items()} == {
        "CUDA_VISIBLE_DEVICES": "not set",
        "GPUs that torch sees": "1 of 1",
        "driver for CUDA": "driver 580.159.04 (CUDA 13.0), torch 2.13.0+cu128 for CUDA 12.8",
        "kernels of torch": "for each GPU",
        "GPUs to ourselves": "143156 of 143771 MiB free",
        "PCIe link": "x16 of x16, generation 5 of 5",
        "PCIe replays": "none",
        "copies to the GPU": "50.0 of 63.0 GB/s",
        "memory errors": "none",
        "GPU clocks": "not slowed (1785 of 1980 MHz)",
        "GPU temperature": "58 C, slows down at 89 C",
        "power limit": "700 of 700 W",
        "persistence mode": "on",
        "compute mode": "default",
        "MIG": "off",
        "GPU of each rank": "cuda:0: NVIDIA H200",
        "speed of the GPUs": "700 to 700 TFLOP/s",
    }


def test_eight_of_them_with_nvlink_are_well():
    seen = found(site_of(machine_of(8, links=LINKS), machine_of(8, "h200_at_work", links=LINKS)))
    assert bad(seen) == {}
    assert seen["NVLink"].measured == "8 GPUs: 18 of 18 links up"
    assert seen["GPUs alike"].measured == "8 x NVIDIA H200, 140 GiB"
    assert seen["GPU to GPU"].lines[1].split() == ["GPU0", "X", *["NV18"] * 7]


def test_what_the_driver_said_can_be_written_down_and_read_again():
    driver = driver_of(machine_of(2, links=LINKS))
    assert Driver.from_plain(json.loads(json.dumps(driver.to_plain()))) == driver
    assert driver.gpus[0].unanswered["memory_reserved"] == "Not Supported"


def test_a_machine_without_nvidias_driver_is_well():
    nothing = site_of({"problem": "NVMLError_LibraryNotFound"}, seen=ByTorch(), device="cpu")
    seen = found(nothing)
    assert {name: (one.verdict, one.measured) for name, one in seen.items()} == {
        "NVIDIA driver": (OK, "no NVIDIA driver here")
    }


def test_gpus_are_left_alone_where_the_run_is_to_be_on_the_cpu():
    seen = found(site_of(recorded("h200_at_rest"), device="cpu", is_cpu_asked=True))
    assert {name: one.measured for name, one in seen.items()} == {"GPUs": "1, not looked at"}


def test_at_rest_the_generation_of_a_link_is_lower_and_nothing_is_said():
    rest = change(
        machine_of(1),
        0,
        nvmlDeviceGetCurrPcieLinkGeneration=1,
        nvmlDeviceGetPerformanceState=8,
    )
    seen = found(site_of(rest, machine_of(1, "h200_at_work")))
    assert bad(seen) == {}
    assert seen["PCIe link"].measured == "x16 of x16, generation 5 of 5"


# ---------------------------------------------------------------------------------- planted faults

A_PROCESS = [{"pid": 4242, "usedGpuMemory": 20000 * MIB}]
FULL = {"total": 143771 * MIB, "free": 60000 * MIB, "used": 83771 * MIB}

FAULTS = {
    "a slot with four of sixteen lanes": (
        {"nvmlDeviceGetCurrPcieLinkWidth": 4},
        ("PCIe link", PROBLEM, "GPU 1: x4 of x16, generation 5 of 5: 15.8 of 63.0 GB/s"),
    ),
    "half of the lanes": (
        {"nvmlDeviceGetCurrPcieLinkWidth": 8},
        ("PCIe link", LOOK, "GPU 1: x8 of x16, generation 5 of 5: 31.5 of 63.0 GB/s"),
    ),
    "a link that stays at generation 1 at work": (
        {"nvmlDeviceGetCurrPcieLinkGeneration": 1},
        ("PCIe link", PROBLEM, "GPU 1: x16 of x16, generation 1 of 5: 4.0 of 63.0 GB/s"),
    ),
    "packets that are sent again": (
        {"nvmlDeviceGetPcieReplayCounter": 12345},
        ("PCIe replays", LOOK, "GPU 1: 12345"),
    ),
    "an NVLink that is down": (
        {"nvmlDeviceGetNvLinkState__3": 0},
        ("NVLink", PROBLEM, "GPU 1: 17 of 18 links up; down: 3"),
    ),
    "heat": (
        {"nvmlDeviceGetCurrentClocksEventReasons": 0x40 | 0x08},
        ("GPU clocks", PROBLEM, "heat (by the hardware) (1785 of 1980 MHz)"),
    ),
    "the driver slows it down for heat": (
        {"nvmlDeviceGetCurrentClocksEventReasons": 0x20},
        ("GPU clocks", PROBLEM, "GPU 1: heat (by the driver)"),
    ),
    "the power supply": (
        {"nvmlDeviceGetCurrentClocksEventReasons": 0x80 | 0x08},
        ("GPU clocks", PROBLEM, "power brake"),
    ),
    "clocks set by hand": (
        {"nvmlDeviceGetCurrentClocksEventReasons": 0x02},
        ("GPU clocks", LOOK, "GPU 1: clocks set by hand"),
    ),
    "heat in the past": (
        {"nvmlDeviceGetViolationStatus__1": {"referenceTime": 0, "violationTime": 90_000_000_000}},
        ("GPU clocks", LOOK, "GPU 1: 90 s of heat since the driver was loaded"),
    ),
    "nearly too hot": (
        {"nvmlDeviceGetTemperature__0": 86},
        ("GPU temperature", LOOK, "GPU 1: 86 C, slows down at 89 C"),
    ),
    "a power limit": (
        {"nvmlDeviceGetEnforcedPowerLimit": 400000},
        ("power limit", LOOK, "GPU 1: 400 of 700 W"),
    ),
    "an error of memory that was not corrected": (
        {"nvmlDeviceGetTotalEccErrors__1_0": 2},
        ("memory errors", PROBLEM, "GPU 1: 2 not corrected since the driver was loaded"),
    ),
    "an error of long ago": (
        {"nvmlDeviceGetTotalEccErrors__1_1": 3},
        ("memory errors", LOOK, "GPU 1: 3 not corrected in the card's life"),
    ),
    "many corrected errors": (
        {"nvmlDeviceGetTotalEccErrors__0_0": 5000},
        ("memory errors", LOOK, "GPU 1: 5000 corrected since the driver was loaded"),
    ),
    "a repair that waits": (
        {"nvmlDeviceGetRemappedRows": [0, 1, 1, 0]},
        ("memory errors", PROBLEM, "GPU 1: a repair waits for a reset"),
    ),
    "a repair that has failed": (
        {"nvmlDeviceGetRemappedRows": [0, 1, 0, 1]},
        ("memory errors", PROBLEM, "GPU 1: repair has failed"),
    ),
    "pages retired on an older card": (
        {
            "nvmlDeviceGetRemappedRows": "NVMLError_NotSupported",
            "nvmlDeviceGetRetiredPages__1": [4096],
            "nvmlDeviceGetRetiredPagesPendingStatus": 0,
        },
        ("memory errors", LOOK, "GPU 1: 1 pages retired"),
    ),
    "persistence off": (
        {"nvmlDeviceGetPersistenceMode": 0},
        ("persistence mode", LOOK, "GPU 1: off"),
    ),
    "an exclusive GPU": (
        {"nvmlDeviceGetComputeMode": 3},
        ("compute mode", LOOK, "GPU 1: exclusive"),
    ),
    "a prohibited GPU": (
        {"nvmlDeviceGetComputeMode": 2},
        ("compute mode", PROBLEM, "GPU 1: prohibited"),
    ),
    "a divided GPU": (
        {"nvmlDeviceGetMigMode": [1, 1], "nvmlDeviceGetMaxMigDeviceCount": 7},
        ("MIG", LOOK, "GPU 1: on, no parts"),
    ),
    "another one's process": (
        {"nvmlDeviceGetComputeRunningProcesses": A_PROCESS, "nvmlDeviceGetMemoryInfo": FULL},
        ("GPUs to ourselves", PROBLEM, "GPU 1: used by pid 4242 with 20000 MiB"),
    ),
    "memory of another container": (
        {"nvmlDeviceGetMemoryInfo": FULL},
        ("GPUs to ourselves", PROBLEM, "GPU 1: 60000 of 143771 MiB free, and no process is shown"),
    ),
    "a GPU that is busy though nobody is seen": (
        {"nvmlDeviceGetUtilizationRates": {"gpu": 97, "memory": 10}},
        ("GPUs to ourselves", LOOK, "GPU 1: 97 % busy, and no process is shown"),
    ),
    "a GPU that has fallen off the bus": (
        {"handle": "NVMLError_GpuIsLost"},
        ("GPU answers", PROBLEM, "GPU 1: GPU is lost"),
    ),
    "a GPU of another kind": (
        {"nvmlDeviceGetName": "NVIDIA A100-SXM4-80GB"},
        ("GPUs alike", LOOK, "1 x NVIDIA H200, 140 GiB (cuda:0); 1 x NVIDIA A100-SXM4-80GB"),
    ),
    "a GPU with less memory": (
        {
            "nvmlDeviceGetMemoryInfo": {
                "total": 80000 * MIB,
                "free": 79000 * MIB,
                "used": 1000 * MIB,
            }
        },
        ("GPUs alike", LOOK, "1 x NVIDIA H200, 140 GiB (cuda:0); 1 x NVIDIA H200, 78 GiB (cuda:1)"),
    ),
}


# CUDA numbers unlike GPUs by speed unless it is told not to; a GPU that is lost is missed by torch,
# too.
ALSO = {
    "a GPU of another kind": {"CUDA_VISIBLE_DEVICES"},
    "a GPU that has fallen off the bus": {"GPUs that torch sees"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_of_two_gpus_is_found_and_it_is_named(fault):
    answers, (name, verdict, measured) = FAULTS[fault]
    rest, work = two(**answers)
    seen = found(site_of(rest, work))
    assert seen[name].verdict == verdict
    assert measured in seen[name].measured
    assert set(bad(seen)) == {name} | ALSO.get(fault, set())


SLOW = {
    "copies that are slow": (
        RecordedLoad(copied=12e9),
        ("copies to the GPU", LOOK, "12.0 of 63.0 GB/s"),
    ),
    "a GPU that computes slowly": (
        RecordedLoad(slow={1: 0.5}),
        ("speed of the GPUs", PROBLEM, "GPU 1: 350 TFLOP/s, 50 % of the median (700 TFLOP/s)"),
    ),
}


@pytest.mark.parametrize("fault", SLOW)
def test_a_gpu_that_is_slow_for_whatever_reason_is_found(fault):
    load, (name, verdict, measured) = SLOW[fault]
    seen = found(site_of(*two(), load=load))
    assert bad(seen) == {name: verdict}
    assert measured in seen[name].measured


HIDING = {
    "1,7": (
        PROBLEM,
        "CUDA_VISIBLE_DEVICES='1,7': '7': there are GPUs 0 to 1; 1 of 2 GPUs are left",
    ),
    "GPU-99": (PROBLEM, "'GPU-99': no GPU has this UUID; 0 of 2 GPUs are left"),
    "0,0": (
        PROBLEM,
        "'0': that GPU is there twice, and CUDA then takes none; 0 of 2 GPUs are left",
    ),
    "MIG-1": (PROBLEM, "'MIG-1': no GPU has this MIG part"),
    "cuda:1": (PROBLEM, "'cuda:1': neither a number nor a UUID"),
    "": (LOOK, "'': 0 of 2 GPUs are left"),
    "-1": (LOOK, "'-1': 0 of 2 GPUs are left"),
    "1": (OK, "'1': 1 of 2 GPUs are left"),
    "GPU-00000001": (OK, "'GPU-00000001': 1 of 2 GPUs are left"),
}


@pytest.mark.parametrize("value", HIDING)
def test_visible_devices_are_compared_with_those_that_are_there(value):
    verdict, measured = HIDING[value]
    rest, work = two()
    left = visible_gpus(value, driver_of(rest).gpus).gpus
    seen = torch_of(
        driver_of(rest),
        gpus=tuple(torch_of(driver_of(rest)).gpus[index] for index in left),
        peers=(),
    )
    finding = found(site_of(rest, work, seen=seen, environ={"CUDA_VISIBLE_DEVICES": value}))[
        "CUDA_VISIBLE_DEVICES"
    ]
    assert finding.verdict == verdict
    assert measured in finding.measured


def test_unlike_gpus_are_numbered_by_speed_unless_cuda_is_told_otherwise():
    rest, work = two(nvmlDeviceGetName="NVIDIA A100-SXM4-80GB")
    assert found(site_of(rest, work))["CUDA_VISIBLE_DEVICES"].verdict == LOOK
    told = found(site_of(rest, work, environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}))
    assert told["CUDA_VISIBLE_DEVICES"].verdict == OK


SOFTWARE = {
    "a torch without CUDA": (
        {"cuda": None, "gpus": (), "peers": (), "problem": "Torch not compiled with CUDA enabled"},
        ("GPUs that torch sees", PROBLEM, "0 of 2: Torch not compiled with CUDA enabled"),
    ),
    "a driver that is too old": (
        {
            "cuda": "14.0",
            "gpus": (),
            "peers": (),
            "problem": "The NVIDIA driver on your system is too old",
        },
        (
            "driver for CUDA",
            PROBLEM,
            "driver 580.159.04 (CUDA 13.0), torch 2.13.0+cu128 for CUDA 14.0",
        ),
    ),
    "a driver that is older by a little": (
        {"cuda": "13.1"},
        ("driver for CUDA", LOOK, "(CUDA 13.0), torch 2.13.0+cu128 for CUDA 13.1"),
    ),
    "a torch without kernels for the GPU": (
        {"architectures": ("sm_100", "sm_120", "compute_120")},
        (
            "kernels of torch",
            PROBLEM,
            "none for NVIDIA H200 (sm_90); there are sm_100 sm_120 compute_120",
        ),
    ),
    "GPUs that do not reach each other": (
        {"peers": ((0, 1, False), (1, 0, False))},
        ("GPU to GPU", PROBLEM, "no direct access: 0-1"),
    ),
}


@pytest.mark.parametrize("fault", SOFTWARE)
def test_what_torch_cannot_do_with_the_gpus_is_found(fault):
    changes, (name, verdict, measured) = SOFTWARE[fault]
    rest, work = two()
    by_torch = torch_of(driver_of(rest), **changes)
    seen = found(site_of(rest, work, seen=by_torch, device="cuda" if by_torch.gpus else "cpu"))
    assert seen[name].verdict == verdict
    assert measured in seen[name].measured
    assert set(bad(seen)) <= {name, "GPUs that torch sees"}


def test_gpus_without_nvlink_that_do_not_reach_each_other_are_worth_a_look():
    rest = machine_of(2)
    work = machine_of(2, "h200_at_work")
    seen = found(
        site_of(rest, work, seen=torch_of(driver_of(rest), peers=((0, 1, False), (1, 0, False))))
    )
    assert bad(seen) == {"GPU to GPU": LOOK}
    assert seen["GPU to GPU"].lines[1].split() == ["GPU0", "X", "NODE"]


def test_a_driver_that_was_updated_under_the_machine_is_a_problem():
    seen = found(
        site_of({"problem": "NVMLError_LibRmVersionMismatch"}, seen=ByTorch(), device="cpu")
    )
    assert bad(seen) == {"NVIDIA driver": PROBLEM}
    assert "version mismatch" in seen["NVIDIA driver"].measured


def test_what_fails_while_it_is_looked_at_is_a_finding_and_the_rest_goes_on():
    site = site_of(recorded("h200_at_rest"))

    def broken():
        raise OSError("no such device")

    sight = dataclasses.replace(site.machine.gpus, by_torch=broken)
    seen = found(dataclasses.replace(site, machine=dataclasses.replace(site.machine, gpus=sight)))
    assert "OSError: no such device" in seen["GPUs of torch"].measured
    assert seen["memory errors"].verdict == OK


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with pytest.raises(MissingExtraError, match=r"pip install nvidia-ml-py"):
        read_driver()
    site = site_of(recorded("h200_at_rest"), seen=ByTorch(), device="cpu")
    sight = dataclasses.replace(site.machine.gpus, driver=read_driver)
    seen = found(dataclasses.replace(site, machine=dataclasses.replace(site.machine, gpus=sight)))
    assert bad(seen) == {"GPUs": LOOK}
    advice = seen["GPUs"].advice
    assert "pip install nvidia-ml-py" in advice


# ------------------------------------------------------------------------------- several processes


def seats_of(*uuids, names=()):
    names = names or ["NVIDIA H200"] * len(uuids)
    rows = zip(uuids, names, strict=True)
    return [
        Seat(rank, "gpu07", f"cuda:{rank}", "", uuid, name, 2**37)
        for rank, (uuid, name) in enumerate(rows)
    ]


def test_two_ranks_on_one_gpu_are_a_problem():
    finding = gpu_ranks.seats(seats_of("GPU-1", "GPU-2", "GPU-1"))
    assert (finding.verdict, finding.measured) == (PROBLEM, "ranks 0, 2 on gpu07 share one GPU")
    assert gpu_ranks.seats(seats_of("GPU-1", "GPU-2")).verdict == OK


def test_the_same_number_on_two_hosts_is_not_one_gpu():
    seats = seats_of("GPU-1", "GPU-1")
    assert gpu_ranks.seats([seats[0], dataclasses.replace(seats[1], host="gpu08")]).verdict == OK


def test_ranks_with_unlike_gpus_are_a_problem_and_named():
    finding = gpu_ranks.alike(seats_of("a", "b", names=["NVIDIA H200", "NVIDIA L4"]), is_run=True)
    assert finding.verdict == PROBLEM
    assert "1 x NVIDIA L4, 128 GiB (rank 1 on gpu07)" in finding.measured


def on_a_rank():
    """Look at one H200 that two ranks share; the second rank's ddpkit refuses it."""
    import os

    from ddpkit.launch import find_launch
    from ddpkit.see.doctor.ranks import open_ranks

    def device_of(kind, info):
        if info.local_rank:
            raise ConfigError(
                "Not enough GPUs: this is LOCAL_RANK=1, counted from 0, but found 1 GPU (cuda:0)."
            )
        return "cuda:0"

    site, launch = site_of(recorded("h200_at_rest"), recorded("h200_at_work")), find_launch()
    sight = dataclasses.replace(site.machine.gpus, device_of=device_of)
    machine = dataclasses.replace(site.machine, gpus=sight)
    ranks = open_ranks(launch, 30.0)
    site = Site(machine, dataclasses.replace(site.run, launch=launch), ranks)
    return os.getpid(), {
        name: one.measured for name, one in found(site).items() if one.verdict != OK
    }


@pytest.mark.costly
def test_more_ranks_than_gpus_are_a_problem_that_the_main_process_tells(ranks):
    (_, first), (_, second) = ranks.run(on_a_rank, init=False)
    assert list(first) == ["GPU of each rank"]
    assert first["GPU of each rank"].startswith("rank 1: Not enough GPUs: this is LOCAL_RANK=1")
    assert second == {}


def test_our_own_processes_are_not_taken_for_others():
    import os

    mine = [{"pid": os.getpid(), "usedGpuMemory": 500 * MIB}]
    rest = change(machine_of(1), 0, nvmlDeviceGetComputeRunningProcesses=mine)
    assert bad(found(site_of(rest))) == {}


def test_a_divided_gpu_gives_its_parts_and_several_processes_are_a_problem():
    record = change(machine_of(1), 0, nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetMaxMigDeviceCount=1)
    nvml = RecordedNvml(record)
    nvml.nvmlDeviceGetMigDeviceHandleByIndex = lambda handle, number: 99
    own = nvml.nvmlDeviceGetUUID
    nvml.nvmlDeviceGetUUID = lambda handle: "MIG-abc" if handle == 99 else own(handle)
    [gpu] = read_driver(nvml).gpus
    assert gpu.mig_devices == ("MIG-abc",)
    assert visible_gpus("MIG-abc", [gpu]).gpus == [0]
    assert gpus.gpu_modes.mig([gpu], processes=2).verdict == PROBLEM
    assert gpus.gpu_modes.mig([gpu], processes=1).measured == "GPU 0: on, 1 part"


def test_every_question_that_is_asked_exists_in_the_package():
    nvml = RecordedNvml(recorded("h200_at_rest"))
    [gpu] = read_driver(nvml).gpus
    assert not any("nvidia-ml-py has no" in reason for reason in gpu.unanswered.values())
    assert isinstance(gpu, Gpu)
    assert hasattr(pynvml, "nvmlDeviceGetTopologyCommonAncestor")
