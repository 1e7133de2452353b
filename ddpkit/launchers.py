"""Which launcher started this process, and as which rank: read from the environment, never guessed.

One small class per launcher. :func:`find_launch` asks them in the order of :data:`LAUNCHERS`; the first that
finds its own variables answers. A launcher that ddpkit cannot join refuses loudly, because N processes that
each believe to be alone would train N models into one folder.

Source: the variables of torchrun, https://docs.pytorch.org/docs/stable/elastic/run.html ;
of Slurm, https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES ;
of Open MPI, https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html .
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ddpkit.errors import LaunchError

NO_LAUNCHER = "none"

# Slurm numbers the batch script, the external step and the interactive step from the top of 32 bits downward.
_FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0

# What the table in an error shows: the first group always, the others where they are set.
_TORCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHER_VARIABLES = (
    ("torchrun", ("GROUP_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")),
    ("Slurm", ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID")),
    ("Slurm", ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")),
    ("Open MPI", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")),
)


@dataclass(frozen=True)
class LaunchInfo:
    """Where this process stands among those that were launched together.

    Args:
        launcher: ``"torchrun"``, ``"environment"`` (the plain variables, set by anything else) or ``"none"``.
        rank: number of this process among all, from 0.
        local_rank: number of this process on its node, from 0.
        world_size: number of processes.
        local_world_size: number of processes on this node; where the launcher does not say, ``world_size``.
        node_rank: number of this node, from 0.
        restart_count: how often torchrun has restarted the processes.

    Ranks: local.

    Example:
        >>> info = LaunchInfo("torchrun", rank=3, local_rank=1, world_size=4, local_world_size=2, node_rank=1)
        >>> info.is_distributed
        True
    """

    launcher: str = NO_LAUNCHER
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    restart_count: int = 0

    @property
    def is_distributed(self) -> bool:
        """Whether a launcher started this process, be it as the only one."""
        return self.launcher != NO_LAUNCHER


class Launcher(Protocol):
    """What one launcher's class offers; add a class and put it into :data:`LAUNCHERS` to support another.

    Ranks: local.

    Example:
        >>> [launcher.started({}) for launcher in LAUNCHERS]
        [False, False, False]
    """

    def started(self, environ: Mapping[str, str]) -> bool:
        """Say whether this launcher's variables are there."""
        ...

    def read(self, environ: Mapping[str, str]) -> LaunchInfo:
        """Return the place of this process, or raise :class:`~ddpkit.errors.LaunchError`."""
        ...


