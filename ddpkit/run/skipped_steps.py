"""The event of the run's log about steps that were skipped, at most one from one sync of the ranks
to the next.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ddpkit.base import unwritten_skips
from ddpkit.errors import ConfigError
from ddpkit.train_logger import run_event

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpkit.training import Progress


class SkippedSteps:
    """Writes how many steps were skipped since the last time, if any were.

    Args:
        progress: of the run, with its counter of the epoch.

    Ranks: all; the main process writes.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        progress.note_skips_written(progress.nonfinite)

    def write(self) -> None:
        """Write what is new, the pending step included."""
        self._progress.resolve_pending()
        self._write_known()

    @contextlib.contextmanager
    def written_whatever_ends(self) -> Iterator[None]:
        """Return a context that writes what is new when an exception leaves it, and waits for no
        GPU.
        """
        try:
            yield
        except BaseException:
            with contextlib.suppress(ConfigError):  # a full disk must not hide the reason
                self._write_known()
            raise

    def _write_known(self) -> None:
        if fields := unwritten_skips(self._progress):
            self._progress.note_skips_written(fields["in_epoch"])
            run_event("skipped_steps", **fields)
