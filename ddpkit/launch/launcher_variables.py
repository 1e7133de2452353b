"""The environment variables by which a process learns which rank it is: one table for all readers.

What is here is shown where a launcher contradicts itself, and removed from the environment of a
program that is to run alone. Which of them a launcher needs says its function in ``launchers.py``.
"""

from __future__ import annotations

import itertools
import os

from ddpkit.base import MPI_LAUNCHERS
from ddpkit.launch.platforms import TELL_NODES
from ddpkit.launch.slice_plan import SLICE

# Of this library.
NPROC = "DDPKIT_NPROC"  # how many ranks --nproc has torchrun start, in their environment
NOTEBOOK = "DDPKIT_NOTEBOOK"  # how many ranks notebook_launch has forked, in their environment
PARITY = "DDPKIT_PARITY"  # the folder of the parity check that this process is a rank of
#: Which process is the rank that the launcher's variables beside it are for.
RANK_PROCESS = "DDPKIT_RANK_PROCESS"

# What torch itself reads, and what torchrun sets besides.
TORCH = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
TORCHRUN = (
    "NODE_RANK",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
)
MPI = tuple(
    itertools.chain.from_iterable(
        (launcher.rank, launcher.world_size, *launcher.local_rank, *launcher.local_world_size)
        for launcher in MPI_LAUNCHERS.values()
    )
)
SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS")
SLURM_STEP = "SLURM_STEP_"  # how the names begin that a step of Slurm sets

#: The number of tasks is also set in a batch script, which is one process: shown, not removed.
SHOWN = (
    NPROC,
    NOTEBOOK,
    "GROUP_RANK",
    "TORCHELASTIC_R",
    *MPI,
    *SLURM,
    SLURM_STEP,
    "SLURM_NTASKS",
)
_REMOVED = {
    *TORCH,
    *TORCHRUN,
    *MPI,
    *SLURM,
    *TELL_NODES,
    NPROC,
    NOTEBOOK,
    PARITY,
    RANK_PROCESS,
    SLICE,
}
_REMOVED_PREFIXES = ("TORCHELASTIC_", SLURM_STEP)


def is_notebook_rank() -> bool:
    """Say whether this process is a rank that ``notebook_launch`` has forked.

    It ends as a script does: through ``sys.excepthook``.

    Example:
        >>> is_notebook_rank()
        False
    """
    return NOTEBOOK in os.environ


def tells_rank(name: str) -> bool:
    """Say whether a variable says which rank a process is, or of what launch.

    Args:
        name: of the variable.

    Example:
        >>> tells_rank("RANK"), tells_rank("SLURM_STEP_ID"), tells_rank("SLURM_JOB_ID")
        (True, True, False)
    """
    return name in _REMOVED or name.startswith(_REMOVED_PREFIXES)
