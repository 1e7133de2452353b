"""At which address gloo listens for the other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpkit.see.doctor.interfaces import Interface, having

if TYPE_CHECKING:
    from ddpkit.see.doctor.machine import Machine

VARIABLE = "GLOO_SOCKET_IFNAME"
FALLBACK = "127.0.0.1"


@dataclass(frozen=True)
class GlooAddress:
    """The address that gloo takes, and how it comes to it.

    Attributes:
        address: empty where gloo cannot start.
        interface: that has it, if any.
        named: what ``GLOO_SOCKET_IFNAME`` says; empty where it is not set.
        resolved: what the host name stands for; empty where it stands for nothing.

    Example:
        >>> GlooAddress("10.0.0.1").named
        ''
    """

    address: str
    interface: Interface | None = None
    named: str = ""
    resolved: tuple[str, ...] = ()


def gloo_address(machine: Machine) -> GlooAddress:
    """Find the address as torch does: by the variable, else by the host name, else the loopback.

    Source:
    https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use .
    """
    interfaces = machine.interfaces()
    named = machine.environ.get(VARIABLE, "")
    try:
        resolved = tuple(machine.resolve(machine.name()))
    except OSError:
        resolved = ()
    if named:
        first = next(
            (interface for interface in interfaces if interface.name == named.split(",")[0]), None
        )
        address = first.addresses[0] if first is not None and first.is_usable else ""
        return GlooAddress(address, first, named, resolved)
    for address in resolved:
        owner = having(interfaces, address)
        if owner is not None and owner.is_up:
            return GlooAddress(address, owner, "", resolved)
    return GlooAddress(FALLBACK, having(interfaces, FALLBACK), "", resolved)
