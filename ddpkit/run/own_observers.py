"""The library's own observers, in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit.run.observers import Observers
from ddpkit.run.profile_session import ProfileSession
from ddpkit.run.step_flops import StepFlops

if TYPE_CHECKING:
    from ddpkit.run.speed_report import SpeedReport
    from ddpkit.training import RunContext, TrainStep


class OwnObservers(Observers):
    """Those of each run.

    Args:
        context: of the run.
        train_step: of the run.
        speed: measures steps, and reports what is counted of them.

    Attributes:
        profile: runs a profiler.
        flops: counts the operations of one step, with ``--count_flops``.

    Ranks: as an observer.
    """

    def __init__(self, context: RunContext, train_step: TrainStep, speed: SpeedReport) -> None:
        self.profile = ProfileSession(context, speed)
        self.flops = StepFlops(context, train_step, speed.note_flops)
        super().__init__(self.profile, self.flops)
