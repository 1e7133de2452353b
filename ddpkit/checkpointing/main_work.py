"""Work on checkpoints that the main process does for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from ddpkit.distributed import run_on_main
from ddpkit.errors import MainCheckpointError, MainProcessError

T = TypeVar("T")


def checkpoint_work_on_main(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function on the main process; every rank gets its value, or an error about checkpoints.

    Args:
        function: what to run.
        arguments: for it.

    Raises:
        CheckpointError: it failed on the main process.

    Ranks: all, or the main process alone.

    Example:
        >>> checkpoint_work_on_main(max, 1, 2)
        2
    """
    try:
        return cast("T", run_on_main(function, args=arguments))
    except MainProcessError as error:  # the main process shows its own traceback
        raise MainCheckpointError(
            str(error).partition("\n--- traceback of rank 0 ---")[0]
        ) from None
