"""What the name of this host stands for: without ``GLOO_SOCKET_IFNAME`` gloo listens there."""

from __future__ import annotations

from collections.abc import Iterator

from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding
from ddpkit.see.doctor.gloo_address import VARIABLE, GlooAddress, gloo_address
from ddpkit.see.doctor.interfaces import having, is_loopback


def look(site: Site) -> Iterator[Finding]:
    """Resolve the host name as gloo does."""
    name = site.machine.name()
    found = gloo_address(site.machine)
    fault = _fault(site, found)
    verdict = OK
    if fault and not found.named:
        verdict = PROBLEM if site.run.has_several_hosts else LOOK
    addresses = ", ".join(found.resolved) or "nothing"
    yield Finding(
        "host name",
        verdict,
        f"{name} is {addresses}{fault}",
        "an address of this host that others can reach",
        f"gloo listens at the address of the host name, unless {VARIABLE} is set "
        "(docs.pytorch.org/docs/stable/distributed.html)",
        cost="the ranks of several hosts do not find each other, and wait; nothing on one host "
        "alone",
        advice="Put the address of this host beside its name into /etc/hosts, or export "
        f"{VARIABLE} (ip -brief address lists them).",
    )


def _fault(site: Site, found: GlooAddress) -> str:
    if not found.resolved:
        return ": the name has no address; gloo takes the loopback"
    if is_loopback(found.resolved[0]):
        return ", the loopback"
    interfaces = site.machine.interfaces()
    if not any(having(interfaces, address) for address in found.resolved):
        return ", which no interface of this host has; gloo takes the loopback"
    return ""
