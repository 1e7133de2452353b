"""The event of the run's log about steps that were skipped, at most one from one sync of the ranks to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit.train_logger import run_event

if TYPE_CHECKING:
    from ddpkit.training import Progress


class SkippedSteps:
    """Writes how many steps were skipped since the last time, if any were.

    Args:
        progress: of the run, with its counter of the epoch.

    Ranks: all; the main process writes.

    Example:
        >>> from ddpkit.training import Progress
        >>> SkippedSteps(Progress()).write()
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._told = progress.nonfinite

    def write(self) -> None:
        """Write what is new. It reads counters, and waits for a step of which the GPU has not told yet."""
        progress = self._progress
        in_epoch = progress.nonfinite
        count, self._told = in_epoch - self._told, in_epoch
        if count > 0:
            run_event(
                "skipped_steps",
                epoch=progress.epoch,
                step=progress.step,
                optimizer_step=progress.optimizer_step,
                count=count,
                in_epoch=in_epoch,
                norm=progress.skipped_norm,
            )
