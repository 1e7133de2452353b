"""``--nproc``: the ranks of the command on this machine, as processes of this one.

torchrun would write a report of its own below the table whenever the exit code is not 0.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpkit.base import dying_with_parent
from ddpkit.errors import LaunchError
from ddpkit.launch import (
    LaunchInfo,
    cores,
    count_processes,
    find_launch,
    node_by_rank,
    open_store,
    rank_variables,
    without_launch,
)
from ddpkit.see.orderly_end import end_children, ended_in_order

if TYPE_CHECKING:
    from torch.distributed import TCPStore

STORE_SECONDS = 60.0
GRACE_SECONDS = 5.0  # in which a rank may end what it has started


def run_ranks(asked: str, device: str | None, words: Sequence[str]) -> int:
    """Start the ranks, and wait for them.

    Args:
        asked: how many: a number, ``gpu``, ``cpu`` or ``auto``.
        device: what was asked for, if any.
        words: of the command, without ``--nproc``.

    Returns:
        The exit code of the main process; 1 if another one was killed.

    Raises:
        ConfigError: the number makes no sense.
        LaunchError: a launcher has started this process already.

    Ranks: local.
    """
    # on one of several nodes, too, these are the ranks of this machine alone
    info = LaunchInfo() if node_by_rank(os.environ) else find_launch()
    if info.is_distributed:
        raise LaunchError(
            f"--nproc={asked} starts the processes itself, but {info.launcher} has started this "
            f"one already, as rank {info.rank} of {info.world_size}. Leave --nproc out, or start "
            "the command without a launcher."
        )
    number = count_processes(asked, device)
    store = open_store(STORE_SECONDS)
    children: list[subprocess.Popen[bytes]] = []
    with ended_in_order():
        try:
            children.extend(_start(rank, number, store, words) for rank in range(number))
            codes = [child.wait() for child in children]
        finally:
            end_children(children, GRACE_SECONDS)
    return codes[0] if codes[0] > 0 else int(any(codes))


def _start(
    rank: int,
    number: int,
    store: TCPStore,
    words: Sequence[str],
) -> subprocess.Popen[bytes]:
    environment = {
        **without_launch(os.environ),
        **rank_variables(rank, number, store.port),
    }
    environment.setdefault(
        "OMP_NUM_THREADS",
        str(max(1, cores() // number)),
    )  # as --nproc of a recipe
    return subprocess.Popen(
        [sys.executable, "-m", "ddpkit", "doctor", *words],
        env=environment,
        preexec_fn=dying_with_parent(signal.SIGTERM),  # noqa: PLW1509 -- takes no lock
    )
