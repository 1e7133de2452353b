"""Which interfaces gloo and NCCL take, and whether those that variables name are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding
from ddpkit.see.doctor.gloo_address import VARIABLE, gloo_address
from ddpkit.see.doctor.interfaces import INNER, LOOPBACK, Interface, taken_by_nccl

NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
SLOW_MEGABITS = 1000  # slower than this, the gradients of a small network take a second


def look(site: Site) -> Iterator[Finding]:
    """Compare what variables name with what is there."""
    interfaces = site.machine.interfaces()
    yield _of_gloo(site, interfaces)
    names = site.machine.environ.get(NCCL_VARIABLE)
    if names or site.run.device == "cuda":
        yield _of_nccl(site, interfaces, names)


def _of_gloo(site: Site, interfaces: Sequence[Interface]) -> Finding:
    found = gloo_address(site.machine)
    taken = [found.interface] if found.interface is not None else []
    wrong = _wrong_names(interfaces, found.named)
    fault = f"{VARIABLE}={found.named}: {wrong}" if wrong else ""
    return _finding(
        site,
        "interface of gloo",
        taken,
        fault or _unfit(site, taken),
        is_fatal=bool(fault) or bool(taken and _leads_nowhere(site, taken[0])),
        variable=VARIABLE,
        otherwise="it is that of the host name's address (torch, distributed)",
        failure='gloo ends with "Unable to find address"',
    )


def _of_nccl(site: Site, interfaces: Sequence[Interface], names: str | None) -> Finding:
    taken = taken_by_nccl(interfaces, names)
    fault = "" if taken else f"{NCCL_VARIABLE}={names}: none is up by this name"
    return _finding(
        site,
        "interface of NCCL",
        taken,
        fault or _unfit(site, taken),
        is_fatal=bool(fault) or _leads_nowhere(site, taken[0]),
        variable=NCCL_VARIABLE,
        otherwise="ib*, then what is neither docker* nor lo (NCCL, Environment Variables)",
        failure='NCCL ends with "Bootstrap : no socket interface found"',
    )


def _finding(  # noqa: PLR0913 -- the parts of a sentence
    site: Site,
    name: str,
    taken: Sequence[Interface],
    fault: str,
    *,
    is_fatal: bool,
    variable: str,
    otherwise: str,
    failure: str,
) -> Finding:
    interfaces = site.machine.interfaces()
    there = ", ".join(interface.name for interface in interfaces if interface.is_usable)
    return Finding(
        name,
        PROBLEM if is_fatal else LOOK if fault else OK,
        fault or ", ".join(interface.shown() for interface in taken) or "none",
        "one that is up and leads to the other hosts"
        if site.run.has_several_hosts
        else "one that is up",
        f"{variable} names it, else {otherwise}",
        cost=f"{failure}, or the ranks wait for each other",
        advice=f"unset {variable}, or give it the name of another one; up here: {there or 'none'}.",
        details={"taken": [interface.name for interface in taken]},
    )


def _wrong_names(interfaces: Sequence[Interface], named: str) -> str:
    """Say which interfaces of a list do not work: gloo wants whole names, separated by commas."""
    known = {interface.name: interface for interface in interfaces}
    for name in named.split(",") if named else []:
        if name not in known:
            return f"there is no interface {name!r}"
        if not known[name].is_up:
            return f"{name} is down"
        if not known[name].addresses:
            return f"{name} has no address"
    return ""


def _leads_nowhere(site: Site, interface: Interface) -> bool:
    return site.run.has_several_hosts and interface.name == LOOPBACK


def _unfit(site: Site, taken: Sequence[Interface]) -> str:
    """Say what is wrong with an interface that works, for several hosts; empty for one host."""
    if not (site.run.has_several_hosts and taken):
        return ""
    first = taken[0]
    if first.name == LOOPBACK:
        return f"{first.shown()}: other hosts cannot be reached through it"
    if first.name.startswith(INNER):
        return f"{first.shown()}: it leads to containers of this host, as its name says"
    if 0 < first.megabits < SLOW_MEGABITS:
        return f"{first.shown()}: {first.megabits} Mbit/s"
    return ""
