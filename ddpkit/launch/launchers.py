"""Which launcher started this process, and as which rank: read from the environment, never guessed.

One small class per launcher. :func:`find_launch` asks them in the order of :data:`LAUNCHERS`; the first that
finds its own variables answers. A launcher that starts inside another one (torchrun in a step of Slurm) comes first,
and two that say different things about the same processes are refused: N processes that each believe to be alone would
train N models into one folder.

Source: the variables of torchrun, https://docs.pytorch.org/docs/stable/elastic/run.html ;
of Slurm, https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES ;
of Open MPI, https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html ;
those of MPICH's Hydra were looked at (version 4.0.2), as were Open MPI's that are the same on all ranks (4.1.4);
of jsrun, https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=SSWRJV_10.1.0/jsm/jsrun.htm .
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ddpkit.base.rank import in_slurm_step, size
from ddpkit.launch.host_lists import expand_counts, expand_host_list
from ddpkit.launch.variables import (
    LOOPBACK,
    NO_LAUNCHER,
    PARITY,
    SPAWNED_BY,
    LaunchInfo,
    check_below,
    contradiction,
    count,
    given_port,
    meeting_place,
)

__all__ = [
    "LAUNCHERS",
    "NO_LAUNCHER",
    "Launcher",
    "MpiVariables",
    "SlurmStep",
    "TorchVariables",
    "find_launch",
]

# Whoever sets one of these starts ranks of its own inside the tasks of another launcher.
_STARTS_RANKS_INSIDE = ("TORCHELASTIC_RUN_ID", SPAWNED_BY, "RAY_JOB_ID", "CROSS_SIZE")

_GPUS_PER_TASK = ("per_task", "single", "map_gpu", "mask_gpu")


class Launcher(Protocol):
    """What one launcher's class offers; add a class and put it into :data:`LAUNCHERS` to support another.

    Ranks: local.

    Example:
        >>> {launcher.started({}) for launcher in LAUNCHERS}
        {False}
    """

    def started(self, environ: Mapping[str, str]) -> bool:
        """Say whether this launcher's variables are there."""
        ...

    def read(self, environ: Mapping[str, str]) -> LaunchInfo:
        """Return the place of this process, or raise :class:`~ddpkit.errors.LaunchError`."""
        ...


