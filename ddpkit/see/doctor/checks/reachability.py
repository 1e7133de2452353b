"""Whether the hosts reach each other at the addresses that gloo takes: each connects to the
next.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding
from ddpkit.see.doctor.gloo_address import gloo_address
from ddpkit.see.doctor.ranks import answering

CONNECT_SECONDS = 5.0
SLOW_SECONDS = 0.01
TRIES = 3


def look(site: Site) -> Iterator[Finding]:
    """Listen, and connect to the next host.

    Ranks: collective.
    """
    if not site.run.has_several_hosts:
        return
    with contextlib.ExitStack() as stack:
        own = _listen(site, stack) if site.ranks.is_first_on_host else {}
        everybody = answering(site.ranks.exchange("addresses", own))
        hosts = [rank for rank, error in sorted(everybody.items()) if error]
        if site.ranks.rank in hosts and len(hosts) > 1:
            other = hosts[(hosts.index(site.ranks.rank) + 1) % len(hosts)]
            yield _connect(everybody[other])
        site.ranks.exchange("connected", "")  # until all have, the sockets stay open


def _listen(site: Site, stack: contextlib.ExitStack) -> dict[str, Any]:
    address = gloo_address(site.machine).address
    if not address:
        return {}  # told by the check of interfaces
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = stack.enter_context(socket.socket(family))
    listener.bind((address, 0))
    listener.listen()
    return {
        "host": site.machine.name(),
        "address": address,
        "port": listener.getsockname()[1],
    }


def _connect(other: dict[str, Any]) -> Finding:
    where = f"{other['host']} at {other['address']}"
    verdict = OK
    try:
        seconds = min(_seconds_to(other["address"], other["port"]) for _ in range(TRIES))
        measured = f"{where} answers in {seconds * 1000:.2f} ms"
        if seconds > SLOW_SECONDS:
            verdict = LOOK
    except OSError as error:
        measured = f"{where} cannot be reached: {error}"
        verdict = PROBLEM
    return Finding(
        "next host",
        verdict,
        measured,
        f"an answer within {SLOW_SECONDS * 1000:.0f} ms",
        "a connection to the address at which gloo would listen there",
        cost="the ranks wait for each other when the run starts"
        if verdict == PROBLEM
        else "each step waits for several such answers",
        advice="Is it a private address there, or does a firewall close its ports? "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network.",
    )


def _seconds_to(address: str, port: int) -> float:
    began = time.perf_counter()
    with socket.create_connection((address, port), timeout=CONNECT_SECONDS):
        return time.perf_counter() - began
