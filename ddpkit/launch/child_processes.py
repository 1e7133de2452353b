"""Programs that a rank starts, such as ``subprocess.run([python, "evaluate.py"])``: they inherit
the rank's variables.

To such a program its environment says that it is rank 0 of several, though a living process is that
already. It would wait for ranks that never come. So a rank leaves a mark in its environment once it
has joined its process group, and a process that finds another one's mark, beside the same variables
of the launcher, is refused. A launcher that is started inside a rank sets other variables, and its
ranks are not.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddpkit.base import state_and_start
from ddpkit.errors import LaunchError
from ddpkit.launch.launcher_variables import RANK_PROCESS, tells_rank
from ddpkit.launch.launchers import NOTEBOOK_LAUNCH, find_launch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpkit.launch.launchers import LaunchInfo

# What a message shows of torch's own.
_TORCHS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def without_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment without what a launcher (torchrun, ``--nproc``, Slurm, MPI) says about
    ranks.

    Args:
        environ: the environment.

    Example:
        >>> without_launch(
        ...     {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "HOME": "/root"}
        ... )
        {'HOME': '/root'}
    """
    return {name: value for name, value in environ.items() if not tells_rank(name)}


def mark_rank_process() -> None:
    """Leave a mark for programs that this process starts: it is the rank that the environment tells
    of.

    State: ``DDPKIT_RANK_PROCESS`` in ``os.environ``, where a launcher has started several
    processes.
    """
    info = find_launch()
    if info.world_size > 1:
        os.environ[RANK_PROCESS] = f"{_this_process()} {_launch_of(info)}"


def refuse_child_of_rank(info: LaunchInfo) -> None:
    """Raise if another process has joined the process group as this rank, and has started this one.

    Args:
        info: what the environment tells.

    Raises:
        LaunchError: it has. The message says how to start this process instead.
    """
    process, _, launch = os.environ.get(RANK_PROCESS, "").partition(" ")
    if launch != _launch_of(info) or process == _this_process():
        return
    pid = process.partition(":")[0]
    is_torchs = info.launcher in {"torchrun", NOTEBOOK_LAUNCH, "environment"}
    names = [name for name in os.environ if (name in _TORCHS if is_torchs else tells_rank(name))]
    found = " ".join(f"{name}={os.environ[name]}" for name in sorted(names))
    raise LaunchError(
        f"this process (pid {os.getpid()}) was started by rank {info.rank} (pid {pid}) and has "
        f"inherited its variables ({found}). So it would wait as a second rank {info.rank} for "
        "ranks that run already, and never come. To run alone, start it without these variables: "
        "subprocess.run(..., env=ddpkit.distributed.environment_without_launch()). "
        "To run as several processes, start it with torchrun. If every rank starts one, and they "
        f"are to be the ranks of a group of their own, remove {RANK_PROCESS} from their "
        "environment."
    )


def _this_process() -> str:
    pid = os.getpid()
    return f"{pid}:{state_and_start(pid)[1]}"


def _launch_of(info: LaunchInfo) -> str:
    run = info.run_id or os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{info.launcher} {info.rank} of {info.world_size} at {info.address}:{info.port} {run}"
