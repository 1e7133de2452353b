"""What torch knows of its process groups and tells nobody: their store, their time limit, and which there are.

Reason: a group may have been made by the recipe, so nothing of it passes through ddpkit; its store is the one channel
to the other ranks that needs no collective, and every group must be closed before the process ends.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def default_store() -> Any:
    """Return the store of the default process group.

    Raises:
        ValueError: there is no process group (torch's own error).

    Ranks: local.

    Example:
        >>> default_store()
        Traceback (most recent call last):
        ValueError: Default process group has not been initialized, please make sure to call init_process_group.
    """
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 -- see the module


def all_groups() -> list[Any]:
    """Return all process groups of this process.

    Ranks: local.

    Example:
        >>> all_groups()
        []
    """
    return list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 -- see the module


def timeout_of(group: Any) -> Any:
    """Return how long a group's collectives wait, a ``timedelta``; None if its backend does not say (``mpi``).

    Args:
        group: a process group, or None.

    Ranks: local.

    Example:
        >>> timeout_of(None) is None
        True
    """
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)  # noqa: SLF001 -- see the module
        if options is not None:
            return options._timeout  # noqa: SLF001
    return None
