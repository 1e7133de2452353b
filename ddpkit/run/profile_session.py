"""A profiler in a call of ``fit``: of the option ``profile_training``, or a recipe's own."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from ddpkit.run.observers import Observer
from ddpkit.training import PassedThrough

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpkit.run.speed_report import SpeedReport
    from ddpkit.training import RunContext


class ProfileSession(Observer):
    """Enters a profiler for a call of ``fit``, and tells it of each batch that is trained on.

    Args:
        context: of the run.
        speed: marks the phases of steps in the profile.

    Attributes:
        profiler: of this call of ``fit``, or None.

    Ranks: local; each rank records itself.
    """

    def __init__(self, context: RunContext, speed: SpeedReport) -> None:
        self.profiler: Any = None
        self._context = context
        self._speed = speed

    @property
    def recording(self) -> str:  # type: ignore[override]  # it changes from call to call
        """A profile, if there is a profiler."""
        return "" if self.profiler is None else "a profile"

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Run the profiler, if there is one; a recipe's own is for this call, too."""
        try:
            with self.profiler or contextlib.nullcontext():
                yield
        finally:
            self.profiler = None

    def batches(self, batches: Iterable[Any], left_out: int) -> Iterable[Any]:
        """Return the batches of a pass, after each of which the profiler is told of a step.

        Args:
            batches: as the loader yields them.
            left_out: how many of them a resume only skips.
        """
        if self.profiler is None:
            return batches
        ranges = self._speed.mark_ranges(once=self._context.options.profile_training)
        return PassedThrough(batches, functools.partial(ranges.follow, self.profiler, left_out))
