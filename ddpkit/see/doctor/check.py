"""A check: a name, a function that yields findings, and which ranks call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ddpkit.see.doctor.finding import Finding
from ddpkit.see.doctor.machine import Machine
from ddpkit.see.doctor.planned_run import PlannedRun
from ddpkit.see.doctor.ranks import Ranks

EACH_HOST = "each host"  # the first rank of each host looks
EACH_RANK = "each rank"  # every rank looks, at itself; it may exchange values
TOGETHER = (
    "together"  # every rank is there, and may exchange values; what is found is true of hosts
)


@dataclass(frozen=True)
class Site:
    """What a check gets: the machine, what would run on it, and the other ranks.

    Example:
        >>> from ddpkit.launch import LaunchInfo
        >>> Site(Machine(), PlannedRun(), Ranks(LaunchInfo())).run.device
        'cpu'
    """

    machine: Machine
    run: PlannedRun
    ranks: Ranks


@dataclass(frozen=True)
class Check:
    """One of the checks.

    Attributes:
        name: of what is looked at; stands in a finding if the check fails itself.
        look: yields findings. It may raise: that becomes a finding, too.
        who: :data:`EACH_HOST`, :data:`EACH_RANK` or :data:`TOGETHER`.

    Example:
        >>> Check("clocks", lambda site: [], TOGETHER).who
        'together'
    """

    name: str
    look: Callable[[Site], Iterable[Finding]]
    who: str = EACH_HOST
