"""What the links between ranks can carry, and what an all-reduce may be expected to make of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddpkit.see.amounts import in_bytes
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.checks.gpu_links import LANE
from ddpkit.see.doctor.gloo_address import gloo_address
from ddpkit.see.doctor.gpus.driver import Gpu
from ddpkit.see.doctor.interfaces import taken_by_nccl

# Bytes per second of a link in one direction, by version. Source: NVIDIA's data sheets of P100,
# V100, A100, H100 and B200.
NVLINK = {
    1: 20e9,
    2: 25e9,
    3: 25e9,
    4: 25e9,
    5: 50e9,
}
MEGABIT = 1e6 / 8
GOOD_FOR_GLOO = 1e9  # bytes per second that a rank sends over sockets: more is not asked of it
SHARE_OF_NETWORK = 0.5
SHARE_OF_NVLINK = 0.4
SHARE_OF_PCIE = 0.2  # each byte goes up to the host, and down again
SHARE_OF_COPIES = 0.02  # a byte is copied into sockets and out of them again, and added
SHARE_OF_COPIES_BETWEEN_HOSTS = 0.05
UNKNOWN_NETWORK = 1e8


@dataclass(frozen=True)
class LinkSpeed:
    """The link of this rank: its name, and bytes per second in one direction; 0: unknown."""

    network: str = ""
    network_speed: float = 0.0
    gpu: str = ""
    gpu_speed: float = 0.0


@dataclass(frozen=True)
class Expected:
    """What may be expected, and why."""

    bytes_per_second: float
    source: str


def link_speed(site: Site) -> LinkSpeed:
    """Find out what this rank is connected by."""
    network, speed = _network(site)
    if site.run.device != "cuda":
        return LinkSpeed(network, speed)
    gpus = site.machine.gpus.driver().gpus
    gpu, gpu_speed = _gpu_link(gpus[0]) if gpus else ("", 0.0)
    return LinkSpeed(network, speed, gpu, gpu_speed)


def _network(site: Site) -> tuple[str, float]:
    if site.run.device == "cuda":
        fabric = _infiniband(site)
        if fabric:
            return "InfiniBand", fabric
        names = site.machine.environ.get("NCCL_SOCKET_IFNAME")
        taken = taken_by_nccl(site.machine.interfaces(), names)[:1]
    else:
        interface = gloo_address(site.machine).interface
        taken = [] if interface is None else [interface]
    return (taken[0].name, taken[0].megabits * MEGABIT) if taken else ("", 0.0)


def _infiniband(site: Site) -> float:
    """Return bytes per second of the fastest adapter, which says "400 Gb/sec (4X NDR)"."""
    rates = [0.0]
    for file in site.machine.root.glob("sys/class/infiniband/*/ports/*/rate"):
        found = re.match(r"([\d.]+) Gb/sec", file.read_text())
        rates += [float(found[1]) * 1e9 / 8] if found else []
    return max(rates)


def _gpu_link(gpu: Gpu) -> tuple[str, float]:
    up = [link for link in gpu.links if link.is_up]
    if up:
        each = NVLINK.get(up[0].version or 0, NVLINK[2])
        return f"NVLink, {len(up)} links of {in_bytes(each)}/s", len(up) * each
    lane = LANE.get(gpu.pcie_max_generation or 0, 0.0)
    width = gpu.pcie_max_width or 0
    return f"PCIe generation {gpu.pcie_max_generation} x{width}", lane * width


def expected_speed(
    links: Sequence[LinkSpeed],
    backend: str,
    hosts: int,
    copied: float,
) -> Expected:
    """Say what may be expected of an all-reduce.

    Args:
        links: of all ranks.
        backend: ``"gloo"`` or ``"nccl"``.
        hosts: how many there are.
        copied: bytes per second that the slowest rank copies in memory, all at the same time.

    Example:
        >>> ethernet = LinkSpeed("eth0", 1.25e9)
        >>> expected_speed([ethernet, ethernet], "gloo", 2, 5e10).source
        'half of the slowest interface, eth0 with 1.2 GB/s'
    """
    if hosts == 1 and backend == "nccl":
        slowest = min(links, key=lambda link: link.gpu_speed)
        share = SHARE_OF_NVLINK if slowest.gpu.startswith("NVLink") else SHARE_OF_PCIE
        speed = share * slowest.gpu_speed or UNKNOWN_NETWORK
        return Expected(speed, f"{100 * share:.0f} % of {slowest.gpu}")
    if hosts == 1:
        return _of_copies(SHARE_OF_COPIES, copied)
    between = _between_hosts(links)
    if backend == "nccl":
        return between
    gloo = Expected(GOOD_FOR_GLOO, "what gloo makes of fast networks")
    able = _of_copies(SHARE_OF_COPIES_BETWEEN_HOSTS, copied)
    return min(between, gloo, able, key=lambda link: link.bytes_per_second)


def _of_copies(share: float, copied: float) -> Expected:
    words = f"{100 * share:.0f} % of a copy in memory at the same time, {in_bytes(copied)}/s"
    return Expected(share * copied, words)


def _between_hosts(links: Sequence[LinkSpeed]) -> Expected:
    known = [link for link in links if link.network_speed]
    if not known:
        words = "half of Ethernet with 1 Gbit/s, for the interface does not tell its speed"
        return Expected(UNKNOWN_NETWORK * SHARE_OF_NETWORK, words)
    slowest = min(known, key=lambda link: link.network_speed)
    words = (
        f"half of the slowest interface, {slowest.network} with {in_bytes(slowest.network_speed)}/s"
    )
    return Expected(SHARE_OF_NETWORK * slowest.network_speed, words)
