"""A process that ends with the one that has started it, however that comes about."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


def dying_with_parent(number: int) -> Callable[[], None] | None:
    """Return what a new process calls to be ended when the one that has started it ends.

    It is for ``subprocess.Popen(preexec_fn=...)``, and for a forked process. The system looks at
    the thread that has started the process: it must live as long as the process.

    Args:
        number: of the signal that ends it.

    Returns:
        None where the system has no such thing.
    """
    if _libc is None:
        return None
    prctl = _libc.prctl
    return lambda: prctl(_DIE_WITH_PARENT, number)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
