"""How fast ranks average, measured by real ranks, and what is said of slow links.

A cable that is really slow: ``tests/clusters/test_slow_pair.py``.
"""

from __future__ import annotations

import pytest

from ddpkit.launch import find_launch
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.checks import all_reduce
from ddpkit.see.doctor.checks.all_reduce import Measured, Member, pair_finding
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM
from ddpkit.see.doctor.gpus.driver import Gpu, NvLink
from ddpkit.see.doctor.link_speed import LinkSpeed, _gpu_link, expected_speed, link_speed
from ddpkit.see.doctor.machine import Machine
from ddpkit.see.doctor.planned_run import PlannedRun
from ddpkit.see.doctor.ranks import open_ranks

from .sites import machine_with, site_of

KILOBYTE = 2**10
MEGABYTE = 2**20
THREE = {0: "gpu01", 1: "gpu02", 2: "gpu03"}


def looked_at(timeout=60.0, **run):
    """Look as a rank of a real launch, with two sizes instead of all."""
    all_reduce.SIZES = (4 * KILOBYTE, MEGABYTE)
    launch = find_launch()
    ranks = open_ranks(launch, timeout)
    site = Site(Machine(), PlannedRun(launch, "cpu", **run), ranks)
    found = list(all_reduce.look(site))
    ranks.leave()
    return {one.name: one for one in found}


def with_pairs():
    return looked_at(with_pairs=True)


@pytest.mark.costly
def test_two_ranks_measure_and_the_main_process_tells(ranks):
    first, second = ranks.run(with_pairs, init=False)
    assert second == {}
    assert {name: one.verdict for name, one in first.items()} == dict.fromkeys(first, OK)
    assert list(first) == ["all-reduce", "latency", "pairs of ranks"]
    assert [line.split()[:2] for line in first["all-reduce"].lines[1:]] == [
        ["4.1", "kB"],
        ["1.0", "MB"],
    ]
    seconds = first["all-reduce"].details["seconds"]
    assert 0 < seconds["4096"] < 1
    # of two ranks one size's bytes go over the link in each direction
    assert first["all-reduce"].details["bytes_per_second"]["1048576"] == pytest.approx(
        MEGABYTE / seconds["1048576"]
    )
    assert first["pairs of ranks"].details["bytes_per_second"].keys() == {"0-1"}


def with_a_rank_that_cannot():
    if find_launch().rank == 1:

        def unable(*_):
            raise RuntimeError("Unable to find address for: eth9")

        all_reduce.process_group = unable
    return looked_at(timeout=4.0)


@pytest.mark.costly
def test_a_rank_that_cannot_join_is_a_problem_with_its_words(ranks):
    first, second = ranks.run(with_a_rank_that_cannot, init=False)
    # torch has counted a group on one rank alone: its next one would have another name
    ranks.close()
    assert second == {}
    assert list(first) == ["all-reduce"]
    assert first["all-reduce"].verdict == PROBLEM
    assert "Unable to find address for: eth9" in first["all-reduce"].measured


def test_one_process_has_nothing_to_measure():
    assert list(all_reduce.look(site_of())) == []


def test_a_rank_without_a_device_is_told_and_nothing_is_measured():
    members = {
        0: Member("a", "cuda:0", "", LinkSpeed()),
        1: Member("a", "cpu", "no GPU", LinkSpeed()),
    }
    assert all_reduce._why_not(members, 2) == "rank 1 has no device: no GPU"
    assert all_reduce._why_not(members, 3) == "rank 2 does not answer"


# --------------------------------------------------------------------------------- what is said


def of_whole(seconds, links, copied=5e9):
    """Return the verdicts on two ranks of two hosts that need so long for 64 MB."""
    site = site_of()
    members = {rank: Member(f"gpu0{rank}", "cpu", "", link) for rank, link in enumerate(links)}
    measured = Measured({"4096": [0.001], str(64 * MEGABYTE): [seconds]}, copied)
    return {
        one.name: one for one in all_reduce._of_whole(site, members, {0: measured, 1: measured})
    }


ETHERNET = LinkSpeed("eth0", 1.25e9)


def test_a_network_that_is_slower_than_its_interface_is_found():
    assert of_whole(0.1, [ETHERNET] * 2)["all-reduce"].verdict == OK
    slow = of_whole(0.5, [ETHERNET] * 2)["all-reduce"]
    assert (slow.verdict, slow.measured) == (LOOK, "134.2 MB/s at 67.1 MB")
    assert slow.expected == "at least 250.0 MB/s"
    broken = of_whole(5.0, [ETHERNET] * 2)["all-reduce"]
    assert broken.verdict == PROBLEM
    assert broken.cost == "100 million float32 gradients take 29.8 s in each step"


