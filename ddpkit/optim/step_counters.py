"""Counts of optimizer steps, and the step that is not counted yet."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpkit.errors import DdpkitError
from ddpkit.optim.pending_step import PendingStep

if TYPE_CHECKING:
    from typing_extensions import Self

# A thread of the recipe, or of autograd, may resolve a step, too. It may ask again inside of that.
_resolving = threading.RLock()


@dataclass
class StepCounters:
    """Counts of optimizer steps, and the step that is not counted yet.

    On a GPU the last step may be pending: it is made or skipped, the host has not read which, and
    it is in no counter. :meth:`resolve_pending` counts it. The training calls that before it makes
    the next step, where the ranks sync, at a save and at the end of a pass;
    :attr:`Brain.optimizer_step <ddpkit.brain.Brain.optimizer_step>` does before it answers.

    Attributes:
        optimizer_step: updates since the run began.
        nonfinite: steps skipped in the current epoch because a gradient was not finite.
        clipped: updates of the current epoch whose gradients were scaled down to ``max_grad_norm``;
            equal on all ranks.
        empty_steps: steps of the current epoch that were left out because no batch of any rank had
            a loss.
        pending: the step that is not counted yet; None: all are counted.
        pending_error: what was raised as it was counted, until :meth:`resolve_at_sync` raises it.

    Ranks: local.

    Example:
        >>> import torch
        >>> counters = StepCounters()
        >>> def count(result): counters.optimizer_step += result.stepped
        >>> counters.pending = PendingStep(torch.tensor(3.0), None)
        >>> counters.pending.then(count)
        >>> counters.optimizer_step, counters.resolve_pending(), counters.optimizer_step
        (0, None, 1)
    """

    optimizer_step: int = 0
    nonfinite: int = 0
    clipped: int = 0
    empty_steps: int = 0
    pending: PendingStep | None = field(default=None, init=False, repr=False)
    pending_error: DdpkitError | None = field(default=None, init=False, repr=False)

    @property
    def resolved(self) -> Self:
        """These counters, once the pending step is in them."""
        self.resolve_pending()
        return self

    def resolve_pending(self) -> None:
        """Count the pending step, if there is one. An error waits for :meth:`resolve_at_sync`: this
        rank may be alone.
        """
        with _resolving:
            pending = self.pending
            # all are counted, or this very thread asks while it counts the step
            if pending is None or pending.is_resolving:
                return
            try:
                pending.resolve()
            except DdpkitError as error:
                self.pending_error = error
            finally:
                # only now: who makes the next step waits for a thread that counts this one
                self.pending = None

    def resolve_at_sync(self) -> None:
        """Count the pending step where all ranks do.

        Raises:
            DdpkitError: that step ends the run, such as too many that are not finite.

        Ranks: all, at the same step.
        """
        self.resolve_pending()
        error = self.pending_error
        self.pending_error = None
        if error is not None:
            raise error

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: it cannot count the pending step of the original."""
        self.resolve_pending()
        return vars(self).copy()
