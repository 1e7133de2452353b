"""Work that must be finished before the process may end, such as a save."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HOLD_SECONDS = 25.0  # for a save that the end of the process waits for; launchers kill after 30


class ExitDelay:
    """Delays the end of this process while a checkpoint is being saved, for a limited time.

    Example:
        >>> with EXIT_DELAY.held():
        ...     EXIT_DELAY.is_held
        True
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._holders = 0  # threads may hold it, too
        self._mutex = threading.Lock()

    @property
    def is_held(self) -> bool:
        """Say whether the end has to wait: not for ever."""
        return self._since is not None and time.monotonic() - self._since < HOLD_SECONDS

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Return a context during which the watchdog does not end the process."""
        with self._mutex:
            self._holders += 1
            self._since = self._since or time.monotonic()
        try:
            yield
        finally:
            with self._mutex:
                self._holders -= 1
                self._since = self._since if self._holders else None


EXIT_DELAY = ExitDelay()
