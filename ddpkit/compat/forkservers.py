"""A loader's workers: a forkserver for them alone, so that it can hand down blocked signals; and
how they are ended.

Reason: a process of a forkserver inherits what the server has blocked, not what its parent has. A
worker takes seconds to start and must not die of a launcher's SIGTERM meanwhile; a script's own
processes, from the same server, must. torch ends a worker that does not answer with SIGTERM, which
workers ignore, and then waits for it without end.
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
    """Start processes from a forkserver separate from the script's; if that is impossible, from the
    script's own.

    State: a function of multiprocessing, restored at the end.
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


def kill_when_terminated(worker: Any) -> None:
    """Have ``terminate`` of a worker kill it; otherwise it ends with the process that has started
    it.

    Args:
        worker: a process of multiprocessing, that of a loader.

    Example:
        >>> from multiprocessing import Process
        >>> worker = Process()
        >>> kill_when_terminated(worker); worker.terminate == worker.kill
        True
    """
    if hasattr(worker, "kill"):
        worker.terminate = worker.kill
