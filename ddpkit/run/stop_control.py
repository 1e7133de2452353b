"""When and why a run stops: on all ranks, between two optimizer steps. It leaves a checkpoint and a
note.

A stop in training takes this way, from a signal or ``time_limit`` on one rank:

1. ``SignalListener`` (``control/signals.py``) notes the signal, or the clock passes the limit;
2. ``StopControl.cause`` tells it, and ``IntraEpochSaves.tell`` puts it into ``Requests``;
3. ``PeriodicSync`` adds up the requests of all ranks, and every rank has the same ``SyncReport``;
4. ``IntraEpochSaves.on_sync`` calls ``StopControl.stop_training``, unless gradients wait;
5. ``CheckpointPolicy.save_inside_epoch`` saves, unless this very step is saved already;
6. ``StopControl._end`` has the main process write the note, and raises ``RunStopped`` on all ranks.

In an evaluation ``run/evaluation_stops.py`` takes the place of 2 to 4.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.base import POSITION, host_name, stage_of
from ddpkit.comm import (
    AFTER_WATCH_SECONDS,
    get_runtime,
    limits_by_option,
    longest_wait,
    shorten_timeout,
)
from ddpkit.control import TIME_LIMIT, SignalListener, failure_notice, signal_named
from ddpkit.distributed import get_rank, is_distributed_initialized, run_on_main
from ddpkit.errors import RunStopped
from ddpkit.logger import address_of, get_logger
from ddpkit.run.process_age import seconds_since_start
from ddpkit.run.stop_note import MARKER, remove_marker, write_marker
from ddpkit.run_opts import parse_duration
from ddpkit.train_logger import loggers_of, run_event

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpkit.run.checkpoint_policy import CheckpointPolicy
    from ddpkit.training import RunContext

logger = get_logger(__name__)

TIME_LIMIT_CODE = 75  # EX_TEMPFAIL: try again later


class StopControl:
    """Knows what has asked this rank to stop, and stops the run; guards a call, whose failure ends
    the other ranks.

    Args:
        context: of the run; ``output_folder`` in its hparams is where the note goes.
        policy: saves.

    Attributes:
        signals: what signals have asked of this rank.

    Ranks: collective, but for :meth:`cause`, :meth:`guarded` and :meth:`tighten_timeouts`.
    """

    def __init__(
        self,
        context: RunContext,
        policy: CheckpointPolicy,
    ) -> None:
        options = context.options
        self.signals = SignalListener(options.stop_signals, options.save_signals)
        self._context = context
        self._policy = policy

    @contextlib.contextmanager
    def guarded(self, call: str) -> Iterator[None]:
        """Return a context for ``fit``, ``evaluate`` or ``predict``.

        Args:
            call: its name.

        Raises:
            RunStopped: the run was asked to stop.
        """
        with (
            self._own_limits(),
            POSITION.inside(self._context.progress, call),
            self.signals.listening(),
            failure_notice(),
        ):
            yield

    def tighten_timeouts(self) -> None:
        """Shorten the time for which collectives wait. At every sync: another Brain may have set a
        longer one.
        """
        timeout = self._context.options.hang_timeout
        if timeout:
            shorten_timeout(min(timeout + AFTER_WATCH_SECONDS, self._longest_wait()))

    @contextlib.contextmanager
    def _own_limits(self) -> Iterator[None]:
        """Apply this Brain's time limits; restore the limits of an enclosing Brain afterwards."""
        if not is_distributed_initialized():
            yield
            return
        options = self._context.options
        watchdog = get_runtime().watchdog
        limited = watchdog and watchdog.limited(options.hang_warning, options.hang_timeout)
        get_runtime().report.limits |= limits_by_option(
            options.distributed_timeout_minutes,
            options.hang_timeout,
        )
        # a start may take long: not the shorter wait of an earlier call
        shorten_timeout(self._longest_wait())
        try:
            with limited or contextlib.nullcontext():
                yield
        finally:
            shorten_timeout(self._longest_wait())

    def _longest_wait(self) -> float:
        options = self._context.options
        return longest_wait(options.distributed_timeout_minutes, options.hang_timeout)

    def cause(self) -> str:
        """Return why this rank was asked to stop, one of :data:`ddpkit.control.signals.CAUSES`;
        empty if it was not.
        """
        if self.signals.stop_signal:
            return signal.Signals(self.signals.stop_signal).name
        limit = self._context.options.time_limit
        over = (
            limit is not None and not get_rank() and seconds_since_start() > parse_duration(limit)
        )
        return TIME_LIMIT if over else ""

    def stop_training(
        self,
        cause: str,
        *,
        is_saved: bool = False,
    ) -> None:
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
        """Remove the note of a run that has stopped: this one is running. If it begins anew, so do
        its logs.
        """
        if self._policy.begins_anew:
            for train_logger in loggers_of(self._context.hparams):
                run_on_main(train_logger.begin_anew)
        folder = self._folder()
        if folder is not None:
            run_on_main(remove_marker, args=(folder,))

    def _end(self, stopped: RunStopped) -> None:
        """End the run once its checkpoint is there: no rank before, because launchers end all when
        one has ended.
        """
        stopped.words = str(run_on_main(self._finish, args=(stopped,)) or "")
        raise stopped

    def _finish(self, stopped: RunStopped) -> str:
        """Write down that the run has stopped, and where; return that in words."""
        checkpointer = self._policy.checkpointer
        folder = self._folder()
        progress = self._context.progress
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
            "checkpoint": None if newest is None else address_of(newest.path),
            "host": host_name(),
        }
        run_event("stopped", **facts)
        facts["time"] = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        place = (
            f"{facts['stage']} of epoch "
            f"{progress.epoch}{f' at step {progress.step}' if progress.step else ''}"
        )
        saved = (
            "There is no checkpoint."
            if newest is None
            else (f"The same command goes on from {address_of(newest.path)}.")
        )
        words = (
            f"Stopped by {stopped.cause} in {place}, after {progress.optimizer_step} optimizer "
            f"steps. {saved}"
        )
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
        folder = getattr(self._context.hparams, "output_folder", None) or checkpoints
        return None if folder is None else Path(folder)


def exit_code(cause: str) -> int:
    """Return what a process exits with that was stopped: 128 plus the signal's number, or 75 at the
    time limit.

    Ranks: local.

    Example:
        >>> exit_code("SIGTERM"), exit_code(TIME_LIMIT)
        (143, 75)
    """
    return TIME_LIMIT_CODE if cause == TIME_LIMIT else 128 + int(signal_named(cause))