def test_hosts_that_are_far_apart_are_found():
    site = site_of()
    members = {rank: Member(f"gpu0{rank}", "cpu", "", ETHERNET) for rank in range(2)}
    measured = dict.fromkeys(members, Measured({"4096": [0.041, 0.050]}, 5e9))
    found = {one.name: one for one in all_reduce._of_whole(site, members, measured)}
    assert (found["latency"].verdict, found["latency"].measured.split()[0]) == (LOOK, "41.00")


def test_the_best_time_counts_and_each_takes_as_long_as_for_its_slowest_rank():
    measured = {0: Measured({"8": [1.0, 5.0, 2.0]}), 1: Measured({"8": [4.0, 1.0, 3.0]})}
    assert all_reduce._slowest(measured) == {8: 3.0}


def test_a_slow_pair_is_named():
    found = pair_finding({(0, 1): 1e9, (0, 2): 9e8, (1, 2): 2e7}, THREE, is_between_hosts=True)
    assert (found.verdict, found.measured) == (PROBLEM, "gpu02 and gpu03: 20.0 MB/s")
    assert found.lines[0].split() == ["gpu02", "-", "gpu03", "20.0", "MB/s"]


def test_a_slow_host_is_named_once():
    hosts = {**THREE, 3: "gpu04"}
    speeds = {(0, 1): 1e9, (0, 2): 1e9, (1, 2): 1e9, (0, 3): 2e7, (1, 3): 2e7, (2, 3): 2e7}
    found = pair_finding(speeds, hosts, is_between_hosts=True)
    assert (found.name, found.measured) == (
        "pairs of hosts",
        "gpu04 with each other one: 20.0 MB/s",
    )


def test_even_pairs_are_well():
    found = pair_finding({(0, 1): 1e9, (0, 2): 8e8, (1, 2): 9e8}, THREE, is_between_hosts=False)
    assert (found.verdict, found.measured) == (OK, "800.0 MB/s to 1.0 GB/s")


@pytest.mark.parametrize(
    ("links", "backend", "hosts", "copied", "expected"),
    [
        ([LinkSpeed("eth0", 1.25e8), ETHERNET], "gloo", 2, 9e9, 6.25e7),
        ([LinkSpeed("ib0", 5e10)] * 2, "gloo", 2, 9e10, 1e9),
        ([LinkSpeed("eth0", 0.0)] * 2, "gloo", 2, 9e9, 5e7),
        ([ETHERNET] * 2, "gloo", 2, 1e9, 5e7),
        ([ETHERNET] * 2, "gloo", 1, 5e9, 1e8),
        ([LinkSpeed("InfiniBand", 5e10)] * 2, "nccl", 2, 0.0, 2.5e10),
        (
            [LinkSpeed("lo", 0.0, "NVLink, 18 links of 25.0 GB/s", 4.5e11)] * 8,
            "nccl",
            1,
            0.0,
            1.8e11,
        ),
        ([LinkSpeed("lo", 0.0, "PCIe generation 4 x16", 3.15e10)] * 2, "nccl", 1, 0.0, 6.3e9),
    ],
)
def test_what_is_expected_follows_from_the_slowest_link(links, backend, hosts, copied, expected):
    assert expected_speed(links, backend, hosts, copied).bytes_per_second == pytest.approx(expected)


def test_links_of_a_gpu_have_their_speed():
    linked = Gpu(
        0,
        links=tuple(NvLink(number, is_up=number != 3, version=4) for number in range(18)),
    )
    assert _gpu_link(linked) == ("NVLink, 17 links of 25.0 GB/s", 17 * 25e9)
    assert _gpu_link(Gpu(0, pcie_max_generation=5, pcie_max_width=16))[1] == pytest.approx(
        63e9,
        rel=0.01,
    )


def test_infiniband_tells_its_rate(tmp_path):
    files = {"sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n"}
    machine = machine_with(tmp_path, files, gpus=SIGHT)
    assert link_speed(site_of(machine, device="cuda")) == LinkSpeed("InfiniBand", 5e10)


class NoGpus:
    @staticmethod
    def driver():
        from ddpkit.see.doctor.gpus.driver import Driver

        return Driver()


SIGHT = NoGpus()
