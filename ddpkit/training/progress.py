"""How far a run has come: counters, the phase of the epoch, the losses so far."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ddpkit import optim
from ddpkit.base import temporarily
from ddpkit.distributed import sum_exactly, sum_over_ranks
from ddpkit.errors import NonFiniteLossError
from ddpkit.logger import get_logger
from ddpkit.reporting import LoggedValues
from ddpkit.training.epoch_phase import EpochPhase
from ddpkit.training.gathering import StageBatches
from ddpkit.training.loss_meter import ExactMeter, LossMeter
from ddpkit.training.window import Window

logger = get_logger(__name__)

_IN_PASS = EpochPhase.IN_PASS  # to look a member up costs a call


@dataclass
class Progress(optim.StepCounters):
    """How far the run has come; with the counters of :class:`~ddpkit.optim.StepCounters`.

    Attributes:
        epoch: of the current or last stage.
        step: batches of the current stage, on this rank.
        began_at: updates before the current epoch.
        phase: how far the current epoch is.
        is_whole: whether the last training stage has read all of its data; not if
            ``optimizer_step_limit`` ended it.
        validates: whether this call of ``fit`` has data for a validation.
        is_validated: whether the validation of this epoch is over, but for ``on_stage_end``.
        validated_at: the optimizer step of the last validation; -1 before the first.
        set_name: of the set that is evaluated; empty: it has none.
        set_decides: whether the end of a validation is that of this set; of several, of the first.
        is_between_steps: whether a validation runs between two steps of a training stage.
        window_end: batches of the current or last training stage up to the end of the last window,
            stepped or skipped; in an epoch that goes on from a checkpoint and has not begun again,
            those of the checkpoint.
        train_meter: losses of the training stage of this epoch on this rank, up to ``window_end``;
            None before it.
        train_sums: their sum over all ranks, its weight, and the samples, where nothing has been
            trained since; else None.
        avg_train_loss: mean training loss of the epoch so far, over all ranks, about a second old.
        is_fitting: whether a call of ``fit`` runs: then a recovered checkpoint sets the position.
        skipped_norm: the gradients' norm of the last step that was skipped; None before the first.
        skipped_at: the batch of this pass for which the recipe has returned no loss; 0: none yet.
        skips_written: how many of the skipped steps of this epoch the run's log has been told of.
        has_reported_clipping: whether a line has said that gradients are clipped.
        window: the current accumulation window.
        meter: losses of the current stage on this rank.
        stage_batches: which batches this rank has read in the current or last stage; None before
            the first.
        loader: of the current or last training stage.
        result: the return value of ``fit_batch`` once its loss is known; it may belong to an older
            batch.
        result_of: number of the batch of ``result``.
        result_at: the same, once the optimizers have stepped too, or have had their chance:
            ``on_fit_batch_end`` runs.
        epochs: number of epochs that ended in this call of ``fit``.
        train_loss: mean training loss of the last finished epoch, over all ranks; None before the
            first.
        valid_loss: likewise of the validation.
        logged: values logged by the recipe.
        new_meter: makes a meter of losses.
        add_totals: adds up the totals of meters over the ranks.

    Example:
        >>> Progress().optimizer_step
        0
    """

    epoch: int = 0
    step: int = 0
    began_at: int = 0
    phase: EpochPhase = EpochPhase.OUTSIDE
    is_whole: bool = False
    validates: bool = False
    is_validated: bool = False
    validated_at: int = -1
    set_name: str = ""
    set_decides: bool = True
    is_between_steps: bool = False
    window_end: int = 0
    avg_train_loss: float = 0.0
    is_fitting: bool = False
    skipped_norm: float | None = None
    skipped_at: int = 0
    skips_written: int = 0
    has_reported_clipping: bool = False
    window: Window = field(default_factory=Window)
    meter: LossMeter = field(default_factory=LossMeter)
    train_meter: LossMeter | None = None
    train_sums: tuple[Any, Any, int] | None = None
    stage_batches: StageBatches | None = None
    loader: Any = None
    result: Any = None
    result_of: int = 0
    result_at: int = 0
    epochs: int = 0
    train_loss: float | None = None
    valid_loss: float | None = None
    logged: LoggedValues = field(default_factory=lambda: LoggedValues(LossMeter))
    new_meter: Callable[..., Any] = LossMeter
    add_totals: Callable[[list[Any]], list[Any]] = sum_over_ranks

    def round_nothing(self) -> None:
        """Add losses and logged values up exactly, so that no rounding depends on the number of
        processes.
        """
        self.new_meter = ExactMeter
        self.add_totals = sum_exactly
        self.meter = self.new_meter()
        self.logged = LoggedValues(self.new_meter, self.add_totals)

    def copy_losses(self) -> None:
        """Keep copies of losses until they are added up, as CUDA graphs overwrite theirs in the
        next step.
        """
        if not isinstance(self.new_meter, functools.partial):
            self.new_meter = functools.partial(self.new_meter, copies=True)
            self.meter = self.new_meter()

    @property
    def is_in_pass(self) -> bool:
        """Whether a training stage is reading its batches."""
        return self.phase is _IN_PASS

    @property
    def has_done_stages(self) -> bool:
        """Whether nothing of this epoch is left but to end its last hook, if the epoch goes no
        further.
        """
        is_trained = self.phase in {EpochPhase.TRAINED, EpochPhase.OVER}
        return self.is_validated or (is_trained and not self.validates)

    @property
    def is_cut_short(self) -> bool:
        """Whether the last call of ``fit`` has ended, or gone no further than its checkpoint,
        inside of an epoch.
        """
        has_ended = self.phase in {EpochPhase.OVER, EpochPhase.RECOVERED} and not self.is_fitting
        return has_ended and not self.is_whole

    # ------------------------------------------------------------------ a call of fit

    def begin_fit(self) -> None:
        """Note that a call of ``fit`` runs."""
        self.is_fitting = True

    def end_fit(self) -> None:
        """Note that it is over, however it has ended."""
        self.is_fitting = self.is_between_steps = False

    def restart(self) -> None:
        """Reset the position of an interrupted pass."""
        self.resolve_pending()
        self.pending_error = None
        self.step, self.window, self.meter = 0, Window(), self.new_meter()
        self.window_end = 0
        self.train_meter = None
        self.train_sums = None
        self.loader = None
        self.phase = EpochPhase.OUTSIDE
        self.is_whole = self.is_validated = False
        self.result = None
        self.result_of = 0
        self.result_at = 0
        self.epochs = 0
        self.train_loss = None
        self.valid_loss = None
        self.logged.values.clear()

    def end_epoch(self) -> None:
        """Note that an epoch is over, its evaluation and its checkpoint too."""
        self.train_meter = None
        self.epochs += 1
        if self.phase is EpochPhase.TRAINED:
            self.phase = EpochPhase.OVER

    def ask_for_epochs(self, *, validates: bool) -> None:
        """Note that the epochs of this call of ``fit`` are counted from now on.

        Args:
            validates: whether each ends with a validation.
        """
        self.validates = validates
        if self.phase is EpochPhase.OUTSIDE:
            self.phase = EpochPhase.ASKED

    def end_epochs(self) -> None:
        """Note that there are no more epochs."""
        if self.phase is EpochPhase.ASKED and not self.epochs:
            self.phase = EpochPhase.OUTSIDE

    # ------------------------------------------------------------------ what a checkpoint says

    def recover_updates(self, optimizer_step: int) -> None:
        """Go on counting updates where a checkpoint says."""
        self.resolve_pending()
        self.optimizer_step = optimizer_step

    def recover_validation(self, validated_at: int) -> None:
        """Note the optimizer step of the last validation, as a checkpoint says it."""
        self.validated_at = validated_at

    def go_to(self, epoch: int, step: int) -> None:
        """Go on at a batch of an epoch, for a check that trains nothing."""
        self.epoch = epoch
        self.step = step

    def recover_position(
        self,
        step: int,
        *,
        began_at: int,
        nonfinite: int,
        clipped: int,
        avg_train_loss: float,
        empty_steps: int = 0,
    ) -> None:
        """Go on inside of an epoch, where a checkpoint says.

        Args:
            step: batches of this rank.
            began_at: updates before the epoch.
            nonfinite: steps of the epoch that were skipped.
            clipped: updates of the epoch whose gradients were clipped.
            avg_train_loss: mean loss so far.
            empty_steps: steps of the epoch without a batch that had a loss.
        """
        self.step = step
        self.began_at = began_at
        self.nonfinite = nonfinite
        self.clipped = clipped
        self.empty_steps = empty_steps
        self.avg_train_loss = avg_train_loss

    def recover_inside(
        self,
        sums: tuple[Any, Any, int],
        *,
        is_whole: bool,
        is_validated: bool,
    ) -> None:
        """Note a checkpoint from the middle of an epoch; the epoch has not begun again.

        Args:
            sums: of the losses of all ranks, their weights, and the samples so far.
            is_whole: whether its training has read all data.
            is_validated: whether its validation is over, too.
        """
        self.phase = EpochPhase.RECOVERED
        self.window_end = self.step
        self.train_sums = sums
        self.is_whole = is_whole
        self.is_validated = is_validated

    def forget_position(self) -> None:
        """Begin the next epoch at its first batch, whatever the position was."""
        self.step, self.meter = 0, self.new_meter()
        self.avg_train_loss = 0.0
        self.nonfinite = 0
        self.empty_steps = 0

    # ------------------------------------------------------------------ the training of an epoch

    def begin_epoch(self, epoch: int) -> None:
        """Note which epoch is trained from now on, or goes on."""
        self.epoch = epoch
        if not self.step:
            self.began_at = self.optimizer_step
            self.clipped = 0

    def begin_training(self) -> None:
        """Note that the training stage of an epoch begins, or is resumed from a checkpoint."""
        if not self.step:
            self.window_end = 0
            self.train_sums = (0.0, 0.0, 0)
            self.is_whole = False
        self.phase = EpochPhase.BEGUN
        self.is_validated = False

    def limit_step(self, length: int) -> None:
        """Begin at the end of the data at the latest: on another number of ranks it may be
        shorter.
        """
        self.step = min(self.step, length)

    def read_from(self, loader: Any) -> None:
        """Note which loader the training reads."""
        self.loader = loader

    def begin_pass(self) -> None:
        """Note that the training stage reads its batches now; the last result is of the epoch
        before.
        """
        if not self.step:
            self.nonfinite = 0  # a step in a hook before the pass does not belong to the epoch
            self.empty_steps = 0
        self.phase = _IN_PASS
        self.window_end = self.step
        self.train_meter = self.meter.copy()
        self.train_sums = None
        self.is_whole = False
        self.result_of = self.result_at = 0
        self.skipped_at = 0

    def begin_stage(self, batches: StageBatches) -> None:
        """Note what the stage runs over."""
        self.stage_batches = batches

    def begin_batch(self) -> None:
        """Count a batch. The loops do it by themselves, as this costs a call."""
        self.step += 1

    def repeat_window(self, micro_batches: int, factor: int) -> None:
        """Go back to the end of the last step, and count batches in another size from there.

        At the end of a step both sizes have done the same samples.

        Args:
            micro_batches: of a full step so far.
            factor: of a full step from now on.
        """
        self.logged.forget_after(self.window_end)
        self.window_end = self.window_end // micro_batches * factor
        self.step = self.window_end
        self.meter = self.train_meter or self.new_meter()
        self.window = Window(number=self.window.number)

    @contextlib.contextmanager
    def once_more(self, step: int, of_window: Mapping[str, Any]) -> Iterator[None]:
        """Return a context in which a batch of the open window is computed once more, perhaps one
        of another rank. What is counted or logged in it goes.

        Args:
            step: the number of the batch in the stage.
            of_window: what the window has of it.

        Ranks: local.
        """
        window = vars(self.window)
        before = dict(window)
        window.update(of_window)
        try:
            with temporarily(self, step=step), self.logged.unheard():
                yield
        finally:
            window.clear()
            window.update(before)

    def note_average_loss(self, loss: float) -> None:
        """Note the mean training loss so far, which a sync of the ranks has found."""
        self.avg_train_loss = loss

    def end_batches(self, *, is_whole: bool) -> None:
        """Note that the training stage reads no further batch, and whether it has read all."""
        self.is_whole = is_whole

    def note_trained(self, sums: tuple[Any, Any, int]) -> None:
        """Note that the training stage has read its last batch.

        Args:
            sums: as :meth:`recover_inside`.
        """
        self.phase = EpochPhase.TRAINED
        self.train_sums = sums

    def note_train_loss(self, loss: float) -> None:
        """Note the mean loss of the training stage, over all ranks."""
        self.avg_train_loss = loss
        self.train_loss = loss

    def end_training(self) -> None:
        """Note that the training stage is over, with its last hook."""
        self.avg_train_loss = 0.0  # a validation after it has it: `with_train_loss`
        self.step = 0
        self.meter = self.new_meter()

    # ------------------------------------------------------------------ other stages

    def begin_evaluation(self) -> None:
        """Count the batches and losses of an evaluation from now on."""
        self.step = 0
        self.meter = self.new_meter()

    def on_set(self, name: str, *, decides: bool = True) -> AbstractContextManager[None]:
        """Return a context for an evaluation on a set.

        Args:
            name: of the set; empty: it has none.
            decides: as the attribute ``set_decides``.
        """
        return temporarily(self, set_name=name, set_decides=decides)

    def plan_validation(self, *, is_due: bool) -> None:
        """Note whether the epoch, whose training is over, ends with a validation."""
        self.validates = is_due

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Return a context for a validation between two steps of the training stage, after which
        the position and the losses are those of the training again.

        An exception leaves them, as it is told where it was raised; the next call of ``fit`` begins
        anew.
        """
        of_training = self.step, self.window, self.meter, self.stage_batches
        self.is_between_steps = True
        self.step = 0
        self.window = Window()
        self.meter = self.new_meter()
        self.stage_batches = None
        yield
        self.step, self.window, self.meter, self.stage_batches = of_training
        self.is_between_steps = False

    def with_train_loss(self) -> AbstractContextManager[None]:
        """Return a context for the validation after an epoch, whose hooks may report this loss."""
        loss = self.avg_train_loss if self.train_loss is None else self.train_loss
        return temporarily(self, avg_train_loss=loss)

    def end_validation(self, loss: float) -> None:
        """Note that a validation has read its last batch."""
        self.step = 0
        self.valid_loss = loss
        self.is_validated = not self.is_between_steps
        self.note_validation()

    def note_validation(self) -> None:
        """Note at which optimizer step there was a validation."""
        self.validated_at = self.resolved.optimizer_step

    def end_evaluation(self, kept: tuple[int, Any] | None) -> None:
        """Note that an evaluation is over.

        Args:
            kept: step and meter of the training whose hook has evaluated; else None.
        """
        self.step, self.meter = (0, self.new_meter()) if kept is None else kept

    def predicting(self, batches: StageBatches) -> AbstractContextManager[None]:
        """Return a context that counts batches of a prediction."""
        return temporarily(self, stage_batches=batches, step=0)

    # ------------------------------------------------------------------ around a save

    def at_end_of_pass(self, mean: float) -> AbstractContextManager[None]:
        """Return a context with the position, and the loss, of the last batch that was trained
        on.
        """
        return temporarily(self, step=self.window_end, avg_train_loss=mean)

    def at_last_update(self) -> AbstractContextManager[None]:
        """Return a context in which progress is reset to the last optimizer step."""
        return temporarily(self, step=self.window_end, meter=self.train_meter or self.meter)

    @contextlib.contextmanager
    def unsaved(self) -> Iterator[None]:
        """Return a context for a hook that must not run twice: a stop inside of it saves no
        checkpoint.
        """
        meter = self.train_meter
        self.train_meter = None
        try:
            yield
        finally:  # a recipe may catch what a hook of its own evaluation raises
            self.train_meter = meter

    # ------------------------------------------------------------------ clipped and skipped steps

    def note_clipping_reported(self) -> None:
        """Note that a line has said that gradients are clipped."""
        self.has_reported_clipping = True

    def note_skips_written(self, in_epoch: int) -> None:
        """Note how many skipped steps of this epoch the run's log knows."""
        self.skips_written = in_epoch

    def count_skipped_batch(self) -> None:
        """Count a batch of the current stage for which the recipe has returned no loss; not a copy,
        which a rank repeats to keep step.
        """
        if not self.window.count:
            return
        if self.is_in_pass and not self.is_between_steps:
            self.skipped_at = self.step  # the loop counts it with the batch
        else:
            self.meter.skipped += 1

    def count_empty_step(self) -> None:
        """Count an optimizer step that was left out because no batch of any rank had a loss."""
        self.empty_steps += 1

    def take_counts_of_all_ranks(self, *, clipped: int, nonfinite: int) -> None:
        """Take over the largest counts of the epoch on any rank, where ranks step alone."""
        self.clipped = clipped
        self.nonfinite = nonfinite

    @property
    def clipped_share(self) -> float:
        """The share of the current epoch's updates whose gradients were clipped, 0 to 1; equal on
        all ranks.
        """
        self.resolve_pending()  # a recipe may ask right after a step
        made = self.optimizer_step - self.began_at
        return self.clipped / made if made else 0.0

    def count_skipped(
        self,
        norm: float,
        patience: int | None,
        step: int | None = None,
    ) -> None:
        """Count an optimizer step that was skipped because the gradients' norm was not finite.

        Args:
            norm: equal on all ranks, so all ranks count and give up alike.
            patience: how many of them an epoch may have; None: this rank alone has such gradients,
                and steps with zeros.
            step: the batch of the step; None: the present one.

        Raises:
            NonFiniteLossError: one more than that.
        """
        self.nonfinite += 1
        self.skipped_norm = norm
        batch = self.step if step is None else step
        where = f"epoch {self.epoch}, batch {batch}, after optimizer step {self.optimizer_step}"
        if patience is None:
            words = "The gradients of this rank are not finite (norm=%s); it steps with zeros: %s."
            logger.warning(words, norm, where)
            return
        self.require_patience(f"norm={norm}; the last in {where}", patience)
        logger.warning(
            "The gradients are not finite (norm=%s); step skipped on all ranks: %s.",
            norm,
            where,
        )

    def require_patience(self, which: str, patience: int) -> None:
        """Give up if too many steps of this epoch were not finite.

        Args:
            which: the gradients of the last, in words.
            patience: how many of them an epoch may have.

        Raises:
            NonFiniteLossError: there were more.
        """
        if self.nonfinite > patience:
            raise NonFiniteLossError(
                f"{self.nonfinite} steps of epoch {self.epoch} had gradients that are not finite "
                f"({which}), and nonfinite_patience={patience}. All were skipped. Lower the "
                "learning rate, clip harder (--max_grad_norm), or look at the data."
            )
