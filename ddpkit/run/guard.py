"""Around ``fit``, ``evaluate`` and ``predict``: where this rank is, why it fails, and how long others wait for it."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

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
from ddpkit.control.rank_status import POSITION
from ddpkit.distributed import is_distributed_initialized

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpkit.base.signals import Interrupts
    from ddpkit.run_opts import RunOptions
    from ddpkit.training.loop import Progress

# How long the collectives of a group wait since a Brain has shortened that.
_shortened: weakref.WeakKeyDictionary[GroupState, float] = weakref.WeakKeyDictionary()


class RunGuard:
    """Tells the other ranks where this one is and why it fails, and sets the limits of time of a run.

    Args:
        options: of the run.
        progress: whose position is told.
        interrupts: signals are heard while a call is guarded.

    Ranks: local.
    """

    def __init__(self, options: RunOptions, progress: Progress, interrupts: Interrupts) -> None:
        self._options, self._progress, self._interrupts = options, progress, interrupts
        self._is_tightened = False
        watch_loader_workers()

    @contextlib.contextmanager
    def guarded(self, call: str) -> Iterator[None]:
        """Return a context for ``fit``, ``evaluate`` or ``predict``.

        Args:
            call: its name.

        Raises:
            RunStopped: the run was asked to stop.
        """
        with self._own_limits(), POSITION.inside(self._progress, call), self._interrupts.heard(), failure_notice():
            yield

    def tighten_timeouts(self) -> None:
        """Shorten the time for which collectives wait in this call, once every rank has made its first steps."""
        if self._options.hang_timeout and not self._is_tightened and is_distributed_initialized():
            self._wait_at_most(self._options.hang_timeout + AFTER_WATCH_SECONDS)
        self._is_tightened = True

    @contextlib.contextmanager
    def _own_limits(self) -> Iterator[None]:
        """Have this Brain's limits of time count, and those of a Brain around it again afterwards."""
        if not is_distributed_initialized():
            yield
            return
        state, is_tightened = group_state(), self._is_tightened
        watch, seconds = state.watch, _shortened.get(state)
        limits = None if watch is None else (watch.hang_warning, watch.hang_timeout)
        set_hang_limits(self._options.hang_warning, self._options.hang_timeout)
        self._wait_at_most(None)  # a start may take long, whatever one has set that is done with it
        self._is_tightened = False
        try:
            yield
        finally:
            self._is_tightened = is_tightened
            if is_distributed_initialized() and group_state() is state:
                if limits is not None:
                    set_hang_limits(*limits)
                self._wait_at_most(seconds)

    def _wait_at_most(self, seconds: float | None) -> None:
        """Have collectives wait so long, or as long as the option says that they may."""
        state = group_state()
        at_most = longest_wait(self._options.distributed_timeout_minutes, self._options.hang_timeout)
        if seconds != _shortened.get(state):
            shorten_timeout(at_most if seconds is None else min(seconds, at_most))
            _shortened.pop(state, None)
        if seconds is not None:
            _shortened[state] = seconds
