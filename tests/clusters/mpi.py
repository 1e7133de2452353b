"""MPI as a launcher: Open MPI's and MPICH's ``mpirun``, on one host or on two."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from tests.launching import free_port

from .machines import Machine
from .packages import need

__all__ = ["have_mpich", "have_openmpi", "mpich", "openmpi", "openmpi_on"]

# Debian lets several MPIs live side by side under these names.
OPENMPI = "mpirun.openmpi"
MPICH = "mpirun.mpich"
PROGRAMS = {OPENMPI: "openmpi-bin", MPICH: "mpich"}


def have_openmpi() -> None:
    """See to it that Open MPI is there.

    Raises:
        CannotSetUpError: it is not, and cannot be installed.
    """
    need({OPENMPI: PROGRAMS[OPENMPI]})


def have_mpich() -> None:
    """See to it that MPICH is there.

    Raises:
        CannotSetUpError: it is not, and cannot be installed.
    """
    need({MPICH: PROGRAMS[MPICH]})


def openmpi(processes: int, *command: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command line that starts processes on this host, more than it has cores if need
    be.
    """
    return [
        OPENMPI,
        "--allow-run-as-root",
        "--oversubscribe",
        "-np",
        str(processes),
        *options,
        *command,
    ]


def mpich(processes: int, *command: str) -> list[str]:
    """Return the command line that starts processes on this host: MPICH tells ranks nothing to make
    a port from.
    """
    return [MPICH, "-genv", "MASTER_PORT", str(free_port()), "-n", str(processes), *command]


def openmpi_on(
    machines: Sequence[Machine],
    folder: Path,
    per_host: int,
    *command: str,
) -> list[str]:
    """Return the command line that starts processes on several hosts; run it on the first.

    Where ``mpirun`` would call ssh, it calls a script here that enters the other host.
    """
    agent = folder / "agent.sh"
    branches = "".join(
        f'{one.name}) exec {shlex.join(one.enter())} sh -c "$*";;\n' for one in machines
    )
    agent.write_text(f"#!/bin/sh\nhost=$1\nshift\ncase $host in\n{branches}esac\nexit 1\n")
    agent.chmod(0o755)
    hosts = ",".join(f"{one.name}:{per_host}" for one in machines)
    options = [
        "--mca",
        "plm_rsh_agent",
        str(agent),
        "--mca",
        "btl_tcp_if_include",
        "cable0",
        "--host",
        hosts,
    ]
    # The name of the head goes to all processes: Open MPI tells them ranks but no address.
    options += [
        "-x",
        f"MASTER_ADDR={machines[0].address}",
        "-x",
        "OMP_NUM_THREADS=1",
        "-x",
        "DDPKIT_TEST_RUN",
    ]
    return openmpi(per_host * len(machines), *command, options=options)
