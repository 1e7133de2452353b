"""How fast the ranks average gradients, and which pair of hosts is slow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore

from ddpkit.errors import ConfigError, LaunchError, MissingExtraError
from ddpkit.see.amounts import in_bytes
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.collectives import (
    MORE_SIZES,
    SIZES,
    Place,
    all_reduce_seconds,
    copied_per_second,
    pair_seconds,
    process_group,
)
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding
from ddpkit.see.doctor.link_speed import LinkSpeed, expected_speed, link_speed
from ddpkit.see.doctor.ranks import answering

if TYPE_CHECKING:
    from torch.distributed import Store

GROUP_SECONDS = 30.0  # that a single collective may take
# that a pair sends
FEW_TIMES = 4
MANY_TIMES = 12
MOST_MEMBERS = 16  # whose pairs are measured
SLOW_PAIR = 0.5  # of the median of all pairs
VERY_SLOW = 0.2  # of what is expected
LATENCY_SECONDS = {"gloo": 0.02, "nccl": 0.002}
EXAMPLE_BYTES = 4e8  # gradients of a hundred million float32 parameters
NAME = "all-reduce"


@dataclass(frozen=True)
class Member:
    """A rank, where it is, and what its links can carry.

    Ranks: local.
    """

    host: str
    device: str
    problem: str
    link: LinkSpeed

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Member:
        """Make one from the fields of another."""
        return cls(**{**plain, "link": LinkSpeed(**plain["link"])})


@dataclass(frozen=True)
class Measured:
    """What a rank has measured.

    Attributes:
        seconds: of several all-reduces, by bytes as text.
        copied: bytes per second in memory.
        pairs: rank, rank, bytes, seconds.
        error: why not.

    Ranks: local.
    """

    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    copied: float = 0.0
    pairs: Sequence[Sequence[float]] = ()
    error: str = ""


def look(site: Site) -> Iterator[Finding]:
    """Measure; where it is slow, or where it is asked for, pair by pair.

    Ranks: collective. What decides about the next part is the same on all ranks.
    """
    if site.ranks.world_size == 1:
        return
    plain = site.ranks.exchange("members", asdict(_member(site)))
    members = {rank: Member.from_plain(fields) for rank, fields in answering(plain).items()}
    reason = _why_not(members, site.ranks.world_size)
    if reason:
        if site.ranks.is_main:
            yield _not_measured(reason)
        return
    whole = _shared(site, "all-reduce", _whole(site, members))
    found = list(_of_whole(site, members, whole))
    has_failed = any(member.error for member in whole.values())
    if not has_failed and (site.run.with_pairs or any(member.verdict != OK for member in found)):
        found += _by_pairs(site, members)
    if site.ranks.is_main:
        yield from found


def _member(site: Site) -> Member:
    host = site.machine.name()
    device = "cpu"
    problem = ""
    try:
        device = site.machine.gpus.device_of(site.run.device, site.run.launch)
    except (ConfigError, LaunchError) as error:
        problem = str(error)
    try:
        link = link_speed(site)
    except (MissingExtraError, OSError) as error:  # the measurement itself needs no expectation
        link = LinkSpeed(network=str(error))
    return Member(host, device, problem, link)


def _why_not(members: Mapping[int, Member], world_size: int) -> str:
    silent = [rank for rank in range(world_size) if rank not in members]
    if silent:
        return f"rank {silent[0]} does not answer"
    for rank, member in members.items():
        if member.problem:
            return f"rank {rank} has no device: {member.problem}"
    return ""


def _not_measured(reason: str) -> Finding:
    return Finding(
        NAME,
        LOOK,
        f"not measured: {reason}",
        "a measurement",
        "all ranks, each with its device",
        cost="a slow network would not be seen",
        advice="Mend that first.",
    )


def _shared(site: Site, name: str, own: Measured) -> dict[int, Measured]:
    everybody = site.ranks.exchange(name, asdict(own))
    found = {rank: Measured(**fields) for rank, fields in answering(everybody).items()}
    silent = set(range(site.ranks.world_size)) - set(found)
    return found | {rank: Measured(error="no answer") for rank in silent}


def _place(site: Site, members: Mapping[int, Member]) -> Place:
    ranks = site.ranks
    device = members[ranks.rank].device
    backend = "nccl" if device.startswith("cuda") else "gloo"
    return Place(ranks.rank, ranks.world_size, backend, device)


def _whole(site: Site, members: Mapping[int, Member]) -> Measured:
    place = _place(site, members)
    try:
        with process_group(place, _store(site, "whole"), _limit(site)):
            sizes = MORE_SIZES if place.is_gpu else SIZES
            seconds = all_reduce_seconds(place, sizes)
    except (RuntimeError, ValueError) as error:  # torch's own derive from the first
        return Measured(error=_words(error))
    copied = 0.0 if place.is_gpu else copied_per_second()
    return Measured({str(size): value for size, value in seconds.items()}, copied)


def _by_pairs(site: Site, members: Mapping[int, Member]) -> list[Finding]:
    """Measure pairs; those that seem slow once more: other work slows them for a moment, too."""
    ranks = _chosen(members)
    pairs = [(i, j) for i in ranks for j in ranks if i < j]
    measured = _shared(
        site,
        "pairs",
        _pairs(site, members, "pairs", pairs, FEW_TIMES),
    )
    failed = _failures(measured)
    speeds = _pair_speeds(measured)
    again = slow_pairs(speeds)
    if again and not failed:
        measured = _shared(
            site,
            "pairs",
            _pairs(site, members, "again", list(again), MANY_TIMES),
        )
        failed = _failures(measured)
        for pair, speed in _pair_speeds(measured).items():
            speeds[pair] = max(speed, speeds[pair])
    if failed:
        return [dataclasses.replace(_failed(members, failed), name="pairs of ranks")]
    hosts = {rank: member.host for rank, member in members.items()}
    return [
        pair_finding(
            speeds,
            hosts,
            is_between_hosts=len(set(hosts.values())) > 1,
        )
    ]


def _failures(measured: Mapping[int, Measured]) -> dict[int, str]:
    return {rank: result.error for rank, result in measured.items() if result.error}


def _pairs(
    site: Site,
    members: Mapping[int, Member],
    name: str,
    pairs: Sequence[tuple[int, int]],
    times: int,
) -> Measured:
    place = _place(site, members)
    try:
        with process_group(place, _store(site, name), _limit(site)):
            found = pair_seconds(place, pairs, times)
    except (RuntimeError, ValueError) as error:
        return Measured(error=_words(error))
    rows = [[*ranks, *measured] for ranks, measured in found.items()]
    return Measured(pairs=rows)


def _store(site: Site, name: str) -> Store:
    assert site.ranks.store is not None  # noqa: S101 -- one rank alone measures nothing
    return PrefixStore(name, site.ranks.store)


def _limit(site: Site) -> float:
    return min(GROUP_SECONDS, site.ranks.timeout / 2)


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())


def _chosen(members: Mapping[int, Member]) -> list[int]:
    """Return the ranks whose pairs are measured: one of each host; on a single host all."""
    first: dict[str, int] = {}
    for rank, member in sorted(members.items()):
        first.setdefault(member.host, rank)
    chosen = sorted(first.values()) if len(first) > 1 else sorted(members)
    return chosen[:MOST_MEMBERS]


def _of_whole(
    site: Site,
    members: Mapping[int, Member],
    measured: Mapping[int, Measured],
) -> Iterator[Finding]:
    failed = _failures(measured)
    if failed:
        yield _failed(members, failed)
        return
    backend = _place(site, members).backend
    seconds = _slowest(measured)
    largest = max(seconds)
    world_size = len(members)
    factor = 2 * (world_size - 1) / world_size
    speeds = {size: factor * size / value for size, value in seconds.items()}
    hosts = {member.host for member in members.values()}
    expected = expected_speed(
        [member.link for member in members.values()],
        backend,
        len(hosts),
        min(answer.copied for answer in measured.values()),
    )
    share = speeds[largest] / expected.bytes_per_second
    yield Finding(
        NAME,
        OK if share >= 1 else LOOK if share >= VERY_SLOW else PROBLEM,
        f"{_speed(speeds[largest])} at {in_bytes(largest)}",
        f"at least {_speed(expected.bytes_per_second)}",
        f"{expected.source}. By {backend}, {world_size} ranks; what goes over the slowest link, "
        "as nccl-tests count it: 2 (n - 1) / n times the size",
        cost=f"{EXAMPLE_BYTES / 4e6:.0f} million float32 gradients take "
        f"{factor * EXAMPLE_BYTES / speeds[largest]:.1f} s in each step",
        advice=_advice(len(hosts), backend),
        lines=_lines(seconds, speeds),
        details={
            "backend": backend,
            "seconds": {str(size): value for size, value in seconds.items()},
            "bytes_per_second": {str(size): value for size, value in speeds.items()},
            "expected_bytes_per_second": expected.bytes_per_second,
        },
    )
    yield _latency(backend, seconds)


def _slowest(measured: Mapping[int, Measured]) -> dict[int, float]:
    """Return the best time by bytes: an all-reduce takes as long as for its slowest rank."""
    sizes = set.intersection(*(set(answer.seconds) for answer in measured.values()))
    found = {}
    for size in sorted(sizes, key=int):
        each = zip(*(answer.seconds[size] for answer in measured.values()), strict=True)
        found[int(size)] = min(map(max, each))
    return found


def _advice(hosts: int, backend: str) -> str:
    words = "Pairs of ranks stand below. "
    if hosts > 1:
        variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
        words += f"Which interface is taken ({variable})? Is the network shared, or a cable bad? "
    elif backend == "nccl":
        words += "Look at NVLink, PCIe and peers above, and at NCCL_DEBUG=INFO. "
    else:
        words += "Are there more processes than cores, or other work on this machine? "
    return words + "Meanwhile: --ddp_comm_hook=bf16, a larger --grad_accumulation_factor."


def _failed(members: Mapping[int, Member], failed: Mapping[int, str]) -> Finding:
    words = "; ".join(
        f"rank {rank} on {members[rank].host}: {error}"
        for rank, error in sorted(failed.items())[:2]
    )
    more = len(failed) - 2
    return Finding(
        NAME,
        PROBLEM,
        words + (f"; and {more} more ranks" if more > 0 else ""),
        "an average over all ranks",
        "torch.distributed.all_reduce",
        cost="no run with several processes starts",
        advice=(
            "Look at the interfaces above, at firewalls between the hosts, and at the output with "
            "NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL."
        ),
    )


def _latency(backend: str, seconds: Mapping[int, float]) -> Finding:
    smallest = min(seconds)
    limit = LATENCY_SECONDS[backend]
    return Finding(
        "latency",
        OK if seconds[smallest] <= limit else LOOK,
        f"{1000 * seconds[smallest]:.2f} ms for an all-reduce of {in_bytes(smallest)}",
        f"at most {1000 * limit:g} ms",
        f"a network within one building; {backend}",
        cost="each step has several all-reduces, and waits so long at least for each",
        advice=(
            "Are the hosts far apart, or does a tunnel lie between them? Are there more processes "
            "than cores? Larger buckets (--ddp_bucket_cap_mb) and accumulation need fewer."
        ),
    )


def _lines(
    seconds: Mapping[int, float],
    speeds: Mapping[int, float],
) -> tuple[str, ...]:
    rows = [f"{'size':>10} {'time':>12} {'bandwidth':>14}"]
    rows += [
        f"{in_bytes(size):>10} {1000 * value:>9.3f} ms {_speed(speeds[size]):>14}"
        for size, value in seconds.items()
    ]
    return tuple(rows)


def _speed(bytes_per_second: float) -> str:
    return f"{in_bytes(bytes_per_second)}/s"


def _pair_speeds(measured: Mapping[int, Measured]) -> dict[tuple[int, int], float]:
    """Return bytes per second and direction of each pair, as the slower of the two has seen it."""
    found: dict[tuple[int, int], float] = {}
    for answer in measured.values():
        for i, j, size, value in answer.pairs:
            pair = int(i), int(j)
            found[pair] = min(size / value, found.get(pair, math.inf))
    return found


def slow_pairs(speeds: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Return the pairs that are slow by the median of all.

    Args:
        speeds: bytes per second, by pair.

    Ranks: local.

    Example:
        >>> slow_pairs({(0, 1): 9e8, (0, 2): 1e9, (1, 2): 1e8})
        {(1, 2): 100000000.0}
    """
    ordered = sorted(speeds.values())
    limit = SLOW_PAIR * ordered[len(ordered) // 2] if ordered else 0.0
    return {pair: value for pair, value in speeds.items() if value < limit}


def pair_finding(
    speeds: Mapping[tuple[int, int], float],
    hosts: Mapping[int, str],
    *,
    is_between_hosts: bool,
) -> Finding:
    """Compare pairs with each other.

    Args:
        speeds: bytes per second and direction, by pair of ranks.
        hosts: of the ranks.
        is_between_hosts: whether each rank stands for its host.

    Ranks: local.
    """
    names = {rank: host if is_between_hosts else f"rank {rank}" for rank, host in hosts.items()}
    ordered = sorted(speeds.values())
    median = ordered[len(ordered) // 2]
    slow = slow_pairs(speeds)
    words = "; ".join(_slow_words(slow, speeds, names))
    return Finding(
        "pairs of hosts" if is_between_hosts else "pairs of ranks",
        PROBLEM if slow else OK,
        words or f"{_speed(ordered[0])} to {_speed(ordered[-1])}",
        f"each at least {SLOW_PAIR * 100:.0f} % of the median, {_speed(median)}",
        "both send 4 MB to each other, one pair after another",
        cost="every all-reduce is as slow as the slowest link",
        advice=(
            "Look at the cables, ports and interfaces of these two (ethtool, errors in "
            "`ip -s link`), and at the switch between them. Or leave one of them out."
        ),
        lines=_pair_lines(speeds, names),
        details={"bytes_per_second": {f"{i}-{j}": value for (i, j), value in speeds.items()}},
    )


def _slow_words(
    slow: Mapping[tuple[int, int], float],
    speeds: Mapping[tuple[int, int], float],
    names: Mapping[int, str],
) -> list[str]:
    """Name slow pairs; or a single member, if all of its pairs are slow and there are others."""
    members = sorted({rank for pair in speeds for rank in pair})
    for rank in members:
        own = [pair for pair in speeds if rank in pair]
        if len(own) > 1 and set(own) == set(slow):
            worst = min(slow.values())
            return [f"{names[rank]} with each other one: {_speed(worst)}"]
    return [f"{names[i]} and {names[j]}: {_speed(value)}" for (i, j), value in slow.items()]


def _pair_lines(
    speeds: Mapping[tuple[int, int], float],
    names: Mapping[int, str],
) -> tuple[str, ...]:
    slowest = sorted(speeds.items(), key=lambda item: item[1])
    return tuple(
        f"{names[i]:>20} - {names[j]:20} {_speed(value):>12}" for (i, j), value in slowest[:10]
    )
