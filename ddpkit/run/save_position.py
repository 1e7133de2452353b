"""The training position that a checkpoint holds, whatever hook saves it.

A checkpoint says whether its position is the end of an epoch. The recipe says so, and often cannot
know: a pass may have ended at ``optimizer_step_limit``, and after ``fit`` no epoch is begun. Where
the run knows better, it decides. Inside of an epoch the position is that of the training, also
while a validation counts steps of its own.
"""

from __future__ import annotations

import contextlib
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ddpkit.base import temporarily
from ddpkit.logger import get_logger
from ddpkit.training import EpochPhase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpkit.run.run_state import RunState
    from ddpkit.training import RunContext

logger = get_logger(__name__)

LEAVES_OUT = (
    "A checkpoint with end_of_epoch=True (the default) is made in the middle of an epoch: a run "
    "that goes on from it leaves out the rest of the epoch. Save with end_of_epoch=False."
)
NOT_VALIDATED = (
    "A checkpoint with end_of_epoch=True (the default) is made before the validation of its "
    "epoch: a run that goes on from it leaves that validation out. Save in on_stage_end of "
    "Stage.VALID, or with end_of_epoch=False."
)
INSIDE_STEP = (
    "A checkpoint is made inside of an optimizer step: the gradients of %d batch(es) are not in it."
)
_OWN_LOOP = frozenset({EpochPhase.ASKED})  # a recipe's own _fit_train: only it knows where it is


class SavePosition:
    """Gives each save the position of the training.

    Args:
        context: of the run.
        run_state: of the run.

    Ranks: local, but inside of a training batch, where the ranks that save together exchange their
    states.
    """

    def __init__(self, context: RunContext, run_state: RunState) -> None:
        self.context = context
        self.run_state = run_state
        self.rank_state = run_state.rank_state

    @contextlib.contextmanager
    def of_save(
        self,
        end_of_epoch: bool,
        *,
        is_between_batches: bool,
    ) -> Iterator[bool]:
        """Return a context for a save, in which the run's state has the position to be saved.

        Args:
            end_of_epoch: what the save was called with.
            is_between_batches: whether the run itself saves in a training pass, and has set the
                position.

        Yields:
            Whether the position of the checkpoint is the end of an epoch.
        """
        phase = self.context.progress.phase
        passed_on = self.run_state.passed_on
        if passed_on is not None:
            yield passed_on.end_of_epoch
        elif not self.run_state.calls.number or phase in _OWN_LOOP:
            yield end_of_epoch
        elif self.context.progress.is_between_steps:
            with self.context.progress.at_last_update():
                yield False
        elif phase is EpochPhase.IN_PASS:
            if end_of_epoch:
                logger.warning_once(LEAVES_OUT)
            is_set = end_of_epoch or is_between_batches
            with contextlib.nullcontext() if is_set else self._inside_batch():
                yield end_of_epoch
        elif self._has_ended(end_of_epoch):
            yield True
        else:
            with self._at_end_of_pass():
                yield False

    def _has_ended(self, end_of_epoch: bool) -> bool:
        """Return whether an epoch has ended where the run is now, outside of a training pass."""
        progress = self.context.progress
        phase = progress.phase
        if phase is EpochPhase.OUTSIDE:
            return True
        if phase is EpochPhase.RECOVERED:
            return False
        if phase is EpochPhase.BEGUN:
            if end_of_epoch:
                logger.warning_once(LEAVES_OUT)
            return end_of_epoch
        if not progress.is_whole:
            return False
        if phase is EpochPhase.OVER and not progress.is_fitting:
            return True
        if end_of_epoch and progress.validates and not progress.is_validated:
            logger.warning_once(NOT_VALIDATED)
        return end_of_epoch

    @contextlib.contextmanager
    def _at_end_of_pass(self) -> Iterator[None]:
        """Return a context with the position, and the losses, of the last batch that was trained
        on.
        """
        progress = self.context.progress
        sums = progress.train_sums or (0.0, 0.0, 0)
        mean = float(Fraction(sums[0]) / Fraction(sums[1])) if sums[1] else 0.0
        with (
            progress.at_end_of_pass(mean),
            temporarily(self.run_state, loss_sums=list(sums)),
        ):
            yield

    @contextlib.contextmanager
    def with_sums(self, sums: list[Any] | None) -> Iterator[None]:
        """Return a context for a save with the loss sums of all ranks; None: this rank's sums stand
        for all.
        """
        self.run_state.loss_sums = sums
        try:
            yield
        finally:
            self.run_state.loss_sums = None
            if self.rank_state.states is not None:
                self.rank_state.states.gathered = None

    @contextlib.contextmanager
    def _inside_batch(self) -> Iterator[None]:
        """Return a context for a save in a hook of a training batch; it notes the loss that the
        save lacks.
        """
        progress = self.context.progress
        step = self.context.progress.step
        states = self.rank_state.states
        pending, is_before = self._undone()
        if pending:
            logger.warning_once(INSIDE_STEP, pending)
        is_known = self._is_known()
        lacks_loss = self.context.recipe.has_own_fit_batch and not (is_known or is_before)
        self.run_state.lacks = step if lacks_loss else None
        self.rank_state.is_inside_batch = not is_before
        self.rank_state.goes_back_to_begin = is_before and not progress.window_end
        try:
            with progress.at_last_update() if is_before else contextlib.nullcontext():
                have_all_come = states is not None and states.gather_if_all_come()
                with self.with_sums(
                    progress.add_totals(self.rank_state.own_sums()) if have_all_come else None
                ):
                    yield
        finally:
            self.run_state.lacks = None
            self.rank_state.is_inside_batch = False
            self.rank_state.goes_back_to_begin = False

    def _is_known(self) -> bool:
        """Return whether the loss of the current batch is known, and its step was made if it was
        due.
        """
        progress = self.context.progress
        step = self.context.progress.step
        has_stepped = progress.result_of == step and progress.window_end == step
        return progress.result is not None and (progress.result_at == step or has_stepped)

    def _undone(self) -> tuple[int, bool]:
        """Return how many batches the weights lack, up to the current one, if the position counts
        it as done.

        The second value says whether the position goes back to the last optimizer step instead;
        then no loss is missing.
        """
        progress = self.context.progress
        window = self.context.progress.window
        if self._is_known():
            return window.num_deferred(progress.step), False
        undone = progress.step - progress.window_end
        if self.context.recipe.has_own_fit_batch and self._may_have_stepped():
            return window.num_deferred(progress.step) or window.num_deferred(
                progress.step - 1
            ), False
        return (0, True) if undone == 1 else (undone, False)

    def _may_have_stepped(self) -> bool:
        """Return whether an own ``fit_batch`` has stepped in this window, or steps without the
        library noticing.
        """
        progress = self.context.progress
        window = self.context.progress.window
        is_seen = progress.optimizer_step or not (progress.window_end or progress.epochs)
        is_over = window.number in {window.stepped_in, window.skipped_in}
        return is_over or progress.window_end == progress.step or not is_seen
