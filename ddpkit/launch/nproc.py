"""``--nproc``: this process becomes torch's launcher, which starts the running script once per
rank.

Source: the options of ``torch.distributed.run``,
https://docs.pytorch.org/docs/stable/elastic/run.html .
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ddpkit.base import accelerator_kind, count_devices
from ddpkit.errors import ConfigError, LaunchError
from ddpkit.launch.launcher_variables import NPROC
from ddpkit.launch.launchers import describe_environment, find_launch, node_by_rank
from ddpkit.launch.platforms import Node, find_node, met_at
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

logger = get_logger(__name__)

ALIVE_ONCE_A_DAY = "keep_alive_interval=86400"
# what Python puts into sys.argv[0] where it reads code from a person or a pipe
NOT_SCRIPTS = ("", "-")


def count_processes(
    asked: int | str,
    device: str | None = None,
    *,
    gpus: int | None = None,
    sign: str = "--",
) -> int:
    """Find out how many processes are meant.

    Args:
        asked: a number, ``"gpu"`` (one per GPU), ``"cpu"`` (one per core) or ``"auto"`` (one per
            GPU, else per core).
        device: the device that was asked for, if any; ``"cpu"`` makes GPUs not count.
        gpus: how many GPUs there are, where that is known; None looks.
        sign: what stands before a name in messages: options have ``--``, arguments nothing.

    Returns:
        The number, at least 1.

    Raises:
        ConfigError: not such a number or word, or fewer GPUs than processes.

    Example:
        >>> count_processes("2", "cpu"), count_processes(3, "cpu")
        (2, 3)
        >>> count_processes("0")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: nproc must be >= 1, got '0'...
    """
    if device is not None and device.split(":")[0] == "cpu":
        gpus = 0
    elif gpus is None:
        gpus = count_gpus()
    word = str(asked).strip().lower()
    if word == "gpu" and not gpus:
        raise ConfigError(
            "nproc='gpu', but no GPU was found or asked for. Give a number, such as "
            f"{sign}nproc=2, or cpu."
        )
    if word in {"gpu", "cpu", "auto"}:
        return gpus if word != "cpu" and gpus else cores()
    if isinstance(asked, bool) or not word.isdecimal() or int(word) == 0:
        words = "gpu (one per GPU), cpu (one per core) or auto (gpu if there is one, else cpu)"
        raise ConfigError(
            f"nproc must be >= 1, got {asked!r}. Give a number of processes, {words}."
        )
    number = int(word)
    if gpus and number > gpus:
        text = f"nproc={asked!r}, but there are {gpus} GPUs, and each process needs one of its own."
        raise ConfigError(f"{text} Give {sign}nproc={gpus} or less, or {sign}device=cpu.")
    if not gpus and number > cores():
        logger.warning(
            "%d processes share %d processor cores: they will wait for each other.",
            number,
            cores(),
        )
    return number


def count_gpus() -> int:
    """Count the GPUs that this process may use."""
    kind = accelerator_kind()
    return 0 if kind == "cpu" else count_devices(kind)


def cores() -> int:
    """Count the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def become_torchrun(asked: int | str, device: str | None = None) -> NoReturn:
    """Turn this process into torch's launcher, with the command line of this process for every
    rank.

    On one of several nodes of a platform it is the launcher of this node, with the platform's
    number and address.

    Args:
        asked: as in :func:`count_processes`; on each node.
        device: the device that was asked for, if any.

    Raises:
        ConfigError: the number makes no sense, or the running script cannot be started again.
        LaunchError: a launcher has started this process already, and others on this node; or a
            platform does not say which node this is.

    Ranks: local; the process becomes the parent of the ranks.

    State: the program of this process. Each rank finds ``DDPKIT_NPROC`` in its environment, and
        ``OMP_NUM_THREADS`` (cores / processes, where the user has not set it).

    Example:
        >>> become_torchrun("many")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: nproc must be >= 1, got 'many'...
    """
    number = count_processes(asked, device)
    node = node_to_start_on(os.environ)
    if node is not None:
        node.require_place()
    if sys.argv[0] in NOT_SCRIPTS:
        raise ConfigError(
            "--nproc starts the running script again, and there is none: this is an interactive "
            "Python, or code from a pipe. Put the code into a file, and start that."
        )
    os.environ[NPROC] = str(number)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // number)))
    if node is not None:
        logger.warning(
            "%s (%s): %d processes start here, and wait for the other nodes at %s.",
            node.place.capitalize(),
            node.platform,
            number,
            node.meeting,
            main_process_only=False,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(  # noqa: S606 -- as meant
        sys.executable,
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *(node.options(number) if node is not None else _alone(number)),
            "--no_python",
            "--",
            sys.executable,
            *sys.orig_argv[1:],
        ],
    )


def _alone(number: int) -> list[str]:
    """Return torchrun's options where this is the only node.

    In a container the name of the host may have no address. And one node alone need not tell others
    that it is alive: torchrun leaves the thread for it running when a signal ends it, and aborts if
    it is in a call of the store then. What the user has set for the rendezvous stands after that,
    and wins.
    """
    given = os.environ.get("PET_RDZV_CONF", "").strip()
    settings = ",".join(filter(None, (ALIVE_ONCE_A_DAY, given)))
    return [
        "--standalone",
        "--local_addr=localhost",
        f"--rdzv_conf={settings}",
        f"--nproc_per_node={number}",
    ]


def node_to_start_on(environ: Mapping[str, str]) -> Node | None:
    """Find out of which of several nodes ``--nproc`` is to start the ranks.

    Another launcher may have started one process on each node, as ``srun --ntasks-per-node=1``
    does.

    Args:
        environ: the environment.

    Returns:
        The node; None where it is the only one.

    Raises:
        LaunchError: a launcher has started a rank already.
    """
    node = node_by_rank(environ)
    if node is not None:
        return node if node.several else None
    info = find_launch(environ)
    if not info.is_distributed:
        return find_node(environ)
    if info.launcher == "torchrun" or info.local_world_size > 1 or info.world_size == 1:
        raise LaunchError(
            f"--nproc starts the processes itself, but {info.launcher} has started this one "
            f"already, as rank {info.rank} of "
            f"{info.world_size}.\n{describe_environment(environ)}\n"
            "Use one of the two: leave --nproc out, or start the script with python alone."
        )
    node = Node(
        info.launcher,
        num_nodes=str(info.world_size),
        number_in="the launcher",
        rank=str(info.rank),
        address=info.address,
        address_in="MASTER_ADDR",
        port=str(info.port or ""),
    )
    return find_node(environ) or met_at(environ, node)
