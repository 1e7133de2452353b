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

_MUTEX = threading.RLock()
_SERVERS: dict[int, Any] = {}  # by process: a forked one has none


@contextlib.contextmanager
def own_forkserver() -> Iterator[None]:
    """Have this thread's processes come from another forkserver than the script's; otherwise from that, started before.

    Ranks: local.

    State: a function of multiprocessing, restored at the end; unchanged for other threads.

    Example:
        >>> with own_forkserver():
        ...     workers_would_start_here = True
    """
    scripts: Any = getattr(forkserver, "_forkserver", None)
    if not (hasattr(forkserver, "ForkServer") and hasattr(scripts, "_preload_modules")):
        forkserver.ensure_running()
        yield
        return
    owner = threading.get_ident()

    def connect(fds: Any) -> Any:
        if threading.get_ident() != owner:
            return usual(fds)
        server = _SERVERS.setdefault(os.getpid(), forkserver.ForkServer())
        server.set_forkserver_preload(list(scripts._preload_modules))  # noqa: SLF001 -- what the script's has imported
        return server.connect_to_new_process(fds)

    with _MUTEX:
        usual = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = connect
        try:
            yield
        finally:
            forkserver.connect_to_new_process = usual
