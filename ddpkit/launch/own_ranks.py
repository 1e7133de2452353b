"""Ranks that ddpkit starts itself, all on this machine: where they meet, and what tells each which
rank it is.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from ddpkit.launch.launchers import LOOPBACK

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def open_store(seconds: float) -> TCPStore:
    """Open the store at which the ranks meet.

    In the process that starts them, and not in rank 0: the system chooses a free port, which no
    other program can take first, and the store outlives a rank that fails.

    Args:
        seconds: how long a call of the store may wait.

    Ranks: local; the process that starts the ranks.

    Example:
        >>> open_store(10).port > 0
        True
    """
    from torch.distributed import TCPStore

    return TCPStore(
        LOOPBACK,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )


def rank_variables(rank: int, number: int, port: int) -> dict[str, str]:
    """Return the environment variables that tell a process which rank it is, as torchrun sets them.

    Args:
        rank: of the process.
        number: of processes.
        port: of the store at which they meet.

    Example:
        >>> from ddpkit.launch.launchers import find_launch
        >>> find_launch(rank_variables(1, 2, 29500)).rank
        1
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
