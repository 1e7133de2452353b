"""How far the clocks of hosts are apart. Each is asked several times over the store, and the
shortest round trip counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding
from ddpkit.see.doctor.ranks import answering

TRIES = 5
SECONDS = 10.0  # for one answer
FEW_SECONDS = 1.0
MANY_SECONDS = 60.0


def look(site: Site) -> Iterator[Finding]:
    """Compare the clock of each host with the main process's, one host after the other.

    Source: Cristian's algorithm, https://doi.org/10.1007/BF01784024 .

    Ranks: collective.
    """
    if not site.run.has_several_hosts or site.ranks.store is None:
        return
    asking = site.ranks.is_first_on_host and not site.ranks.is_main
    askers = answering(site.ranks.exchange("clocks", asking or None))
    store = PrefixStore("clocks", site.ranks.store)
    if site.ranks.is_main:
        for rank in askers:
            _answer(site, store, rank)
    elif asking:
        yield _finding(*_offset(site, store))


def _answer(site: Site, store: Store, rank: int) -> None:
    for number in range(TRIES):
        store.wait([f"{rank}/{number}/asked"], timedelta(seconds=SECONDS))
        store.set(f"{rank}/{number}/clock", repr(site.machine.clock()))


def _offset(site: Site, store: Store) -> tuple[float, float]:
    """Return by how many seconds this clock is ahead, and how exactly that is known."""
    rank = site.ranks.rank
    tries = []
    # the main process answers one host after the other
    patience = timedelta(seconds=SECONDS + TRIES * SECONDS * rank)
    for number in range(TRIES):
        began = site.machine.clock()
        store.set(f"{rank}/{number}/asked", "1")
        store.wait([f"{rank}/{number}/clock"], patience)
        ended = site.machine.clock()
        main = float(store.get(f"{rank}/{number}/clock"))
        tries.append((ended - began, (began + ended) / 2 - main))
    round_trip, ahead = min(tries)
    return ahead, round_trip / 2


def _finding(ahead: float, error: float) -> Finding:
    apart = abs(ahead)
    verdict = OK if apart <= FEW_SECONDS + error else LOOK if apart <= MANY_SECONDS else PROBLEM
    return Finding(
        "clock",
        verdict,
        f"{ahead:+.3f} s against rank 0 (to within {error:.3f} s)",
        f"within {FEW_SECONDS:g} s",
        "the clock of rank 0, by round trips over the store",
        cost="times in logs of different hosts cannot be compared; make, NFS and tokens go by the "
        "clock",
        advice="Start chrony or systemd-timesyncd on this host (timedatectl says what runs).",
        details={"ahead": ahead, "error": error},
    )
