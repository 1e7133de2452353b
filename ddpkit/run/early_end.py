"""The wish of a recipe or a part that the training ends after the present epoch."""

from __future__ import annotations

from ddpkit.distributed import run_on_main
from ddpkit.logger import get_logger

logger = get_logger(__name__)

ALONE = (
    "stop_training was called on this process and not on the main one, whose word counts: the "
    "training goes on. Call it on every process alike."
)
STOPPED = "Training ends after epoch %d: %s."
STOPPED_BEFORE = "Nothing is trained: %s."


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
        """Forget what an earlier call of ``fit`` was told."""
        self.reason = ""

    def ask(self, reason: str) -> None:
        """Ask for the end; the first reason counts.

        Args:
            reason: in words, for the log.
        """
        self.reason = self.reason or reason or "stop_training was called"

    def is_due(self, epoch: int) -> bool:
        """Say whether the main process was asked for the end, and tell the user.

        Its word counts, as one rank may have been asked alone: no rank ends without the others.

        Args:
            epoch: that is over; 0 before the first.

        Ranks: collective.
        """
        # through the launcher's store: an epoch has no collective more than before
        reason = run_on_main(lambda: self.reason) or ""
        if not reason:
            if self.reason:
                logger.warning(ALONE, main_process_only=False)
                self.reason = ""
            return False
        if epoch:
            logger.announce(STOPPED, epoch, reason)
        else:
            logger.announce(STOPPED_BEFORE, reason)
        return True
