"""Versions of what computes: they must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from ddpkit.base import spans
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.finding import OK, PROBLEM, Finding
from ddpkit.see.doctor.ranks import answering


def look(site: Site) -> Iterator[Finding]:
    """Compare the versions of all ranks.

    Ranks: collective.
    """
    everybody = answering(site.ranks.exchange("versions", site.machine.versions()))
    if not site.ranks.is_first_on_host:
        return
    names = list(dict.fromkeys(name for versions in everybody.values() for name in versions))
    groups = {name: _groups(name, everybody) for name in names}
    different = {name: by_value for name, by_value in groups.items() if len(by_value) > 1}
    if different:
        measured = "; ".join(f"{name} {_shown(by_value)}" for name, by_value in different.items())
    else:
        measured = ", ".join(f"{name} {next(iter(by_value))}" for name, by_value in groups.items())
    yield Finding(
        "versions",
        PROBLEM if different else OK,
        measured,
        "the same on all ranks",
        "ddpkit compares them when a run starts, and refuses to train with different ones",
        cost="no run starts; with other trainers results differ, or collectives hang",
        advice="Give all hosts one environment that they share, or the same image.",
        details={"versions": {str(rank): versions for rank, versions in everybody.items()}},
    )


def _groups(
    name: str,
    everybody: dict[int, dict[str, str]],
) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, versions in everybody.items():
        groups.setdefault(versions.get(name, "missing"), []).append(rank)
    return groups


def _shown(by_value: dict[str, list[int]]) -> str:
    return ", ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"
        for value, ranks in by_value.items()
    )
