"""How a run ends when it is asked to: on all ranks at the same step, with a checkpoint, and with word of it."""

from __future__ import annotations

import contextlib
import datetime as dt
import signal
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.base.signals import Interrupts
from ddpkit.checkpoints import Checkpointer
from ddpkit.comm.process_group import (
    AFTER_WATCH_SECONDS,
    GroupState,
    group_state,
    longest_wait,
    set_hang_limits,
    shorten_timeout,
)
from ddpkit.control.failure import failure_notice
from ddpkit.control.loader_workers import watch_loader_workers
from ddpkit.control.rank_status import POSITION, host_name, stage_of
from ddpkit.control.stopping import (
    MARKER,
    TIME_LIMIT,
    exit_code,
    parse_duration,
    remove_marker,
    require_stop_signals,
    seconds_since_start,
    write_marker,
)
from ddpkit.distributed import is_distributed_initialized, run_on_main
from ddpkit.errors import RunStopped
from ddpkit.logger import get_logger
from ddpkit.run.saving import INTRA_EPOCH_KEY, Saving
from ddpkit.train_logger import run_event

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = get_logger(__name__)

# How long the collectives of a group wait since a Brain has shortened that.
_shortened: weakref.WeakKeyDictionary[GroupState, float] = weakref.WeakKeyDictionary()


