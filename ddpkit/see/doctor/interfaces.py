"""The network interfaces of this machine, and which of them gloo and NCCL take."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

LOOPBACK = "lo"
#: Interfaces of containers and virtual machines: other hosts cannot be reached through them.
INNER = ("docker", "virbr", "veth", "br-", "cni", "flannel", "lxc", "vmnet", "podman")


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: such as ``"eth0"``.
        addresses: that it has, without their scope.
        is_up: whether it is in use.
        megabits: per second; 0 where it does not say.

    Example:
        >>> Interface("eth0", ("10.0.0.1",)).shown()
        'eth0 (10.0.0.1)'
    """

    name: str
    addresses: tuple[str, ...] = field(default=())
    is_up: bool = True
    megabits: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether sockets can be bound to it."""
        return self.is_up and bool(self.addresses)

    def shown(self) -> str:
        """Write its name and first address."""
        return (
            f"{self.name} ({self.addresses[0]})" if self.addresses else f"{self.name} (no address)"
        )


def interfaces_of_machine() -> list[Interface]:
    """List the interfaces of this machine."""
    import socket

    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        internet = [
            address for address in addresses if address.family in {socket.AF_INET, socket.AF_INET6}
        ]
        state = states.get(name)
        found.append(
            Interface(
                name,
                tuple(address.address.partition("%")[0] for address in internet),
                is_up=bool(state and state.isup),
                megabits=state.speed if state else 0,
            )
        )
    return found


def is_loopback(address: str) -> bool:
    """Say whether an address leads back to the same machine.

    Args:
        address: such as ``"127.0.1.1"``.

    Example:
        >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1")
        (True, True, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def having(interfaces: Iterable[Interface], address: str) -> Interface | None:
    """Return the interface that has an address; None where none has it.

    Args:
        interfaces: of the machine.
        address: without a scope.

    Example:
        >>> having([Interface("lo", ("127.0.0.1",))], "127.0.1.1").name
        'lo'
    """
    found = next((interface for interface in interfaces if address in interface.addresses), None)
    if found is None and is_loopback(address):  # all of 127.0.0.0/8 is
        return next((interface for interface in interfaces if interface.name == LOOPBACK), None)
    return found


def taken_by_nccl(interfaces: Sequence[Interface], names: str | None) -> list[Interface]:
    """Return the interfaces that NCCL takes, in order; empty where it would find none.

    Args:
        interfaces: of the machine.
        names: ``NCCL_SOCKET_IFNAME``: prefixes; ``=`` before them: whole names; ``^``: all others.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html .

    Example:
        >>> both = [Interface("lo", ("127.0.0.1",)), Interface("eth0", ("10.0.0.1",))]
        >>> [one.name for one in taken_by_nccl(both, None)], taken_by_nccl(both, "=eth")
        (['eth0'], [])
    """
    usable = [interface for interface in interfaces if interface.is_usable]
    if names:
        return [interface for interface in usable if _matches(interface.name, names)]
    for rule in ("ib", "^docker,lo,virbr", "docker", "lo"):
        found = [interface for interface in usable if _matches(interface.name, rule)]
        if found:
            return found
    return []


def _matches(name: str, rule: str) -> bool:
    is_excluding = rule.startswith("^")
    words = rule.removeprefix("^")
    is_exact = words.startswith("=")
    listed = [word for word in words.removeprefix("=").split(",") if word]
    is_named = any(name == word if is_exact else name.startswith(word) for word in listed)
    return is_named != is_excluding