class TorchVariables:
    """``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``: torchrun, torch.distributed.launch, ddpkit, Ray, or set by hand.

    Ranks: local.

    Example:
        >>> environ = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
        >>> TorchVariables().read(environ).world_size
        2
    """

    def started(self, environ: Mapping[str, str]) -> bool:
        """Say whether a rank is set."""
        return "RANK" in environ or "LOCAL_RANK" in environ

    def read(self, environ: Mapping[str, str]) -> LaunchInfo:
        """Read and check the variables.

        Args:
            environ: the environment.

        Returns:
            The place of this process.

        Raises:
            LaunchError: a variable is missing, is no whole number, or contradicts another.

        Ranks: local.
        """
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            if name not in environ:
                there = " and ".join(n for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if n in environ)
                verb = "are" if " and " in there else "is"
                raise contradiction(f"{there} {verb} set, but {name} is not", environ)
        rank, local_rank, world_size = (count(environ, n) for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        local_world_size = count(environ, "LOCAL_WORLD_SIZE", world_size)
        check_below(
            environ,
            ("RANK", rank, "WORLD_SIZE", world_size),
            ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size),
            ("LOCAL_RANK", local_rank, "WORLD_SIZE", world_size),
        )
        if local_world_size > world_size:
            reason = f"LOCAL_WORLD_SIZE={local_world_size} is above WORLD_SIZE={world_size}"
            raise contradiction(reason, environ)
        node_rank = count(environ, "NODE_RANK", (rank - local_rank) // local_world_size)
        return LaunchInfo(
            launcher=self._name(environ),
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            node_rank=count(environ, "GROUP_RANK", node_rank),
            restart_count=count(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            address=environ.get("MASTER_ADDR", ""),
            port=given_port(environ),
            agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            own_devices=PARITY in environ,  # these ranks share a GPU where there are not enough
        )

    @staticmethod
    def _name(environ: Mapping[str, str]) -> str:
        if "TORCHELASTIC_RUN_ID" in environ:
            return "torchrun"
        return "spawn" if SPAWNED_BY in environ else "environment"


class SlurmStep:
    """Several tasks of one ``srun``. They meet at the first host of the step.

    A batch script, a ``salloc`` shell and ``srun --pty bash`` with one task are no such step: Slurm gives them a
    ``SLURM_PROCID`` or a ``SLURM_NTASKS`` too, and other tasks would be waited for in vain.

    Ranks: local.

    Example:
        >>> SlurmStep().started({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"})  # the batch script itself
        False
        >>> step = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
        ...         "SLURM_NODEID": "1", "SLURM_GTIDS": "2,3", "SLURM_STEP_NUM_TASKS": "4",
        ...         "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]"}
        >>> info = SlurmStep().read(step)
        >>> info.rank, info.local_rank, info.node_rank, info.address
        (3, 1, 1, 'gpu07')
    """

    def started(self, environ: Mapping[str, str]) -> bool:
        """Say whether this process is one of several tasks of a step."""
        return in_slurm_step(environ)

    def read(self, environ: Mapping[str, str]) -> LaunchInfo:
        """Read and check the variables of the step.

        Args:
            environ: the environment.

        Returns:
            The place of this process.

        Raises:
            LaunchError: a variable is missing, is no whole number, or contradicts another.

        Ranks: local.
        """
        tasks = self._tasks(environ)
        rank, local_rank = count(environ, "SLURM_PROCID"), count(environ, "SLURM_LOCALID")
        node_ranks = tuple(expand_counts(environ["SLURM_GTIDS"])) if environ.get("SLURM_GTIDS") else ()
        node_rank = count(environ, "SLURM_NODEID", 0)
        on_node = len(node_ranks) or self._tasks_on_node(environ, node_rank, tasks)
        check_below(
            environ,
            ("SLURM_PROCID", rank, "the number of tasks", tasks),
            ("SLURM_LOCALID", local_rank, "the number of tasks on this node", on_node),
        )
        if node_ranks and node_ranks[local_rank] != rank:
            reason = f"SLURM_PROCID={rank}, but SLURM_GTIDS has {node_ranks[local_rank]} for SLURM_LOCALID={local_rank}"
            raise contradiction(reason, environ)
        job = ".".join(environ.get(f"SLURM_{name}", "") for name in ("CLUSTER_NAME", "JOB_ID", "STEP_ID"))
        run_id = f"slurm {job} {environ.get('SLURM_RESTART_COUNT', '0')}"
        place: dict[str, Any] = meeting_place(environ, self._address(environ, rank, tasks == on_node), run_id)
        return LaunchInfo(
            launcher="slurm",
            rank=rank,
            local_rank=local_rank,
            world_size=tasks,
            local_world_size=on_node,
            node_rank=node_rank,
            node_ranks=node_ranks,
            own_devices=self._own_devices(environ),
            **place,
        )

    @staticmethod
    def _tasks(environ: Mapping[str, str]) -> int:
        return size(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

    @staticmethod
    def _tasks_on_node(environ: Mapping[str, str], node_rank: int, tasks: int) -> int:
        nodes = max(1, size(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES"))
        text = environ.get("SLURM_STEP_TASKS_PER_NODE")
        counts = expand_counts(text) if text else [tasks // nodes] * nodes
        if sum(counts) != tasks or node_rank >= len(counts):
            raise contradiction(f"neither SLURM_GTIDS nor SLURM_STEP_TASKS_PER_NODE={text!r} tells this node", environ)
        return counts[node_rank]

    @staticmethod
    def _address(environ: Mapping[str, str], rank: int, one_node: bool) -> str:
        """Return the host of task 0."""
        given = environ.get("MASTER_ADDR")
        if given or one_node:
            return given or LOOPBACK
        text = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        first = expand_host_list(text)[0]
        here = environ.get("SLURMD_NODENAME", first)
        if rank == 0 and here != first:
            reason = f"task 0 runs on {here!r}, which is not the first host of the step ({text!r}); give MASTER_ADDR"
            raise contradiction(reason, environ)
        return first

    @staticmethod
    def _own_devices(environ: Mapping[str, str]) -> bool:
        binding = environ.get("SLURM_GPU_BIND", "")
        per_task = environ.get("SLURM_GPUS_PER_TASK") or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
        return bool(per_task) or any(word in binding for word in _GPUS_PER_TASK)


@dataclass(frozen=True)
class MpiVariables:
    """Several processes that an MPI launcher started: its names for rank and sizes.

    On one node they meet at a port that is made from what all of them share. Over several nodes no MPI launcher says
    where rank 0 is: then ``MASTER_ADDR`` must be given.

    Args:
        name: of the launcher.
        rank: the variable that holds the rank.
        world_size: the one that holds the number of processes.
        local_rank: those that may hold the number on the node, the best first.
        local_world_size: likewise for the number of processes on the node.
        shared: variables that together are the same on all ranks of a run, and others in another run.

    Ranks: local.

    Example:
        >>> OPEN_MPI.started({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"})
        False
    """

    name: str
    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    shared: tuple[str, ...]

    def started(self, environ: Mapping[str, str]) -> bool:
        """Say whether this process is one of several. A step of Slurm with a PMI of its own is not meant."""
        if self.rank not in environ or size(environ, self.world_size) <= 1:
            return False
        return any(name in environ for name in self.local_rank) or not SLURM_STEP.started(environ)

    def read(self, environ: Mapping[str, str]) -> LaunchInfo:
        """Read and check the variables.

        Args:
            environ: the environment.

        Returns:
            The place of this process.

        Raises:
            LaunchError: a variable is missing, is no whole number, or contradicts another.

        Ranks: local.
        """
        rank, world_size = count(environ, self.rank), count(environ, self.world_size)
        local_name, size_name = self._found(environ, self.local_rank), self._found(environ, self.local_world_size)
        local_rank, on_node = count(environ, local_name), count(environ, size_name)
        check_below(
            environ,
            (self.rank, rank, self.world_size, world_size),
            (local_name, local_rank, size_name, on_node),
            (size_name, on_node - 1, self.world_size, world_size),
        )
        one_node = on_node == world_size
        if not one_node and (rank - local_rank) % on_node:
            reason = (
                f"rank {rank} is number {local_rank} of {on_node} on its node: the ranks are not counted node by node, "
                "the same number on each (as mpirun --map-by slot does)"
            )
            raise contradiction(reason, environ)
        shared = " ".join(environ[name] for name in self.shared if environ.get(name))
        run_id = f"{self.name} {shared}" if shared else ""
        place: dict[str, Any] = meeting_place(environ, LOOPBACK if one_node else "", run_id)
        return LaunchInfo(
            launcher=self.name,
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=on_node,
            node_rank=(rank - local_rank) // on_node,
            own_devices=self.name == "jsm",
            **place,
        )

    @staticmethod
    def _found(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
        return next((name for name in names if name in environ), names[0])


OPEN_MPI = MpiVariables(
    "openmpi",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
)
JSM = MpiVariables(
    "jsm",
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_SIZE",
    ("JSM_NAMESPACE_LOCAL_RANK",),
    ("JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("LSB_JOBID", "PMIX_NAMESPACE"),
)
PMI = MpiVariables(
    "pmi",
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
    ("PMI_JOBID", "PALS_APID"),
)
SLURM_STEP = SlurmStep()

#: The launchers, in the order in which they are asked: mpirun starts its helpers with srun, and jsrun sets what Open
#: MPI sets.
LAUNCHERS: tuple[Launcher, ...] = (TorchVariables(), JSM, OPEN_MPI, PMI, SLURM_STEP)


def find_launch(environ: Mapping[str, str] | None = None) -> LaunchInfo:
    """Find out which launcher started this process, and as which rank.

    Args:
        environ: the environment to read; None reads ``os.environ`` at the time of the call.

    Returns:
        The place of this process; rank 0 of 1 where there is no launcher, or one that started a single process and is
        not torch's.

    Raises:
        LaunchError: the variables contradict each other. The message shows what was found and what to run.

    Ranks: local.

    Example:
        >>> find_launch({}).is_distributed
        False
        >>> find_launch({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}).rank
        1
        >>> find_launch({"LOCAL_RANK": "0"})
        Traceback (most recent call last):
        ddpkit.errors.LaunchError: LOCAL_RANK is set, but RANK is not...
    """
    environ = os.environ if environ is None else environ
    for launcher in LAUNCHERS:
        if launcher.started(environ):
            info = launcher.read(environ)
            if info.launcher == "environment":
                _check_outer(info, environ)
            return info
    return LaunchInfo()


def _check_outer(info: LaunchInfo, environ: Mapping[str, str]) -> None:
    """Compare ``RANK`` with what the launcher around it says, if it may have come from there.

    More processes than the other launcher started are right: something starts several in each task.
    """
    if any(name in environ for name in _STARTS_RANKS_INSIDE):
        return
    for launcher in LAUNCHERS[1:]:
        if not launcher.started(environ):
            continue
        other = launcher.read(environ)
        if info.world_size < other.world_size or (info.world_size == other.world_size and info.rank != other.rank):
            raise contradiction(
                f"RANK={info.rank} of WORLD_SIZE={info.world_size}, but {other.launcher} started this process as "
                f"number {other.rank} of {other.world_size} (unset RANK LOCAL_RANK WORLD_SIZE to follow "
                f"{other.launcher})",
                environ,
            )
        return
