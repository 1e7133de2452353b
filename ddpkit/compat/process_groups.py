"""What torch knows of its process groups and tells nobody: their store, their time limit, and which there are.

Reason: a group may have been made by the recipe, so nothing of it passes through ddpkit; its store is the one channel
to the other ranks that needs no collective, and every group must be closed before the process ends.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def default_store() -> Any:
    """Return the store of the default process group; otherwise asked of the group itself, which newer torch tells.

    Raises:
        ValueError: there is no process group (torch's own error).

    Ranks: local.

    Example:
        >>> default_store()
        Traceback (most recent call last):
        ValueError: Default process group has not been initialized, please make sure to call init_process_group.
    """
    ask = getattr(dist.distributed_c10d, "_get_default_store", None)
    if ask is not None:
        return ask()
    dist.get_backend()  # raises torch's own error where there is no group
    return dist.group.WORLD.get_group_store()  # type: ignore[union-attr]


def all_groups() -> list[Any]:
    """Return all process groups of this process; otherwise the default one alone.

    Ranks: local.

    Example:
        >>> all_groups()
        []
    """
    world = getattr(dist.distributed_c10d, "_world", None)
    known = getattr(world, "pg_map", None)
    if known is not None:
        return list(known)
    return [] if dist.group.WORLD is None else [dist.group.WORLD]


def timeout_of(group: Any) -> timedelta | None:
    """Return how long a group's collectives wait; None if its backend does not say (``mpi``), or torch is another.

    Args:
        group: a process group, or None.

    Ranks: local.

    Example:
        >>> timeout_of(None) is None
        True
    """
    for device in getattr(group, "_device_types", ()):
        get_backend = getattr(group, "_get_backend", None)
        options = getattr(None if get_backend is None else get_backend(device), "options", None)
        limit = getattr(options, "_timeout", None)
        if isinstance(limit, timedelta):
            return limit
    return None
