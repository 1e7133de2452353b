"""The wish of a recipe or a part that the training ends after the present epoch."""

from __future__ import annotations

from ddpkit.distributed import sum_over_ranks
from ddpkit.logger import get_logger

logger = get_logger(__name__)

STOPPED = "Training ends after epoch %d: %s."
STOPPED_BEFORE = "Nothing is trained: %s."
ELSEWHERE = "another process has called stop_training"


class EarlyEnd:
    """Whether this call of ``fit`` is to end after the present epoch, and why.

    Attributes:
        reason: as this rank was told; empty: it was told nothing.

    Ranks: as its methods say.

    Example:
        >>> end = EarlyEnd()
        >>> end.ask("the loss is small enough")
        >>> end.is_due(3)
        True
    """

    def __init__(self) -> None:
        self.reason = ""

    def begin(self) -> None:
        """Forget what an earlier call of ``fit`` was told.

        Ranks: local.
        """
        self.reason = ""

    def ask(self, reason: str) -> None:
        """Ask for the end; the first reason counts.

        Args:
            reason: in words, for the log.

        Ranks: local.
        """
        self.reason = self.reason or reason or "stop_training was called"

    def is_due(self, epoch: int) -> bool:
        """Say whether any rank has asked for the end, and tell the user.

        Args:
            epoch: that is over; 0 before the first.

        Ranks: collective: one rank may have asked alone, and none must end without the others.
        """
        # A sum has a limit of time and names a rank that does not come. Main-only work has none.
        asked = sum_over_ranks([float(bool(self.reason))], "the end of an epoch")[0]
        if not asked:
            return False
        reason = self.reason or ELSEWHERE
        if epoch:
            logger.announce(STOPPED, epoch, reason)
        else:
            logger.announce(STOPPED_BEFORE, reason)
        return True
