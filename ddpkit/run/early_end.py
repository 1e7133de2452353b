"""The request of a recipe or a part to end the training after the present epoch."""

from __future__ import annotations

from ddpkit.distributed import sum_over_ranks
from ddpkit.logger import get_logger

logger = get_logger(__name__)

STOPPED = "Training ends after epoch %d: %s."
STOPPED_INSIDE = "Training ends in epoch %d, after optimizer step %d: %s."
STOPPED_BEFORE = "Nothing is trained: %s."
ELSEWHERE = "another process has called stop_training"


class EarlyEnd:
    """Whether this call of ``fit`` is to end after the present epoch, and why.

    Attributes:
        reason: as this rank was told; empty: it was told nothing.
        has_ended_pass: whether a validation between two steps has ended the training pass.

    Ranks: as its methods say.

    Example:
        >>> end = EarlyEnd()
        >>> end.ask("the loss is small enough")
        >>> end.is_due(3)
        True
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what an earlier call of ``fit`` was told.

        Ranks: local.
        """
        self.reason = ""
        self.has_ended_pass = False

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
        if self.has_ended_pass:
            return True  # on all ranks, and the user was told
        if not self._is_asked():
            return False
        reason = self.reason or ELSEWHERE
        if epoch:
            logger.announce(STOPPED, epoch, reason)
        else:
            logger.announce(STOPPED_BEFORE, reason)
        return True

    def ends_pass(self, epoch: int, optimizer_step: int) -> bool:
        """Say whether the training ends here, after a validation between two steps.

        Args:
            epoch: that is being trained.
            optimizer_step: updates since the run began.

        Ranks: collective, as :meth:`is_due`.
        """
        self.has_ended_pass = self._is_asked()
        if self.has_ended_pass:
            logger.announce(STOPPED_INSIDE, epoch, optimizer_step, self.reason or ELSEWHERE)
        return self.has_ended_pass

    def _is_asked(self) -> bool:
        # A sum has a limit of time and names a rank that does not come. Main-only work has none.
        return bool(sum_over_ranks([float(bool(self.reason))], "the end of an epoch")[0])
