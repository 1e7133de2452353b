"""When to save in the middle of an epoch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddpkit.control import Requests

if TYPE_CHECKING:
    from ddpkit.control import SyncReport
    from ddpkit.run.checkpoint_policy import CheckpointPolicy
    from ddpkit.run.stop_control import StopControl
    from ddpkit.training import RunContext, TrainStep


class IntraEpochSaves:
    """Decides, alike on every rank, when to save in the middle of an epoch.

    Ranks: collective, but for :meth:`tell`.
    """

    def __init__(
        self,
        context: RunContext,
        train_step: TrainStep,
        policy: CheckpointPolicy,
        stop: StopControl,
    ) -> None:
        self.context = context
        self.train_step = train_step
        self.policy = policy
        self.stop = stop
        self.saves_by_steps = context.options.ckpt_interval_steps > 0
        averages = context.strategy.overrides("after_window")
        self.follows_windows = (
            self.saves_by_steps or train_step.freezes or train_step.waits_for_window or averages
        )
        self._put_off: SyncReport | None = None  # until the ranks' weights are averaged
        self._start_anew()

    def tell(self) -> Requests:
        """Return the seconds since the last save, and what this rank has been asked for."""
        return Requests(
            time.monotonic() - self.last_time,
            self.stop.signals.save_wanted,
            self.stop.cause(),
        )

    def on_sync(self, report: SyncReport) -> None:
        """Stop or save if any rank has been asked to, or save if the main process's clock says
        so.
        """
        self._put_off = report if self.context.strategy.weights_differ else None
        if report.stop and not self.would_be_incomplete():
            self.stop.stop_training(
                report.stop, is_saved=self.last_step == self.context.progress.step
            )
        if report.save_wanted and not self.would_be_incomplete():
            self.stop.signals.save_wanted = False
            self.policy.save_inside_epoch()
            self._start_anew()
        else:
            self._save_if_due(report.main_seconds, 0)

    def on_window(self) -> None:
        """Do what follows the steps of the window; drop the gradients of frozen optimizers; save if
        it is time.

        What was asked for while the ranks' weights were not the same is done after their average.
        """
        self.train_step.end_window()
        self.train_step.drop_frozen_gradients()
        self.context.strategy.after_window(self.context.modules)
        self.on_average()
        if self.saves_by_steps:
            self._save_if_due(0.0, self.context.progress.step - self.last_step)

    def on_average(self) -> None:
        """Do what was put off until the ranks' weights are averaged, if they are."""
        if self._put_off is not None and not self.would_be_incomplete():
            self.on_sync(self._put_off)

    def _save_if_due(self, seconds: float, steps: int) -> None:
        if not self.would_be_incomplete() and self.policy.save_if_due(seconds, steps):
            self._start_anew()

    def would_be_incomplete(self) -> bool:
        """Return whether a checkpoint would be incomplete: unused gradients, or weights that differ
        between ranks.
        """
        progress = self.context.progress
        return (
            progress.window.num_deferred(progress.step) > 0 or self.context.strategy.weights_differ
        )

    def _start_anew(self) -> None:
        self.last_time, self.last_step = time.monotonic(), self.context.progress.step
