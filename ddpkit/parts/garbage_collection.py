"""Collects Python's garbage every so many optimizer steps, with the option ``gc_interval``."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

from ddpkit.parts.own import OwnPart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from ddpkit.training import RunContext


class GarbageCollection(OwnPart):
    """Has all ranks collect Python's garbage after the same optimizer steps, and Python never by
    itself.

    Args:
        interval: optimizer steps from one collection to the next.

    Ranks: all; none waits for another.

    Example:
        >>> with GarbageCollection(100).around_fit(None):
        ...     gc.isenabled()
        False
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval

    @classmethod
    def of_run(cls, context: RunContext) -> Self:
        """Make it of ``gc_interval``."""
        return cls(context.options.gc_interval)

    @contextlib.contextmanager
    def around_fit(self, brain: Any) -> Iterator[None]:
        """Keep Python from collecting by itself; a script that has switched it off finds it off."""
        is_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if is_on:
                gc.enable()

    def on_step_counted(self, brain: Any) -> None:
        """Collect after every so many steps."""
        if brain.optimizer_step % self.interval == 0:
            gc.collect()
