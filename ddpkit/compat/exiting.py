"""What runs when the interpreter begins to end, while thread pools still take work.

``atexit`` comes later: ``concurrent.futures`` has shut its pools down by then, and packages that
ask an object store through one raise "cannot schedule new futures after shutdown".

Source: ``threading._register_atexit`` of CPython, by which ``concurrent.futures.thread`` itself
registers its shutdown; the last that was registered runs first.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 -- registers its own shutdown, before those of others
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def before_pools_end(call: Callable[[], object]) -> None:
    """Register a function to run at the end of the interpreter, before pools of threads are shut
    down. Where the interpreter ends already, or has no such hook, it is not called.

    Args:
        call: must not raise.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is None:
        return
    try:
        register(call)
    except RuntimeError:  # the interpreter ends
        return
