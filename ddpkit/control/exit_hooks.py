"""What runs at the end of a process, however it was started."""

from __future__ import annotations

import atexit
import multiprocessing
from multiprocessing import util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


FIRST_AT_EXIT = 100  # priority of a multiprocessing exit hook; its own have at most 15


def at_exit(call: Callable[[], object]) -> None:
    """Register a function to run at exit, before ``multiprocessing`` waits for its children.

    A process that ``multiprocessing`` has forked ends without ``atexit``; a spawned process waits
    for its children before ``atexit``.

    Args:
        call: must be idempotent; it may be called twice.

    Source: ``multiprocessing.process.BaseProcess._bootstrap`` and
    ``multiprocessing.util._exit_function``.
    """
    atexit.register(call)
    if multiprocessing.parent_process() is not None:
        util.Finalize(None, call, exitpriority=FIRST_AT_EXIT)
