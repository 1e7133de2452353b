"""Work that the end of the process waits for, such as a save."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddpkit.base import temporarily

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


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

    @property
    def is_held(self) -> bool:
        """Say whether the end has to wait: not for ever."""
        return self._since is not None and time.monotonic() - self._since < HOLD_SECONDS

    def held(self) -> AbstractContextManager[None]:
        """Return a context during which the watchdog does not end the process."""
        return temporarily(self, _since=self._since or time.monotonic())


EXIT_DELAY = ExitDelay()
