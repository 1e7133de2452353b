"""A forkserver for loaders alone, so that it can hand down blocked signals.

Reason: a process of a forkserver inherits what the server has blocked, not what its parent has. A worker takes seconds
to start and must not die of a launcher's SIGTERM meanwhile; a script's own processes, from the same server, must.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

from ddpkit.base import temporarily

_MUTEX = threading.RLock()
_SERVERS: dict[int, Any] = {}  # by process: a forked one has none


@contextlib.contextmanager
def own_forkserver() -> Iterator[None]:
    """Start processes from a forkserver separate from the script's; if that is impossible, from the script's own.

    Ranks: local.

    State: a function of multiprocessing, restored at the end.

    Example:
        >>> with own_forkserver():
        ...     workers_would_start_here = True
    """
    scripts: Any = getattr(forkserver, "_forkserver", None)
    if not (hasattr(forkserver, "ForkServer") and hasattr(scripts, "_preload_modules")):
        forkserver.ensure_running()
        yield
        return
    server = _SERVERS.setdefault(os.getpid(), forkserver.ForkServer())
    server.set_forkserver_preload(list(scripts._preload_modules))  # noqa: SLF001
    with _MUTEX, temporarily(forkserver, connect_to_new_process=server.connect_to_new_process):
        yield
