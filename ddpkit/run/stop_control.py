"""Why and when a run stops: signals and the time limit; on all ranks at the same step, with a checkpoint and a note."""

from __future__ import annotations

import datetime as dt
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.base import SignalListener, host_name, stage_of
from ddpkit.control import (
    MARKER,
    TIME_LIMIT,
    exit_code,
    parse_duration,
    remove_marker,
    require_stop_signals,
    seconds_since_start,
    write_marker,
)
from ddpkit.distributed import get_rank, run_on_main
from ddpkit.errors import RunStopped
from ddpkit.logger import get_logger
from ddpkit.train_logger import run_event

if TYPE_CHECKING:
    from types import SimpleNamespace

    from ddpkit.run.checkpoint_policy import CheckpointPolicy
    from ddpkit.run_opts import RunOptions
    from ddpkit.training import Progress

logger = get_logger(__name__)


class StopControl:
    """Knows what has asked this rank to stop, and stops the run.

    Args:
        options: of the run.
        hparams: of the recipe; ``output_folder`` in it is where the note goes.
        progress: of the run.
        policy: saves.

    Attributes:
        signals: what signals have asked of this rank.

    Raises:
        ConfigError: an option cannot work.

    Ranks: collective, but for :attr:`cause`.
    """

    def __init__(
        self, options: RunOptions, hparams: SimpleNamespace, progress: Progress, policy: CheckpointPolicy
    ) -> None:
        require_stop_signals(options.stop_signals)
        self.signals = SignalListener(options.stop_signals, options.save_signals)
        self._seconds_allowed = None if options.time_limit is None else parse_duration(options.time_limit)
        self._hparams, self._progress, self._policy = hparams, progress, policy

    def cause(self) -> str:
        """Return what has asked this rank to stop, one of :data:`ddpkit.control.stopping.CAUSES`, or nothing."""
        if self.signals.stop_signal:
            return signal.Signals(self.signals.stop_signal).name
        over = self._seconds_allowed is not None and seconds_since_start() > self._seconds_allowed
        return TIME_LIMIT if over and not get_rank() else ""

    def stop_training(self, cause: str, *, is_saved: bool = False) -> None:
        """Save, and end the run; between two optimizer steps.

        Args:
            cause: what has asked for it.
            is_saved: whether a checkpoint of this very step is there already.

        Raises:
            RunStopped: always.
        """
        if not is_saved:
            self._policy.save_inside_epoch()
        self._end(RunStopped(exit_code(cause), cause))

    def stop_evaluation(self, stopped: RunStopped) -> None:
        """Save where training ended before this evaluation, and end the run.

        Raises:
            RunStopped: always.
        """
        self._policy.save_before_evaluation()
        self._end(stopped)

    def remove_note(self) -> None:
        """Remove the note of a run that has stopped: this one is running."""
        folder = self._folder()
        if folder is not None:
            run_on_main(remove_marker, args=(folder,))

    def _end(self, stopped: RunStopped) -> None:
        """End the run once its checkpoint is there: no rank before, because launchers end all when one has ended."""
        stopped.words = str(run_on_main(self._finish, args=(stopped,)) or "")
        raise stopped

    def _finish(self, stopped: RunStopped) -> str:
        """Write down that the run has stopped, and where; return that in words."""
        checkpointer, folder, progress = self._policy.checkpointer, self._folder(), self._progress
        newest = None
        if checkpointer is not None:
            checkpointer.wait()
            newest = checkpointer.find_checkpoint()
        facts: dict[str, Any] = {
            "reason": stopped.cause,
            "exit_code": stopped.code,
            "stage": stage_of(progress),
            "epoch": progress.epoch,
            "step": progress.step,
            "optimizer_step": progress.optimizer_step,
            "checkpoint": None if newest is None else str(newest.path),
            "host": host_name(),
            "time": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        }
        run_event("stopped", **facts)
        place = f"{facts['stage']} of epoch {progress.epoch} at step {progress.step}"
        saved = "There is no checkpoint." if newest is None else f"The run goes on from {newest.path}."
        words = f"Stopped by {stopped.cause} in {place}, after {progress.optimizer_step} optimizer steps. {saved}"
        logger.warning("%s", words)
        if folder is not None:
            try:
                write_marker(folder, facts)
            except OSError as error:
                logger.warning("%s cannot be written: %s", folder / MARKER, error)
        return words

    def _folder(self) -> Path | None:
        """Return the output folder of the run, or else its checkpoint folder."""
        checkpoints = getattr(self._policy.checkpointer, "checkpoints_dir", None)
        folder = getattr(self._hparams, "output_folder", None) or checkpoints
        return None if folder is None else Path(folder)