class TorchVariables:
    """``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``: torchrun, torch.distributed.launch, or set by hand.

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
                raise _contradiction(f"{there} {verb} set, but {name} is not", environ)
        rank, local_rank, world_size = (_count(environ, n) for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        local_world_size = _count(environ, "LOCAL_WORLD_SIZE", world_size)
        for small, value, large, bound in (
            ("RANK", rank, "WORLD_SIZE", world_size),
            ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size),
            ("LOCAL_RANK", local_rank, "WORLD_SIZE", world_size),
        ):
            if value >= bound:
                raise _contradiction(f"{small}={value} is not below {large}={bound}", environ)
        if local_world_size > world_size:
            reason = f"LOCAL_WORLD_SIZE={local_world_size} is above WORLD_SIZE={world_size}"
            raise _contradiction(reason, environ)
        return LaunchInfo(
            launcher="torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment",
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            node_rank=_count(environ, "GROUP_RANK", (rank - local_rank) // local_world_size),
            restart_count=_count(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        )


class SlurmStep:
    """Several tasks of one ``srun`` without ``RANK``: refused, with the command that works.

    A batch script, a ``salloc`` shell and ``srun --pty bash`` with one task are no such step.

    Ranks: local.

    Example:
        >>> SlurmStep().started({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"})  # the batch script itself
        False
    """

    def started(self, environ: Mapping[str, str]) -> bool:
        """Say whether this process is one of several tasks of a step."""
        step = environ.get("SLURM_STEP_ID", "")
        is_step = step.isdecimal() and int(step) < _FIRST_SPECIAL_SLURM_STEP
        return is_step and "SLURM_PROCID" in environ and self._tasks(environ) > 1

    def read(self, environ: Mapping[str, str]) -> LaunchInfo:
        """Refuse.

        Args:
            environ: the environment.

        Raises:
            LaunchError: always; it shows the command with torchrun.

        Ranks: local.
        """
        nodes = max(1, _size(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES"))
        tasks = self._tasks(environ)
        per_node = -(-tasks // nodes)
        agent = f"torchrun --standalone --nproc_per_node={per_node}"
        if nodes > 1:
            agent = (
                f"torchrun --nnodes={nodes} --nproc_per_node={per_node} --rdzv_backend=c10d "
                "--rdzv_id=$SLURM_JOB_ID --rdzv_endpoint="
                '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500'
            )
        raise _refusal(
            f"Slurm started {tasks} tasks (this is task {environ['SLURM_PROCID']}), but RANK is not set",
            f"srun --nodes={nodes} --ntasks-per-node=1 {agent} train.py hparams.yaml",
            "srun --ntasks=1 python train.py hparams.yaml",
            environ,
        )

    @staticmethod
    def _tasks(environ: Mapping[str, str]) -> int:
        return _size(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


class OpenMPI:
    """Several processes of one ``mpirun`` without ``RANK``: refused, with the command that works.

    Ranks: local.

    Example:
        >>> OpenMPI().started({"OMPI_COMM_WORLD_SIZE": "1"})
        False
    """

    def started(self, environ: Mapping[str, str]) -> bool:
        """Say whether this process is one of several that mpirun started."""
        return _size(environ, "OMPI_COMM_WORLD_SIZE") > 1

    def read(self, environ: Mapping[str, str]) -> LaunchInfo:
        """Refuse.

        Args:
            environ: the environment.

        Raises:
            LaunchError: always; it shows the command with torchrun.

        Ranks: local.
        """
        processes = _size(environ, "OMPI_COMM_WORLD_SIZE")
        per_node = _size(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") or processes
        rank = environ.get("OMPI_COMM_WORLD_RANK", "?")
        raise _refusal(
            f"Open MPI started {processes} processes (this is number {rank}), but RANK is not set",
            f"torchrun --standalone --nproc_per_node={per_node} train.py hparams.yaml",
            "python train.py hparams.yaml",
            environ,
        )


LAUNCHERS: tuple[Launcher, ...] = (TorchVariables(), SlurmStep(), OpenMPI())


def find_launch(environ: Mapping[str, str] | None = None) -> LaunchInfo:
    """Find out which launcher started this process, and as which rank.

    Args:
        environ: the environment to read; None reads ``os.environ`` at the time of the call.

    Returns:
        The place of this process; rank 0 of 1 where there is no launcher.

    Raises:
        LaunchError: the variables contradict each other, or a launcher started several processes without
            telling them their ranks. The message shows what was found and what to run.

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
            return launcher.read(environ)
    return LaunchInfo()


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
    for launcher, names in _OTHER_VARIABLES:
        rows += [(name, _shown(environ, name), launcher) for name in names if name in environ]
    header = f"  {'variable':<27} {'found':<13} used by"
    return "\n".join([header, *(f"  {name:<27} {value:<13} {who}" for name, value, who in rows)])


def _shown(environ: Mapping[str, str], name: str) -> str:
    return repr(environ[name]) if name in environ else "not set"


def _contradiction(reason: str, environ: Mapping[str, str]) -> LaunchError:
    return LaunchError(
        f"{reason}: the launcher's environment contradicts itself.\n{describe_environment(environ)}\n"
        "Several processes: torchrun --standalone --nproc_per_node=N train.py hparams.yaml\n"
        "(or give each process RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, numbered from 0).\n"
        "One process: unset RANK LOCAL_RANK WORLD_SIZE, then python train.py hparams.yaml"
    )


def _refusal(reason: str, several: str, one: str, environ: Mapping[str, str]) -> LaunchError:
    return LaunchError(
        f"{reason}: each process would train alone and believe to be the main one.\n"
        f"{describe_environment(environ)}\nSeveral processes: {several}\nOne process: {one}"
    )


def _count(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read a whole number that is not negative."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        raise _contradiction(f"{name}={text!r} is not a whole number", environ) from None
    if value < 0:
        raise _contradiction(f"{name}={value} is negative", environ)
    return value


def _size(environ: Mapping[str, str], *names: str) -> int:
    """Read the first of some variables that holds a number; 0 where none does."""
    found = (environ[name] for name in names if environ.get(name, "").isdecimal())
    return int(next(found, "0"))
