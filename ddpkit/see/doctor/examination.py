"""Runs the checks on every rank and brings their findings to the main process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddpkit.see.doctor.check import EACH_HOST, EACH_RANK, Check, Site
from ddpkit.see.doctor.finding import PROBLEM, Finding, not_looked_at
from ddpkit.see.doctor.ranks import answering


@dataclass(frozen=True)
class Placed:
    """A finding, and where it was made.

    Attributes:
        finding: what was found.
        host: the name of the machine.
        rank: that made it.
        is_of_host: whether it is true of the whole host, and not of this rank alone.

    Ranks: local.

    Example:
        >>> Placed(Finding("swap", "ok", "none", "none", "a rule"), host="gpu07", rank=3).host
        'gpu07'
    """

    finding: Finding
    host: str
    rank: int
    is_of_host: bool = False


@dataclass(frozen=True)
class Examination:
    """The findings of all ranks.

    Attributes:
        placed: the findings, in the order of ranks.
        hosts: the name of the host of each rank; ``"?"`` of one that has not answered.

    Ranks: local.

    Example:
        >>> Examination((), ("gpu07", "gpu07")).world_size
        2
    """

    placed: tuple[Placed, ...]
    hosts: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.hosts)


def examine(site: Site, checks: Sequence[Check]) -> list[Placed]:
    """Run the checks of this rank, in order; one that fails itself becomes a finding.

    Args:
        site: the machine, what would run on it, and the other ranks.
        checks: in order, the same on all ranks.

    Raises:
        LaunchError: the main process does not answer.

    Ranks: collective.
    """
    found: list[Placed] = []
    host = site.machine.name()
    rank = site.ranks.rank
    for check in checks:
        if check.who != EACH_HOST or site.ranks.is_first_on_host:
            is_of_host = check.who != EACH_RANK
            found += [
                Placed(finding, host, rank, is_of_host) for finding in _findings_of(check, site)
            ]
    return found


def _findings_of(check: Check, site: Site) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(check.look(site))  # keeps what came before an error
    except Exception as error:  # noqa: BLE001 -- becomes a finding: one check never ends the others
        found.append(not_looked_at(check.name, error))
    return found


def collect(site: Site, own: Iterable[Placed]) -> Examination:
    """Bring the findings of all ranks together.

    Args:
        site: of this rank.
        own: the findings of this rank.

    Returns:
        Those of all ranks, in the order of ranks; one for each rank that does not answer.

    Raises:
        LaunchError: the main process does not answer.

    Ranks: collective.
    """
    answer = {"host": site.machine.name(), "findings": [asdict(finding) for finding in own]}
    everybody = site.ranks.exchange("findings", answer)
    answers = answering(everybody)
    placed = [_placed(fields) for answer in answers.values() for fields in answer["findings"]]
    silent = [rank for rank in range(len(everybody)) if rank not in answers]
    placed += [Placed(_silence(site), "?", rank) for rank in silent]
    hosts = [answers[rank]["host"] if rank in answers else "?" for rank in range(len(everybody))]
    return Examination(tuple(placed), tuple(hosts))


def _placed(fields: dict[str, Any]) -> Placed:
    finding = fields["finding"]
    finding["lines"] = tuple(finding["lines"])
    return Placed(
        Finding(**finding),
        fields["host"],
        fields["rank"],
        fields["is_of_host"],
    )


def _silence(site: Site) -> Finding:
    return Finding(
        "answer of the rank",
        PROBLEM,
        "none",
        f"within {site.run.timeout:g} s",
        "--timeout",
        cost="a run would wait for this rank",
        advice="Look at the output of its process: was it killed, or does it hang?",
    )
