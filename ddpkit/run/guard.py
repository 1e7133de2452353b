"""Around ``fit``, ``evaluate`` and ``predict``: where this rank is, why it fails, and how long others wait for it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ddpkit.base import POSITION
from ddpkit.comm import AFTER_WATCH_SECONDS, get_runtime, longest_wait, set_hang_limits, shorten_timeout
from ddpkit.control import failure_notice
from ddpkit.distributed import is_distributed_initialized

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpkit.base import SignalListener
    from ddpkit.run_opts import RunOptions
    from ddpkit.training import Progress


class RunGuard:
    """Tells the other ranks where this one is and why it fails, and sets the limits of time of a run.

    Args:
        options: of the run.
        progress: the position to report.
        signals: are heard while a call is guarded.

    Ranks: local.
    """

    def __init__(self, options: RunOptions, progress: Progress, signals: SignalListener) -> None:
        self._options, self._progress, self._signals = options, progress, signals

    @contextlib.contextmanager
    def guarded(self, call: str) -> Iterator[None]:
        """Return a context for ``fit``, ``evaluate`` or ``predict``.

        Args:
            call: its name.

        Raises:
            RunStopped: the run was asked to stop.
        """
        with self._own_limits(), POSITION.inside(self._progress, call), self._signals.listening(), failure_notice():
            yield

    def tighten_timeouts(self) -> None:
        """Shorten the time for which collectives wait. At every sync: another Brain may have set a longer one."""
        timeout = self._options.hang_timeout
        if timeout:
            shorten_timeout(min(timeout + AFTER_WATCH_SECONDS, self._longest_wait()))

    @contextlib.contextmanager
    def _own_limits(self) -> Iterator[None]:
        """Apply this Brain's time limits; restore the limits of an enclosing Brain afterwards."""
        if not is_distributed_initialized():
            yield
            return
        runtime = get_runtime()
        limits = None if runtime.watchdog is None else (runtime.watchdog.hang_warning, runtime.watchdog.hang_timeout)
        set_hang_limits(self._options.hang_warning, self._options.hang_timeout)
        shorten_timeout(self._longest_wait())  # a start may take long, whatever one has set that is done with it
        try:
            yield
        finally:
            if is_distributed_initialized() and get_runtime() is runtime:
                if limits is not None:
                    set_hang_limits(*limits)
                shorten_timeout(self._longest_wait())

    def _longest_wait(self) -> float:
        return longest_wait(self._options.distributed_timeout_minutes, self._options.hang_timeout)
