"""When Python collects garbage: by itself, or by optimizer steps (``gc_interval``)."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def collecting_by_steps(interval: int) -> Iterator[None]:
    """Return a context in which Python collects no garbage by itself, if the optimizer steps say
    when.
    """
    is_on = gc.isenabled()
    if interval:
        gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