class Ending(Saving):
    """The half of the Brain that comes to an end when it is asked to.

    Attributes:
        interrupts: what signals have asked of this rank.

    Ranks: collective.

    Example:
        >>> issubclass(Ending, Saving)
        True
    """

    _interrupts: Interrupts
    _seconds_allowed: float | None = None
    _is_settled = False

    def _prepare_ending(self) -> None:
        """Read the options that say when to stop, and after how long without a step.

        Raises:
            ConfigError: one of them cannot work.
        """
        require_stop_signals(self.stop_signals)
        self._interrupts = Interrupts(self.stop_signals, self.save_signals)
        self._seconds_allowed = None if self.time_limit is None else parse_duration(self.time_limit)
        watch_loader_workers()

    @contextlib.contextmanager
    def _attended(self, call: str) -> Iterator[None]:
        """Return a context for ``fit`` or ``evaluate``: others learn where this rank is, and why it fails.

        Args:
            call: its name.

        Raises:
            RunStopped: the run was asked to stop.
        """
        with self._own_limits(), POSITION.inside(self.progress, call), self._interrupts.heard(), failure_notice():
            yield

    @contextlib.contextmanager
    def _own_limits(self) -> Iterator[None]:
        """Have this Brain's limits of time count, and those of a Brain around it again afterwards."""
        if not is_distributed_initialized():
            yield
            return
        state, is_settled = group_state(), self._is_settled
        watch, seconds = state.watch, _shortened.get(state)
        limits = None if watch is None else (watch.hang_warning, watch.hang_timeout)
        set_hang_limits(self.hang_warning, self.hang_timeout)
        self._wait_at_most(None)  # a start may take long, whatever one has set that is done with it
        self._is_settled = False
        try:
            yield
        finally:
            self._is_settled = is_settled
            if is_distributed_initialized() and group_state() is state:
                if limits is not None:
                    set_hang_limits(*limits)
                self._wait_at_most(seconds)

    def _wait_at_most(self, seconds: float | None) -> None:
        """Have collectives wait so long, or as long as the option says that they may."""
        state, at_most = group_state(), longest_wait(self.distributed_timeout_minutes, self.hang_timeout)
        if seconds != _shortened.get(state):
            shorten_timeout(at_most if seconds is None else min(seconds, at_most))
            _shortened.pop(state, None)
        if seconds is not None:
            _shortened[state] = seconds

    def _settle(self) -> None:
        """Shorten the time for which collectives wait in this call, once every rank has made its first steps."""
        if self.hang_timeout and not self._is_settled and is_distributed_initialized():
            self._wait_at_most(self.hang_timeout + AFTER_WATCH_SECONDS)
        self._is_settled = True

    def _stop_cause(self) -> str:
        """Return what has asked this rank to stop, one of :data:`ddpkit.control.stopping.CAUSES`, or nothing."""
        if self._interrupts.stop_signal:
            return signal.Signals(self._interrupts.stop_signal).name
        over = self._seconds_allowed is not None and seconds_since_start() > self._seconds_allowed
        return TIME_LIMIT if over and self.rank == 0 else ""

    def _stop_now(self, cause: str, *, is_saved: bool = False) -> None:
        """Save where training is, and end the run; between two optimizer steps, and on all ranks.

        Args:
            cause: what has asked for it, one of :data:`ddpkit.control.stopping.CAUSES`.
            is_saved: whether a checkpoint of this very step is there already.

        Raises:
            RunStopped: always.
        """
        if not is_saved:
            with self._between_batches():
                self._save_intra_epoch_ckpt()
        self._leave(RunStopped(exit_code(cause), cause))

    def _stop_in_evaluation(self, stopped: RunStopped) -> None:
        """Save where training ended before this evaluation, and end the run.

        Raises:
            RunStopped: always.
        """
        progress, checkpointer = self.progress, self.checkpointer
        if self._fitting and checkpointer is not None and progress.trained is not None and progress.sums is not None:
            step, meter = progress.step, progress.meter
            progress.step, progress.meter = progress.closed, progress.trained
            self._saved_sums = list(progress.sums)
            try:
                with self._between_batches():
                    checkpointer.save_and_keep_only(
                        end_of_epoch=False,
                        num_to_keep=1,
                        ckpt_predicate=lambda checkpoint: INTRA_EPOCH_KEY in checkpoint.meta,
                        meta={INTRA_EPOCH_KEY: True},
                    )
            finally:
                progress.step, progress.meter, self._saved_sums = step, meter, None
        self._leave(stopped)

    def _leave(self, stopped: RunStopped) -> None:
        """End the run once its checkpoint is there: no rank before, because launchers end all when one has ended.

        Raises:
            RunStopped: always.
        """
        stopped.words = str(run_on_main(self._finish, args=(stopped,)) or "")
        raise stopped

    def _take_marker_away(self) -> None:
        """Take away the word that a stopped run has left: this one is running."""
        folder = self._folder()
        if folder is not None:
            run_on_main(remove_marker, args=(folder,))

    def _finish(self, stopped: RunStopped) -> str:
        """Write down that the run has stopped, and where; return that in words."""
        checkpointer, folder = self.checkpointer, self._folder()
        if isinstance(checkpointer, Checkpointer):
            checkpointer.wait()
        newest = checkpointer.find_checkpoint() if isinstance(checkpointer, Checkpointer) else None
        facts: dict[str, Any] = {
            "reason": stopped.cause,
            "exit_code": stopped.code,
            "stage": stage_of(self.progress),
            "epoch": self.progress.epoch,
            "step": self.progress.step,
            "optimizer_step": self.optimizer_step,
            "checkpoint": None if newest is None else str(newest.path),
            "host": host_name(),
            "time": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        }
        run_event("stopped", **facts)
        words = (
            f"Stopped by {stopped.cause} in {facts['stage']} of epoch {facts['epoch']} at step {facts['step']}, after "
            f"{facts['optimizer_step']} optimizer steps. "
            f"{'There is no checkpoint.' if newest is None else f'The run goes on from {newest.path}.'}"
        )
        logger.warning("%s", words)
        if folder is not None:
            try:
                write_marker(folder, facts)
            except OSError as error:
                logger.warning("%s cannot be written: %s", folder / MARKER, error)
        return words

    def _folder(self) -> Path | None:
        """Return the folder of the run: that of its outputs, or else of its checkpoints."""
        folder = getattr(self.hparams, "output_folder", None)
        if folder is None:
            folder = getattr(self.checkpointer, "checkpoints_dir", None)
        return None if folder is None else Path(folder)
