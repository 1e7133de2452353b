"""Which launcher started this process, and as which rank: read from the environment, never guessed.

One small function per launcher, which returns None where its variables are not there.
:func:`find_launch` asks them in the order of :data:`LAUNCHERS`. A launcher that starts inside
another one (torchrun in a step of Slurm) comes first, and two that say different things about the
same processes are refused: N processes that each believe to be alone would train N models into one
folder.

Source: the variables of torchrun, https://docs.pytorch.org/docs/stable/elastic/run.html ; of Slurm,
https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES ; of Open MPI,
https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html ; MPICH's Hydra was inspected
(version 4.0.2), as were Open MPI's variables that are equal on all ranks (4.1.4); of jsrun,
https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=SSWRJV_10.1.0/jsm/jsrun.htm .
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddpkit.base import (
    MPI_LAUNCHERS,
    get_rank,
    get_world_size,
    in_slurm_step,
    is_distributed_initialized,
    size,
)
from ddpkit.errors import LaunchError
from ddpkit.launch.launcher_variables import NOTEBOOK, PARITY, SHOWN, TORCH
from ddpkit.launch.platforms import Node, numbers_nodes, refuse_numbers_of_nodes

NO_LAUNCHER = "none"
NOTEBOOK_LAUNCH = "notebook_launch"
LOOPBACK = "127.0.0.1"

# Ports computed from a run's id: below the ephemeral ports of the system, above most services.
FIRST_DERIVED_PORT = 20000
DERIVED_PORTS = 12000

# Whoever sets one of these starts ranks of its own inside the tasks of another launcher.
_STARTS_RANKS_INSIDE = ("TORCHELASTIC_RUN_ID", "RAY_JOB_ID", "CROSS_SIZE")

_GPUS_PER_TASK = ("per_task", "single", "map_gpu", "mask_gpu")


@dataclass(frozen=True)
class LaunchInfo:
    """The rank of this process among the processes of the launch, and their rendezvous address.

    Args:
        launcher: ``"torchrun"`` (also by ``--nproc``), ``"slurm"``, ``"openmpi"``, ``"jsm"``,
            ``"pmi"``, ``"notebook_launch"``, ``"environment"`` (the plain variables, set by
            anything else) or ``"none"``.
        rank: number of this process among all, from 0.
        local_rank: number of this process on its node, from 0.
        world_size: number of processes.
        local_world_size: number of processes on this node; where the launcher does not say,
            ``world_size``, until the ranks have met and told each other.
        node_rank: number of this node, from 0.
        restart_count: how often torchrun has restarted the processes.
        address: host of the rendezvous; empty if not given.
        port: its port; 0 if not given.
        run_id: what all processes of this run know and no other run does, where the port was made
            from it; empty where the port was given. See :func:`derived_port`.
        agent_hosts_store: whether the launcher keeps the store that is met at; otherwise rank 0
            does.
        node_ranks: the ranks on this node by their local rank, where the launcher says; otherwise
            empty.
        own_devices: whether the launcher shows each process accelerators of its own, numbered
            from 0.

    Example:
        >>> info = LaunchInfo(
        ...     "torchrun", rank=3, local_rank=1, world_size=4, local_world_size=2, node_rank=1
        ... )
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

    Example:
        >>> derived_port("slurm 77.0") == derived_port("slurm 77.0") != derived_port("slurm 77.1")
        True
    """
    digest = hashlib.blake2b(run_id.encode(), digest_size=4).digest()
    return FIRST_DERIVED_PORT + int.from_bytes(digest, "big") % DERIVED_PORTS


def rendezvous_address(
    environ: Mapping[str, str],
    address: str,
    run_id: str,
) -> dict[str, str | int]:
    """Say where the processes of a run meet: what the user gave wins over what was found out.

    Args:
        environ: the environment, with the user's ``MASTER_ADDR`` and ``MASTER_PORT``, if any.
        address: what was found out, or empty.
        run_id: what a port can be made from, or empty.

    Returns:
        ``address``, ``port`` and ``run_id`` of :class:`LaunchInfo`.

    Raises:
        LaunchError: ``MASTER_PORT`` is not a port.

    Example:
        >>> rendezvous_address({"MASTER_PORT": "29500"}, "node1", "slurm 77.0")
        {'address': 'node1', 'port': 29500, 'run_id': ''}
    """
    address = given_address(environ) or address
    if environ.get("MASTER_PORT"):
        port = given_port(environ)
        if not port:
            raise contradiction(
                f"MASTER_PORT must be a port from 1 to 65535, got {environ['MASTER_PORT']!r}",
                environ,
            )
        return {"address": address, "port": port, "run_id": ""}
    return {
        "address": address,
        "port": derived_port(run_id) if run_id else 0,
        "run_id": run_id,
    }


def given_port(environ: Mapping[str, str]) -> int:
    """Return the user's or the agent's ``MASTER_PORT``, or 0 where it is missing or no port.

    Args:
        environ: the environment.

    Example:
        >>> given_port({"MASTER_PORT": "29500"}), given_port({"MASTER_PORT": "x"}), given_port({})
        (29500, 0, 0)
    """
    text = environ.get("MASTER_PORT", "")
    return int(text) if text.isdecimal() and int(text) < 1 << 16 else 0


def given_address(environ: Mapping[str, str]) -> str:
    """Return the user's or the agent's ``MASTER_ADDR``, or an empty string where it is missing.

    Args:
        environ: the environment.

    Returns:
        The address; that of IPv6 without brackets, which are for an address with a port.

    Example:
        >>> given_address({"MASTER_ADDR": "[::1]"}), given_address({"MASTER_ADDR": " "})
        ('::1', '')
    """
    address = environ.get("MASTER_ADDR", "").strip()
    is_in_brackets = address.startswith("[") and address.endswith("]")
    return address[1:-1] if is_in_brackets else address


# -------------------------------------------------------------------------------- words and numbers


def describe_environment(environ: Mapping[str, str]) -> str:
    """List the launchers' variables that were found, and torch's own that were not.

    Args:
        environ: the environment.

    Returns:
        Lines of names and values.

    Example:
        >>> print(describe_environment({"RANK": "0"}).splitlines()[0])
          RANK='0'
    """
    others = sorted(name for name in environ if name.startswith(SHOWN))
    missing = [f"  {name} is not set" for name in TORCH if name not in environ]
    found = [f"  {name}={environ[name]!r}" for name in (*TORCH, *others) if name in environ]
    return "\n".join(found + missing)


def contradiction(reason: str, environ: Mapping[str, str]) -> LaunchError:
    """Make the error for an environment that contradicts itself.

    Args:
        reason: what contradicts what.
        environ: the environment, for the table.

    Example:
        >>> str(contradiction("RANK=3 is not below WORLD_SIZE=2", {})).splitlines()[0]
        "RANK=3 is not below WORLD_SIZE=2: the launcher's environment contradicts itself."
    """
    return LaunchError(
        f"{reason}: the launcher's environment contradicts "
        f"itself.\n{describe_environment(environ)}\n"
        "Several processes: torchrun --standalone --nproc_per_node=N train.py hparams.yaml\n"
        "(or give each process RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
        "numbered from 0).\n"
        "One process: unset RANK LOCAL_RANK WORLD_SIZE, then python train.py hparams.yaml"
    )


def count(
    environ: Mapping[str, str],
    name: str,
    default: int | None = None,
) -> int:
    """Read a whole number that is not negative.

    Args:
        environ: the environment.
        name: the variable.
        default: what a missing variable means; None if it must be there.

    Raises:
        LaunchError: it is missing, or no such number.

    Example:
        >>> count({"RANK": "3"}, "RANK"), count({}, "GROUP_RANK", 0)
        (3, 0)
    """
    if name not in environ and default is not None:
        return default
    if name not in environ:
        raise contradiction(f"{name} is not set", environ)
    if not environ[name].isdecimal():
        raise contradiction(f"{name}={environ[name]!r} is not a whole number from 0 on", environ)
    return int(environ[name])


def checked_places(
    environ: Mapping[str, str],
    places: Mapping[str, int],
) -> dict[str, Any]:
    """Check the place of a process against the number of processes, in the run and on its node.

    Args:
        environ: the environment, for the table.
        places: by what it is called: the rank, the number of processes, the rank on the node, their
            number on the node.

    Returns:
        These by their names in :class:`LaunchInfo`.

    Raises:
        LaunchError: they contradict each other.

    Example:
        >>> checked_places({}, {"SLURM_PROCID": 1, "tasks": 2, "SLURM_LOCALID": 0, "tasks here": 1})
        {'rank': 1, 'world_size': 2, 'local_rank': 0, 'local_world_size': 1}
    """
    rank, size, local_rank, local_size = places
    for small, large in ((rank, size), (local_rank, local_size)):
        if places[small] >= places[large]:
            raise contradiction(
                f"{small}={places[small]} is not below {large}={places[large]}",
                environ,
            )
    if places[local_size] > places[size]:
        raise contradiction(
            f"{local_size}={places[local_size]} is above {size}={places[size]}",
            environ,
        )
    return dict(
        zip(
            ("rank", "world_size", "local_rank", "local_world_size"),
            places.values(),
            strict=True,
        )
    )


# -------------------------------------------------------------------------------------- torch's own


def _from_torch_variables(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Read ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``: of torchrun, Ray, or set by hand."""
    if "RANK" not in environ and "LOCAL_RANK" not in environ:
        return None
    node = numbers_nodes(environ)
    if node is not None and (
        not node.several or _is_rank_of_outer(environ) or _is_rank_of_group(environ)
    ):
        return None  # no launcher of torch's: it is the only one, a task, or a rank of a script's
    if node is not None:
        raise refuse_numbers_of_nodes(node)
    rank, local_rank, world_size = (
        count(environ, name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    local_world_size = count(environ, "LOCAL_WORLD_SIZE", world_size)
    named = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
    }
    place = checked_places(environ, named)
    node_rank = count(environ, "NODE_RANK", (rank - local_rank) // local_world_size)
    return LaunchInfo(
        launcher=_name_of_torchs(environ),
        **place,
        node_rank=count(environ, "GROUP_RANK", node_rank),
        restart_count=count(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        address=given_address(environ),
        port=given_port(environ),
        agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        own_devices=PARITY in environ,  # these ranks share a GPU where there are not enough
    )


def _name_of_torchs(environ: Mapping[str, str]) -> str:
    """Name the launcher that has set torch's own variables."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    return NOTEBOOK_LAUNCH if NOTEBOOK in environ else "environment"


# -------------------------------------------------------------------------------------------- Slurm


def _from_slurm(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Read the variables of one task of an ``srun`` with several. The rendezvous is on the first
    host of the step.

    A batch script, a ``salloc`` shell and ``srun --pty bash`` with one task do not count: Slurm
    gives them a ``SLURM_PROCID`` or a ``SLURM_NTASKS`` too, but a wait for other tasks would never
    end.
    """
    if not in_slurm_step(environ):
        return None
    tasks = size(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    rank = count(environ, "SLURM_PROCID")
    local_rank = count(environ, "SLURM_LOCALID")
    node_ranks = _ranks_on_node(environ)
    on_node = len(node_ranks)
    sizes = {
        "the number of tasks": tasks,
        "SLURM_LOCALID": local_rank,
        ("the number of tasks on this node"): on_node,
    }
    place = checked_places(environ, {"SLURM_PROCID": rank, **sizes})
    if node_ranks[local_rank] != rank:
        reason = (
            f"SLURM_PROCID={rank}, but SLURM_GTIDS has {node_ranks[local_rank]} for "
            f"SLURM_LOCALID={local_rank}"
        )
        raise contradiction(reason, environ)
    job = ".".join(
        environ.get(f"SLURM_{name}", "") for name in ("CLUSTER_NAME", "JOB_ID", "STEP_ID")
    )
    run_id = f"slurm {job} {environ.get('SLURM_RESTART_COUNT', '0')}"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    address = given_address(environ) or (LOOPBACK if tasks == on_node else _first_host(nodes))
    place |= rendezvous_address(environ, address, run_id)
    binding = environ.get("SLURM_GPU_BIND", "")
    per_task = environ.get("SLURM_GPUS_PER_TASK") or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    return LaunchInfo(
        launcher="slurm",
        node_rank=count(environ, "SLURM_NODEID", 0),
        node_ranks=node_ranks,
        own_devices=bool(per_task) or any(word in binding for word in _GPUS_PER_TASK),
        **place,
    )


def _ranks_on_node(environ: Mapping[str, str]) -> tuple[int, ...]:
    text = environ.get("SLURM_GTIDS", "")
    if re.fullmatch(r"\d+(,\d+)*", text) is None:
        raise contradiction(
            f"SLURM_GTIDS={text!r} is not a list of the ranks on this node, such as 0,1,2,3",
            environ,
        )
    return tuple(map(int, text.split(",")))


def _first_host(text: str) -> str:
    """Return the first host of a list such as ``"gpu[07-08,11],cpu-a[1-2]"``; scontrol is missing
    in containers.
    """
    name = re.match(r"(?:[^][,]|\[\d+[-,\d]*\])+", text)
    rest = text[name.end() :] if name else text
    if name is None or not (rest == "" or rest.startswith(",")):
        raise LaunchError(
            f"cannot read the Slurm host list {text!r}. Set MASTER_ADDR to the host of task 0, "
            "such as: "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        )
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", name[0])


# ---------------------------------------------------------------------------------------------- MPI


def _from_mpi(name: str, environ: Mapping[str, str]) -> LaunchInfo | None:
    """Read the variables of one of several processes that an MPI launcher has started.

    On one node they meet at a port that is made from what all of them share. Over several nodes no
    MPI launcher says where rank 0 is: then ``MASTER_ADDR`` must be given.
    """
    launcher = MPI_LAUNCHERS[name]
    # else it may be a step of Slurm with a PMI
    is_own = any(name in environ for name in launcher.local_rank)
    several = launcher.rank in environ and size(environ, launcher.world_size) > 1
    if not several or (in_slurm_step(environ) and not is_own):
        return None
    rank = count(environ, launcher.rank)
    world_size = count(environ, launcher.world_size)
    local_name, size_name = (
        next((name for name in names if name in environ), names[0])
        for names in (launcher.local_rank, launcher.local_world_size)
    )
    local_rank = count(environ, local_name)
    on_node = count(environ, size_name)
    named = {
        launcher.rank: rank,
        launcher.world_size: world_size,
        local_name: local_rank,
        size_name: on_node,
    }
    place = checked_places(environ, named)
    one_node = on_node == world_size
    if not one_node and (rank - local_rank) % on_node:
        reason = (
            f"rank {rank} is number {local_rank} of {on_node} on its node, but ranks are to be "
            "counted node by node"
        )
        raise contradiction(
            f"{reason}, the same number on each (as mpirun --map-by slot does)",
            environ,
        )
    shared = " ".join(environ[name] for name in launcher.shared if environ.get(name))
    run_id = f"{name} {shared}" if shared else ""
    place |= rendezvous_address(environ, LOOPBACK if one_node else "", run_id)
    return LaunchInfo(
        launcher=name,
        node_rank=(rank - local_rank) // on_node,
        own_devices=name == "jsm",  # jsrun shows each rank the GPUs of its resource set alone
        **place,
    )


#: The launchers, in the order in which they are asked: mpirun starts its helpers with srun. To
#: support one that is unlike MPI's, write a function and put it after torch's own. Then add its
#: rank to :func:`ddpkit.base.rank.rank_if_known`, which reads it before the group is there, and its
#: variables to ``launch/launcher_variables.py``: what errors show, and what a program that a rank
#: starts must not inherit.
LAUNCHERS: tuple[Callable[[Mapping[str, str]], LaunchInfo | None], ...] = (
    _from_torch_variables,
    *(functools.partial(_from_mpi, name) for name in MPI_LAUNCHERS),
    _from_slurm,
)


def find_launch(environ: Mapping[str, str] | None = None) -> LaunchInfo:
    """Find out which launcher started this process, and as which rank.

    Args:
        environ: the environment to read; None reads ``os.environ`` at the time of the call.

    Returns:
        The place of this process; rank 0 of 1 without a launcher, or with a launcher other than
        torch's that started a single process.

    Raises:
        LaunchError: the variables contradict each other. The message shows what was found and what
            to run.

    Example:
        >>> find_launch({}).is_distributed
        False
        >>> find_launch({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}).rank
        1
        >>> find_launch({"LOCAL_RANK": "0"})
        Traceback (most recent call last):
        ddpkit.errors.LaunchError: RANK is not set...
    """
    environ = os.environ if environ is None else environ
    info = next(filter(None, (read(environ) for read in LAUNCHERS)), LaunchInfo())
    if info.launcher == "environment" and not any(name in environ for name in _STARTS_RANKS_INSIDE):
        _check_outer(info, environ)
    return info


def _outer_launch(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Return what launchers other than torch's say of this process, if one started it."""
    return next(filter(None, (read(environ) for read in LAUNCHERS[1:])), None)


def _is_rank_of_outer(environ: Mapping[str, str]) -> bool:
    """Say whether ``RANK`` and ``WORLD_SIZE`` alone are those that Slurm or MPI tells, as a job
    script exports them.
    """
    other = _outer_launch(environ)
    told = (environ["RANK"], environ.get("WORLD_SIZE"))
    return other is not None and told == (str(other.rank), str(other.world_size))


def _is_rank_of_group(environ: Mapping[str, str]) -> bool:
    """Say whether ``RANK`` is that of this process in a process group that a script has made, as
    after ``mp.spawn``: then it numbers no node.
    """
    if not is_distributed_initialized():
        return False
    told = (environ["RANK"], environ.get("WORLD_SIZE"))
    return told == (str(get_rank()), str(get_world_size()))


def node_by_rank(environ: Mapping[str, str]) -> Node | None:
    """Return the node that ``RANK`` and ``WORLD_SIZE`` number; None where they number processes.

    Args:
        environ: the environment.

    Example:
        >>> node_by_rank({"RANK": "1", "WORLD_SIZE": "2"}).place
        'node 1 of 2'
    """
    node = numbers_nodes(environ)
    return None if node is None or _is_rank_of_outer(environ) else node


def _check_outer(info: LaunchInfo, environ: Mapping[str, str]) -> None:
    """Compare ``RANK`` with what the launcher around it says, if it may have come from there.

    More processes than the other launcher started are right: something starts several in each task.
    """
    other = _outer_launch(environ)
    if other is None or info.world_size > other.world_size:
        return
    if info.world_size < other.world_size or info.rank != other.rank:
        raise contradiction(
            f"RANK={info.rank} of WORLD_SIZE={info.world_size}, but {other.launcher} started this "
            f"process as number {other.rank} of {other.world_size} (unset RANK LOCAL_RANK "
            f"WORLD_SIZE to follow {other.launcher})",
            environ,
        )
