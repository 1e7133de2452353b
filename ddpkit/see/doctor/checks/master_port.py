"""Whether the port is free at which the ranks would meet."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding

VARIABLE = "MASTER_PORT"
USUAL = "29500"  # torchrun's, without --standalone
HIGHEST = 65535


def look(site: Site) -> Iterator[Finding]:
    """Bind to the port, where no launch has met at one already."""
    if site.run.launch.is_distributed:
        return  # the ranks have met there, or the finding `rendezvous` says why not
    given = site.machine.environ.get(VARIABLE)
    port = given or USUAL
    fault = _fault(port)
    where = (
        f"port {port} ({VARIABLE})"
        if given
        else f"port {port} (torchrun's, as {VARIABLE} is not set)"
    )
    yield Finding(
        "rendezvous port",
        OK if not fault else PROBLEM if given else LOOK,
        f"{where} {fault or 'is free'}",
        "a port from 1024 to 65535 that is free",
        "rank 0, or torchrun on its host, listens there",
        cost="a run with several processes does not start"
        if given
        else "torchrun without --standalone does not start",
        advice=f"export {VARIABLE}= another number, the same for all ranks; on one host: torchrun "
        "--standalone, or --nproc, which take a free one.",
    )


def _fault(port: str) -> str:
    if not port.isdecimal() or not 0 < int(port) <= HIGHEST:
        return "is no port"
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        with socket.create_server(
            ("", int(port)),
            family=family,
            dualstack_ipv6=family == socket.AF_INET6,
        ):
            return ""
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"is taken{_by(int(port))}"
        return f"cannot be taken: {error.strerror}"


def _by(port: int) -> str:
    """Say who listens at a port, where that can be seen."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            is_it = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if is_it and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass  # of another user
    return f" (ss -ltnp | grep :{port} says by whom)"
