"""The epochs of one call of ``fit``: train, validate, and the reasons to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.epoch_loop import EpochCounter
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpkit.run.early_end import EarlyEnd
    from ddpkit.training import RunContext

logger = get_logger(__name__)


def is_step_limit_reached(context: RunContext) -> bool:
    """Say whether ``optimizer_step_limit`` ends the run.

    Ranks: local; alike on every rank.
    """
    limit = context.options.optimizer_step_limit
    return limit is not None and context.progress.resolved.optimizer_step >= limit


def run_epochs(
    context: RunContext,
    early_end: EarlyEnd,
    epoch_counter: Iterable[int],
    one_epoch: Callable[[int], Any],
    *,
    validates: bool,
) -> str:
    """Train and validate in every epoch.

    Args:
        context: of the run.
        early_end: whether something has asked for the end after the present epoch.
        epoch_counter: yields the numbers of epochs.
        one_epoch: trains and validates in the epoch of a number.
        validates: whether there is data for a validation.

    Returns:
        Why it ends, a ``FitResult.reason``.

    Ranks: collective.
    """
    progress = context.progress
    options = context.options
    if is_step_limit_reached(context) and (not progress.step or progress.is_validated):
        logger.info(
            "optimizer_step_limit=%s has been reached before.", options.optimizer_step_limit
        )
        return "optimizer_step_limit"
    if early_end.is_due(0):
        _leave_unfinished(epoch_counter)
        return "early_stop"
    progress.ask_for_epochs(validates=validates)
    for epoch in epoch_counter:
        one_epoch(epoch)
        progress.end_epoch()
        if options.debug and 0 < options.debug_epochs <= epoch:
            return "debug"
        if is_step_limit_reached(context):
            return "optimizer_step_limit"
        if early_end.is_due(epoch):
            return "early_stop"
    progress.end_epochs()
    if progress.resolved.optimizer_step and not progress.epochs:
        return "done_before"
    return "early_stop" if getattr(epoch_counter, "should_stop", False) is True else "epochs"


def _leave_unfinished(epoch_counter: Iterable[int]) -> None:
    """Have a further call count on after the epoch in which an earlier start has ended this one."""
    if isinstance(epoch_counter, EpochCounter):
        epoch_counter.leave_unfinished()
