"""Which rank this process is: by torch's process group, else by the launcher's variables alone.

That imports no torch and raises nothing, so messages can name the rank whatever is wrong. What the
variables mean in full, and whether they contradict each other, is said by
:mod:`ddpkit.launch.launchers`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

# Slurm numbers the batch script, the external step and the interactive step from the top of 32 bits
# downward.
_FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0


class MpiLauncher(NamedTuple):
    """The variables of an MPI launcher, and what messages say about it.

    Of several names for the place on the node the first that is set counts.

    Attributes:
        rank: the variable with the rank.
        world_size: the variable with the number of processes.
        local_rank: the variables with the number of this process on its node.
        local_world_size: the variables with the number of processes on this node.
        shared: variables that together are the same on all ranks of a run, and differ in another
            run; without any, ``MASTER_PORT`` has to be given.
    """

    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    shared: tuple[str, ...]


#: A new MPI launcher is one row here, if it tells each process how many run on its node. The order
#: counts: jsrun sets what Open MPI sets.
MPI_LAUNCHERS = {
    "jsm": MpiLauncher(
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("LSB_JOBID", "PMIX_NAMESPACE"),
    ),
    "openmpi": MpiLauncher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    ),
    "pmi": MpiLauncher(
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        ("PMI_JOBID", "PALS_APID"),
    ),
}


def is_distributed_initialized() -> bool:
    """Return whether a default process group exists, made by ddpkit or by other code.

    Ranks: local.

    Example:
        >>> is_distributed_initialized()
        False
    """
    group = sys.modules.get("torch.distributed")
    return group is not None and bool(group.is_available() and group.is_initialized())


def get_rank() -> int | None:
    """Return this process's rank: from the process group, else from the launcher's environment,
    else None.

    Ranks: local.

    Example:
        >>> get_rank() is None
        True
    """
    return (
        int(sys.modules["torch.distributed"].get_rank())
        if is_distributed_initialized()
        else rank_if_known()
    )


def get_world_size() -> int:
    """Return the number of processes that train together; 1 where no process group is initialised.

    Ranks: local.

    Example:
        >>> get_world_size()
        1
    """
    return (
        int(sys.modules["torch.distributed"].get_world_size())
        if is_distributed_initialized()
        else 1
    )


def rank_if_known(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the rank that the environment tells, and never raise.

    Args:
        environ: the environment; None reads ``os.environ``.

    Returns:
        The rank, or None where no launcher has started several processes.

    Example:
        >>> rank_if_known({"RANK": "2"}), rank_if_known({}), rank_if_known({"LOCAL_RANK": "1"})
        (2, None, None)
    """
    environ = os.environ if environ is None else environ
    if environ.get("RANK", "").isdecimal():
        return int(environ["RANK"])
    names = [
        launcher.rank
        for launcher in MPI_LAUNCHERS.values()
        if size(environ, launcher.world_size) > 1
    ]
    if in_slurm_step(environ):
        names.append("SLURM_PROCID")
    return next(
        (int(environ[name]) for name in names if environ.get(name, "").isdecimal()),
        None,
    )


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Say whether this process is one of several tasks of one ``srun``.

    Example:
        >>> in_slurm_step({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"})  # the batch script itself
        False
    """
    step = environ.get("SLURM_STEP_ID", "")
    is_step = step.isdecimal() and int(step) < _FIRST_SPECIAL_SLURM_STEP
    return (
        is_step
        and "SLURM_PROCID" in environ
        and size(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") > 1
    )


def size(environ: Mapping[str, str], *names: str) -> int:
    """Read the first of some variables that holds a number; 0 where none does.

    Args:
        environ: the environment.
        names: the variables, the best first.

    Example:
        >>> size({"SLURM_NTASKS": "4"}, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        4
    """
    found = (environ[name] for name in names if environ.get(name, "").isdecimal())
    return int(next(found, "0"))
