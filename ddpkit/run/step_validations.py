"""Validations between two optimizer steps of an epoch, after which the training goes on as if there
had been none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit.run.validations import START, STEP

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from ddpkit.run.intra_epoch_saves import IntraEpochSaves
    from ddpkit.run.validations import Validations
    from ddpkit.training import Feed, StreamFeed


class StepValidations:
    """Validates between the optimizer steps of one training pass, where a part asks for it.

    Args:
        validations: of the call of ``fit``.
        saves: of the pass; they come before a validation at the same step.
        feed: of the pass; tells whether it is at its end.
        keeping: makes a context after which the training is as it was.

    Attributes:
        has_ended: whether a validation has asked for the end of the training.

    Ranks: collective.
    """

    def __init__(
        self,
        validations: Validations,
        saves: IntraEpochSaves,
        feed: Feed | StreamFeed,
        keeping: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._validations = validations
        self._saves = saves
        self._feed = feed
        self._keeping = keeping
        self.has_ended = False

    def after(self, ready: Callable[[], object]) -> Callable[[], bool]:
        """Return what a feed calls before its next batch: the validation before the first step; or
        that of the step at which a checkpoint was made before it.

        Args:
            ready: called first; puts random streams where a checkpoint says.
        """

        def make_ready() -> bool:
            ready()
            progress = self._validations.context.progress
            if progress.validated_at == progress.optimizer_step:
                return False
            if progress.step:
                self._validate_if_due(STEP)
            elif not progress.optimizer_step:
                self._validate_if_due(START)
            return self.has_ended

        return make_ready

    def on_window(self) -> bool:
        """Save and validate if it is time; return whether the pass ends here."""
        if self._saves.follows_windows:
            self._saves.on_window()
        self._validate_if_due(STEP)
        return self.has_ended

    def _validate_if_due(self, moment: str) -> None:
        validations = self._validations
        progress = validations.context.progress
        if self._feed.length is not None and self._feed.is_at_end(progress.step):
            return  # the validation after the epoch asks again
        # gradients that wait, or weights that differ: asked again after a later step
        if self._saves.would_be_incomplete():
            return
        size = validations.size_now(moment)
        if not size or self._is_at_end():
            return
        validations.require_same(size)
        with self._keeping():
            validations.validate(progress.epoch, size)
        self.has_ended = validations.early_end.ends_pass(progress.epoch, progress.optimizer_step)

    def _is_at_end(self) -> bool:
        """Say whether the pass ends here: then the validation comes after the epoch."""
        progress = self._validations.context.progress
        limit = self._validations.context.options.optimizer_step_limit
        if limit is not None and progress.resolved.optimizer_step >= limit:
            return True
        return self._feed.is_at_end(progress.step)
