"""When a call of ``fit`` validates: after each epoch, or as the parts of the recipe say."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ddpkit.base import POSITION, do_nothing, latest_statuses, temporarily
from ddpkit.comm import get_runtime
from ddpkit.distributed import get_world_size, start_sum_over_ranks
from ddpkit.errors import ConfigError
from ddpkit.launch import find_slice
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpkit.run.early_end import EarlyEnd
    from ddpkit.run.evaluation_sets import EvaluationSets
    from ddpkit.training import RunContext

START = "start"
STEP = "step"
EPOCH = "epoch"
EVENT = "is_validation_due"
ASKED = "a validation that a part asks for"
NO_DATA = (
    "parts: {} says when to validate, and fit was given no valid_set. Give one, or leave the part "
    "out."
)
NOT_ALIKE = (
    "is_validation_due was answered differently on two ranks, at optimizer step {}: this rank asks "
    "for {}. Decide by what is equal on all ranks, such as brain.optimizer_step."
)
NO_ELSEWHERE = (
    "is_validation_due was answered differently on two ranks, at optimizer step {}: this rank asks "
    "for a validation, and rank {} trains on without it. Decide by what is equal on all ranks, "
    "such as brain.optimizer_step."
)


class Validations:
    """Decides when a call of ``fit`` validates, alike on every rank, and does it.

    Args:
        context: of the run.
        early_end: whether something has asked for the end of the training.

    Attributes:
        most_batches: of each set and process that the running validation has; infinity: all.

    Ranks: collective, but for :meth:`begin_fit` and :meth:`end_fit`.
    """

    def __init__(self, context: RunContext, early_end: EarlyEnd) -> None:
        self.context = context
        self.early_end = early_end
        self.most_batches = math.inf
        self._brain: Any = None
        self._fit_valid: Callable[[Any, int, bool], object] = do_nothing
        self._sets: EvaluationSets | None = None
        self._enable_bar = False
        self._after_epoch: float | None = None  # decided, and not made yet

    def begin_fit(
        self,
        brain: Any,
        fit_valid: Callable[[Any, int, bool], object],
        sets: EvaluationSets | None,
        *,
        enable: bool,
    ) -> None:
        """Note how this call of ``fit`` validates.

        Args:
            brain: of the recipe.
            fit_valid: the recipe's ``_fit_valid``.
            sets: the loaders of the data; None: there is none.
            enable: show progress.

        Raises:
            ConfigError: a part says when to validate, and there is no data for it.
        """
        parts = self.context.parts
        if sets is None and parts.hears(EVENT):
            raise ConfigError(NO_DATA.format(parts.listeners(EVENT)))
        self._brain = brain
        self._fit_valid = fit_valid
        self._sets = sets
        self._enable_bar = enable
        self._after_epoch = None

    def end_fit(self) -> None:
        """Let the data of this call go."""
        self._brain = self._sets = None
        self._fit_valid = do_nothing

    @property
    def follows_steps(self) -> bool:
        """Whether a part may ask for a validation between two steps."""
        asks = self._sets is not None and self.context.parts.hears(EVENT)
        # a replay needs them: a recipe may lower its learning rate in one
        plan = find_slice()
        return asks and (plan is None or plan.replayed_to > 0)

    def validate(self, epoch: int, batches: float = math.inf) -> None:
        """Validate now.

        Args:
            epoch: that is being trained, or was.
            batches: of each set and process; infinity: all.
        """
        sets = self._sets
        if sets is None:
            self._fit_valid(None, epoch, self._enable_bar)
            return
        with temporarily(self, most_batches=batches):
            for name, loader in sets.deciding_last():
                with self.context.progress.on_set(name, decides=name == sets.deciding):
                    self._fit_valid(loader, epoch, self._enable_bar)
        self.context.progress.note_validation()  # also where the recipe has made it by itself

    # ------------------------------------------------------------------ between two steps

    def size_now(self, moment: str) -> float:
        """Return on how many batches of each set to validate between two steps; 0: not now.

        Args:
            moment: ``"start"`` or ``"step"``.
        """
        return self.context.parts.validation_size(self._brain, moment) or 0.0

    # ------------------------------------------------------------------ after an epoch

    def plan_after_epoch(self) -> None:
        """Decide, when the training of an epoch is over, whether a validation follows."""
        self._after_epoch = self._size_after_epoch()
        self.context.progress.plan_validation(is_due=self._after_epoch > 0)

    def after_epoch(self, epoch: int) -> None:
        """Validate after an epoch, if a validation is due.

        Args:
            epoch: that was trained, perhaps in a way of the recipe's own.
        """
        size = self._size_after_epoch() if self._after_epoch is None else self._after_epoch
        self._after_epoch = None
        if size or self._sets is None:
            with self.context.progress.with_train_loss():
                self.validate(epoch, size)

    def _size_after_epoch(self) -> float:
        progress = self.context.progress
        if self._sets is None:
            return 0.0
        if not self.context.parts.hears(EVENT):
            return math.inf
        is_behind = progress.validated_at == progress.resolved.optimizer_step
        if is_behind and self.early_end.has_ended_pass:
            return 0.0  # that validation has ended the training
        by_epoch = self.context.parts.validation_size(self._brain, EPOCH)
        size = math.inf if by_epoch is None else by_epoch
        if not is_behind and progress.optimizer_step > progress.began_at:
            size = max(size, self.size_now(STEP))
        self.require_same(size)
        return size

    def require_same(self, size: float) -> None:
        """Have the ranks compare what they are about to validate on.

        Args:
            size: batches of each set; infinity: all.

        Raises:
            ConfigError: another rank has another number.
        """
        own = -1.0 if math.isinf(size) else size
        ranks = get_world_size()
        # patient, as it looks where the others are meanwhile
        total, squares = start_sum_over_ranks(
            [own, own * own], ASKED, is_patient=True, look=self._require_presence
        )()
        if total != own * ranks or squares != own * own * ranks:
            asked = "all batches" if math.isinf(size) else f"{size:.0f} batches"
            raise ConfigError(NOT_ALIKE.format(self.context.progress.optimizer_step, asked))

    def _require_presence(self) -> None:
        """Refuse ranks that train on while this one waits for them: they have said no.

        Raises:
            ConfigError: there is one.
        """
        own = POSITION.progress
        for status in latest_statuses(get_runtime().report):
            trains = status.stage == Stage.TRAIN.name and not status.doing
            is_here = status.beats and status.session == POSITION.session
            if is_here and trains and (status.epoch, status.step) > (own.epoch, own.step):
                raise ConfigError(
                    NO_ELSEWHERE.format(self.context.progress.optimizer_step, status.rank)
                )
