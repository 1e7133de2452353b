"""What launchers leave in the environment: the place of a process, the table of what was found, and where to meet.

Source: as :mod:`ddpkit.launch.launchers`, which reads the variables of each launcher.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from ddpkit.base import MPI_LAUNCHERS
from ddpkit.errors import LaunchError

NO_LAUNCHER = "none"
NPROC = "DDPKIT_NPROC"  # how many ranks --nproc has torchrun start, in their environment
PARITY = "DDPKIT_PARITY"  # the folder of the parity check that this process is a rank of
LOOPBACK = "127.0.0.1"

# Ports computed from a run's id: below the ephemeral ports of the system, above most services.
FIRST_DERIVED_PORT, DERIVED_PORTS = 20000, 12000

# Variables in the table of an error: the first group always; names with one of the other prefixes if set.
_TORCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM_VARIABLES = ("JOB_ID", "STEP_", "PROCID", "LOCALID", "NODEID", "NTASKS", "GTIDS", "JOB_NODELIST")
_OTHER_VARIABLES = {
    "torchrun": ("GROUP_RANK", "TORCHELASTIC_R"),
    "ddpkit": (NPROC,),
    "Slurm": ("SLURMD_NODENAME", *(f"SLURM_{name}" for name in _SLURM_VARIABLES)),
    "MPI": (*(one.rank.removesuffix("RANK") for one in MPI_LAUNCHERS.values()), "MPI_LOCAL"),
}


@dataclass(frozen=True)
class LaunchInfo:
    """The rank of this process among the processes of the launch, and their rendezvous address.

    Args:
        launcher: ``"torchrun"`` (also by ``--nproc``), ``"slurm"``, ``"openmpi"``, ``"jsm"``, ``"pmi"``,
            ``"environment"`` (the plain variables, set by anything else) or ``"none"``.
        rank: number of this process among all, from 0.
        local_rank: number of this process on its node, from 0.
        world_size: number of processes.
        local_world_size: number of processes on this node; where the launcher does not say, ``world_size``.
        node_rank: number of this node, from 0.
        restart_count: how often torchrun has restarted the processes.
        address: host of the rendezvous; empty if not given.
        port: its port; 0 if not given.
        run_id: what all processes of this run know and no other run does, where the port was made from it; empty where
            the port was given. See :func:`derived_port`.
        agent_hosts_store: whether the launcher keeps the store that is met at; otherwise rank 0 does.
        node_ranks: the ranks on this node by their local rank, where the launcher says; otherwise empty.
        own_devices: whether the launcher shows each process accelerators of its own, numbered from 0.

    Ranks: local.

    Example:
        >>> info = LaunchInfo("torchrun", rank=3, local_rank=1, world_size=4, local_world_size=2, node_rank=1)
        >>> info.is_distributed, info.first_on_node
        (True, 2)
    """

    launcher: str = NO_LAUNCHER
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    restart_count: int = 0
    address: str = ""
    port: int = 0
    run_id: str = ""
    agent_hosts_store: bool = False
    node_ranks: tuple[int, ...] = ()
    own_devices: bool = False

    @property
    def is_distributed(self) -> bool:
        """Whether a launcher started this process, be it as the only one."""
        return self.launcher != NO_LAUNCHER

    @property
    def first_on_node(self) -> int:
        """The rank of the first process of this node."""
        return self.node_ranks[0] if self.node_ranks else self.rank - self.local_rank


def derived_port(run_id: str) -> int:
    """Make a port from what all processes of a run know.

    Args:
        run_id: the same on all of them, another in another run.

    Returns:
        A number from 20000 to 31999.

    Ranks: local.

    Example:
        >>> derived_port("slurm 77.0") == derived_port("slurm 77.0") != derived_port("slurm 77.1")
        True
    """
    digest = hashlib.blake2b(run_id.encode(), digest_size=4).digest()
    return FIRST_DERIVED_PORT + int.from_bytes(digest, "big") % DERIVED_PORTS


def rendezvous_address(environ: Mapping[str, str], address: str, run_id: str) -> dict[str, str | int]:
    """Say where the processes of a run meet: what the user gave wins over what was found out.

    Args:
        environ: the environment, with the user's ``MASTER_ADDR`` and ``MASTER_PORT``, if any.
        address: what was found out, or empty.
        run_id: what a port can be made from, or empty.

    Returns:
        ``address``, ``port`` and ``run_id`` of :class:`LaunchInfo`.

    Raises:
        LaunchError: ``MASTER_PORT`` is not a port.

    Ranks: local.

    Example:
        >>> rendezvous_address({"MASTER_PORT": "29500"}, "node1", "slurm 77.0")
        {'address': 'node1', 'port': 29500, 'run_id': ''}
    """
    address = environ.get("MASTER_ADDR") or address
    if environ.get("MASTER_PORT"):
        port = given_port(environ)
        if not port:
            raise contradiction(f"MASTER_PORT must be a port from 1 to 65535, got {environ['MASTER_PORT']!r}", environ)
        return {"address": address, "port": port, "run_id": ""}
    return {"address": address, "port": derived_port(run_id) if run_id else 0, "run_id": run_id}


def given_port(environ: Mapping[str, str]) -> int:
    """Return the user's or the agent's ``MASTER_PORT``, or 0 where it is missing or no port.

    Args:
        environ: the environment.

    Ranks: local.

    Example:
        >>> given_port({"MASTER_PORT": "29500"}), given_port({"MASTER_PORT": "x"}), given_port({})
        (29500, 0, 0)
    """
    text = environ.get("MASTER_PORT", "")
    return int(text) if text.isdecimal() and int(text) < 1 << 16 else 0


# ---------------------------------------------------------------------------------------- words and numbers


def describe_environment(environ: Mapping[str, str]) -> str:
    """Tabulate the launchers' variables that were found, and torch's own that were not.

    Args:
        environ: the environment.

    Returns:
        Lines of name, value and the launcher that uses it.

    Ranks: local.

    Example:
        >>> print(describe_environment({"RANK": "0"}).splitlines()[1])
          RANK                        '0'           torch
    """
    rows = [(name, _shown(environ, name), "torch") for name in _TORCH_VARIABLES]
    for launcher, beginnings in _OTHER_VARIABLES.items():
        rows += [(name, _shown(environ, name), launcher) for name in sorted(environ) if name.startswith(beginnings)]
    header = f"  {'variable':<27} {'found':<13} used by"
    return "\n".join([header, *(f"  {name:<27} {value:<13} {who}" for name, value, who in rows)])


def contradiction(reason: str, environ: Mapping[str, str]) -> LaunchError:
    """Make the error for an environment that contradicts itself.

    Args:
        reason: what contradicts what.
        environ: the environment, for the table.

    Ranks: local.

    Example:
        >>> str(contradiction("RANK=3 is not below WORLD_SIZE=2", {})).splitlines()[0]
        "RANK=3 is not below WORLD_SIZE=2: the launcher's environment contradicts itself."
    """
    return LaunchError(
        f"{reason}: the launcher's environment contradicts itself.\n{describe_environment(environ)}\n"
        "Several processes: torchrun --standalone --nproc_per_node=N train.py hparams.yaml\n"
        "(or give each process RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, numbered from 0).\n"
        "One process: unset RANK LOCAL_RANK WORLD_SIZE, then python train.py hparams.yaml"
    )


def count(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read a whole number that is not negative.

    Args:
        environ: the environment.
        name: the variable.
        default: what a missing variable means; None if it must be there.

    Raises:
        LaunchError: it is missing, or no such number.

    Ranks: local.

    Example:
        >>> count({"RANK": "3"}, "RANK"), count({}, "GROUP_RANK", 0)
        (3, 0)
    """
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise contradiction(f"{name} is not set", environ)
    try:
        value = int(text)
    except ValueError:
        raise contradiction(f"{name}={text!r} is not a whole number", environ) from None
    if value < 0:
        raise contradiction(f"{name}={value} is negative", environ)
    return value


def check_places(environ: Mapping[str, str], places: Mapping[str, int]) -> None:
    """Check the place of a process against the number of processes, in the run and on its node.

    Args:
        environ: the environment, for the table.
        places: by what it is called: the rank, the number of processes, the rank on the node, their number on the node.

    Raises:
        LaunchError: they contradict each other.

    Ranks: local.

    Example:
        >>> check_places({}, {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1})
    """
    rank, size, local_rank, local_size = places
    for small, large in ((rank, size), (local_rank, local_size)):
        if places[small] >= places[large]:
            raise contradiction(f"{small}={places[small]} is not below {large}={places[large]}", environ)
    if places[local_size] > places[size]:
        raise contradiction(f"{local_size}={places[local_size]} is above {size}={places[size]}", environ)


def _shown(environ: Mapping[str, str], name: str) -> str:
    return repr(environ[name]) if name in environ else "not set"
