"""One optimizer step and the loops around it: a pass of training, a pass of evaluation, and where they stand.

A step weighs and back-propagates the losses of a window, clips, and steps or skips on all ranks alike. For
micro-batches ``m`` over ranks ``r``, with weights ``w[m, r]`` and losses that are means, the optimizer steps on
``sum(w * grad) / sum(w)``. DDP averages over the ranks, so that each of them back-propagates
``loss * w * world_size / total``; the total is known from the plan, before the first backward pass of the window.
If ``compute_objectives`` returns a sum and a count, the gradients of the sums are accumulated, the counts are added up
over the ranks once per window, and the division is part of the optimizer step.

The loops know no files, models or ranks. What differs between ranks, and what the ranks must agree on, comes in through
the :class:`LoopHooks` and a few callables, so that a loop can be tested with a stub and no model.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import weakref
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ddpkit import optim
from ddpkit.compat import back_propagate
from ddpkit.control import Requests, start_loading
from ddpkit.device import widest_float
from ddpkit.distributed import sum_exactly, sum_over_ranks
from ddpkit.errors import BatchError, NonFiniteLossError
from ddpkit.logger import get_logger
from ddpkit.metrics import ExactMeter, LossMeter, counted_by
from ddpkit.precision import StepScaler, drop_casts
from ddpkit.reporting import LoggedValues
from ddpkit.training.epoch_phase import EpochPhase
from ddpkit.training.first_gradients import FirstGradients
from ddpkit.training.loss_errors import explained_backward, loss_problem
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import nn

    from ddpkit.control import PeriodicSync, SyncReport
    from ddpkit.ema import WeightAverage
    from ddpkit.reporting import ProgressBar
    from ddpkit.run_opts import RunOptions
    from ddpkit.step_times import StepTimer
    from ddpkit.strategies import Strategy
    from ddpkit.training.feed import Feed, StreamFeed
    from ddpkit.training.gathering import Seen

logger = get_logger(__name__)

_IN_PASS = EpochPhase.IN_PASS  # to look a member up costs a call


@dataclass
class Window:
    """The micro-batches of one optimizer step; where in it the loop is.

    Attributes:
        closes: whether the current micro-batch is the last of its window, after which the optimizer steps.
        count: this rank's samples in the current micro-batch; 0 for a repeated one.
        weight: of its loss in the mean of the epoch: the samples, or this rank's part of the batch.
        loss_scale: factor on the current loss before its backward pass.
        scale: the same for a recipe that applies it by itself: reading it sets ``is_weighed``.
        is_weighed: whether the losses of the window are multiplied by ``loss_scale``.
        correction: factor on the gradients of the window, if the weights were not known in advance.
        multiplier: what else the next optimizer step multiplies the gradients by.
        deferred: micro-batches in a row, up to step ``deferred_at``, whose gradients wait for a step.
        deferred_at: the last such step; -1 once the optimizers have stepped.
        is_asked: whether the recipe knows that the current micro-batch closes the window.
        has_means: whether gradients of means wait for a step.
        counted: count of the loss sums since the last step; None without loss sums.
        counted_at: the last step that has added to that.
        divisor: what these sums were divided by.
        average: returns, at the window's end, the average of ``counted`` over the ranks.
        is_overdue: whether a window with sums has ended without a step.
        number: of the window; counts on where nothing divides the training into windows.
        stepped_in: number of the last window in which optimizers have stepped.
        skipped_in: number of the last window in which a step was skipped for its gradients.
        clipped_in: number of the last window in which gradients were clipped.

    Ranks: local; ``closes``, ``correction`` and what is deferred is equal on all ranks.

    Example:
        >>> window = Window()
        >>> window.defer(5); window.defer(6); window.pending(6), window.pending(7)
        (2, 0)
    """

    closes: bool = True
    count: int = 1
    weight: float = 1.0
    loss_scale: float = 1.0
    is_weighed: bool = False
    correction: float = 1.0
    multiplier: float | torch.Tensor = 1.0
    deferred: int = 0
    deferred_at: int = -1
    is_asked: bool = False
    has_means: bool = False
    counted: float | torch.Tensor | None = None
    counted_at: int = -1
    divisor: float = 1.0
    average: Callable[[], float | torch.Tensor] | None = None
    is_overdue: bool = False
    number: int = 0
    stepped_in: int = -1
    skipped_in: int = -1
    clipped_in: int = -1

    @property
    def scale(self) -> float:
        """The factor on the current loss before its backward pass. Who reads it multiplies: it sets ``is_weighed``."""
        self.is_weighed = True
        return self.loss_scale

    def begin(self) -> None:
        """Note that the coming micro-batch is the first of a window."""
        self.number += 1
        self.is_weighed = self.is_asked = False
        self.is_overdue = self.counted is not None

    def defer(self, step: int) -> None:
        """Note that the gradients of a micro-batch are only accumulated; it may be called more than once for one."""
        if step != self.deferred_at:
            self.deferred = self.deferred + 1 if step == self.deferred_at + 1 else 1
            self.deferred_at = step

    def pending(self, step: int) -> int:
        """Return how many micro-batches up to ``step`` wait for an optimizer step; 0 if ``step`` is not of them."""
        return self.deferred if step == self.deferred_at else 0

    def stepped(self) -> float | torch.Tensor:
        """Note that the optimizers step now; return the factor to apply to the gradients first."""
        multiplier = self.multiplier
        if self.is_weighed and self.counted is None:
            multiplier *= self.correction
        self.multiplier, self.deferred, self.deferred_at = 1.0, 0, -1
        self.counted, self.average, self.has_means, self.is_overdue = None, None, False, False
        return multiplier


@dataclass
class Progress(optim.StepCounters):
    """How far the run has come; with the counters of :class:`~ddpkit.optim.StepCounters`.

    Attributes:
        epoch: of the current or last stage.
        step: batches of the current stage, on this rank.
        began_at: updates before the current epoch.
        phase: how far the current epoch is.
        is_whole: whether the last training stage has read all of its data; not if ``optimizer_step_limit`` ended it.
        validates: whether this call of ``fit`` has data for a validation.
        is_validated: whether the validation of this epoch is over, but for ``on_stage_end``.
        window_end: batches of the current or last training stage up to the end of the last window, stepped or skipped;
            in an epoch that goes on from a checkpoint and has not begun again, those of the checkpoint.
        train_meter: losses of the training stage of this epoch on this rank, up to ``window_end``; None before it.
        train_sums: their sum over all ranks, its weight, and the samples, where nothing has been trained since; else
            None.
        avg_train_loss: mean training loss of the epoch so far, over all ranks, about a second old.
        is_fitting: whether a call of ``fit`` runs: then a recovered checkpoint sets the position.
        skipped_norm: the gradients' norm of the last step that was skipped; None before the first.
        has_told_clipping: whether a line has said that gradients are clipped.
        window: the current accumulation window.
        meter: losses of the current stage on this rank.
        seen: which samples this rank has seen in the current or last stage; None before the first.
        loader: of the current or last training stage.
        result: the return value of ``fit_batch`` once its loss is known; it may belong to an older batch.
        result_of: number of the batch of ``result``.
        result_at: the same, once the optimizers have stepped too, or have had their chance: ``on_fit_batch_end`` runs.
        epochs: number of epochs that ended in this call of ``fit``.
        train_loss: mean training loss of the last finished epoch, over all ranks; None before the first.
        valid_loss: likewise of the validation.
        logged: values logged by the recipe.
        new_meter: makes a meter of losses.
        add_totals: adds up the totals of meters over the ranks.

    Ranks: local.

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
    window_end: int = 0
    avg_train_loss: float = 0.0
    is_fitting: bool = False
    skipped_norm: float | None = None
    has_told_clipping: bool = False
    window: Window = field(default_factory=Window)
    meter: LossMeter = field(default_factory=LossMeter)
    train_meter: LossMeter | None = None
    train_sums: tuple[Any, Any, int] | None = None
    seen: Seen | None = None
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
        """Add losses and logged values up exactly, so that no rounding depends on the number of processes."""
        self.new_meter, self.add_totals = ExactMeter, sum_exactly
        self.meter = self.new_meter()
        self.logged = LoggedValues(self.new_meter, self.add_totals)

    def copy_losses(self) -> None:
        """Keep copies of losses until they are added up, as CUDA graphs overwrite theirs in the next step."""
        if not isinstance(self.new_meter, functools.partial):
            self.new_meter = functools.partial(self.new_meter, copies=True)
            self.meter = self.new_meter()

    @property
    def is_in_pass(self) -> bool:
        """Whether a training stage is reading its batches."""
        return self.phase is _IN_PASS

    @property
    def has_done_stages(self) -> bool:
        """Whether nothing of this epoch is left but to end its last hook, if the epoch goes no further."""
        is_trained = self.phase in {EpochPhase.TRAINED, EpochPhase.OVER}
        return self.is_validated or (is_trained and not self.validates)

    @property
    def is_cut_short(self) -> bool:
        """Whether the last call of ``fit`` has ended, or gone no further than its checkpoint, inside of an epoch."""
        has_ended = self.phase in {EpochPhase.OVER, EpochPhase.RECOVERED} and not self.is_fitting
        return has_ended and not self.is_whole

    def restart(self) -> None:
        """Reset the position of an interrupted pass."""
        self.look()
        self.error = None
        self.step, self.window, self.meter = 0, Window(), self.new_meter()
        self.window_end, self.train_meter, self.train_sums, self.loader = 0, None, None, None
        self.phase = EpochPhase.OUTSIDE
        self.is_whole = self.is_validated = False
        self.result, self.result_of, self.result_at = None, 0, 0
        self.epochs, self.train_loss, self.valid_loss = 0, None, None
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

    def recover_inside(self, sums: tuple[Any, Any, int]) -> None:
        """Note the position of a checkpoint from the middle of an epoch, which has not begun again.

        Args:
            sums: of the losses of all ranks, their weights, and the samples so far.
        """
        self.phase = EpochPhase.RECOVERED
        self.window_end = self.step
        self.train_sums = sums

    def forget_position(self) -> None:
        """Begin the next epoch at its first batch, whatever the position was."""
        self.step, self.meter = 0, self.new_meter()
        self.avg_train_loss = 0.0
        self.nonfinite = 0

    def begin_training(self) -> None:
        """Note that the training stage of an epoch begins, or one that a checkpoint has left."""
        if not self.step:
            self.window_end = 0
            self.train_sums = (0.0, 0.0, 0)
            self.is_whole = False
        self.phase = EpochPhase.BEGUN
        self.is_validated = False

    def begin_pass(self) -> None:
        """Note that the training stage reads its batches now; the last result is of the epoch before."""
        self.phase = _IN_PASS
        self.window_end = self.step
        self.train_meter = self.meter.copy()
        self.train_sums = None
        self.is_whole = False
        self.result_of = self.result_at = 0

    def end_pass(self, sums: tuple[Any, Any, int]) -> None:
        """Note that the training stage has read its last batch.

        Args:
            sums: as :meth:`recover_inside`.
        """
        self.phase = EpochPhase.TRAINED
        self.train_sums = sums

    @property
    def clipped_share(self) -> float:
        """The share of the current epoch's updates whose gradients were clipped, 0 to 1; equal on all ranks."""
        made = self.optimizer_step - self.began_at
        return self.clipped / made if made else 0.0

    def count_skipped(self, norm: float, patience: int | None, step: int | None = None) -> None:
        """Count an optimizer step that was skipped because the gradients' norm was not finite.

        Args:
            norm: equal on all ranks, so all ranks count and give up alike.
            patience: how many of them an epoch may have; None: this rank alone has such gradients, and steps with
                zeros.
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
        logger.warning("The gradients are not finite (norm=%s); step skipped on all ranks: %s.", norm, where)

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
                f"{self.nonfinite} steps of epoch {self.epoch} had gradients that are not finite ({which}), and "
                f"nonfinite_patience={patience}. All were skipped. Lower the learning rate, clip harder "
                "(--max_grad_norm), or look at the data."
            )


class LoopHooks(Protocol):
    """The hooks of a recipe that a loop calls.

    Ranks: as the loops.
    """

    progress: Progress

    def fit_batch(self, batch: Any) -> Any:
        """Train on one micro-batch and return its mean loss, or a loss sum and its count, detached."""

    def evaluate_batch(self, batch: Any, stage: Stage) -> Any:
        """Evaluate one batch and return its mean loss, or a loss sum and its count."""


def train_epoch(
    brain: LoopHooks,
    feed: Feed | StreamFeed,
    sync: PeriodicSync,
    on_sync: Callable[[SyncReport], None],
    stop_at: float,
    *,
    on_window: Callable[[], None] | None = None,
    tell: Callable[[], Requests] = Requests,
) -> bool:
    """Train on every batch of a feed.

    Args:
        brain: of the recipe.
        feed: the batches.
        sync: when the ranks sync.
        on_sync: called with the result of a sync, at the same step on every rank.
        stop_at: end the pass when this many optimizer steps have been made since the run began.
        on_window: called after every optimizer step, if given; at the same step on every rank.
        tell: returns what this rank tells at a sync, beyond its losses.

    Returns:
        Whether ``stop_at`` has ended the pass; there may be no further batch all the same.

    Ranks: collective.
    """
    progress, name = brain.progress, type(brain).__name__
    window, meter = progress.window, progress.meter
    sync.start(progress.step)
    if progress.optimizer_step >= stop_at:
        return True
    with counted_by(window):
        for batch in feed.batches(window):
            progress.step += 1
            loss = brain.fit_batch(batch)
            if loss.__class__ is tuple:
                loss_sum, count = sum_and_count(loss, name, "fit_batch")
                meter.append_sum(loss_sum, count if window.count else 0.0)
            else:
                meter.append(one_number(loss, name, "fit_batch"), window.weight)
            meter.samples += window.count
            if not window.closes:
                continue
            progress.window_end = progress.step
            # A copy has no batches of the next window.
            progress.train_meter = meter if feed.factor == 1 else meter.copy()
            if on_window is not None:
                on_window()
            if progress.step >= sync.due:
                on_sync(sync(progress.step, *meter.sums()[:2], meter.samples, tell()))
            if stop_at < math.inf and progress.settled_step() >= stop_at:
                return True
    return False


def evaluate_epoch(
    brain: LoopHooks,
    loader: Iterable[Any],
    stage: Stage,
    bar: ProgressBar,
    *,
    count: Callable[[int, Any], int],
    sync: PeriodicSync,
    after_batch: Callable[[int], None] | None = None,
) -> None:
    """Evaluate every batch of a loader. Ranks may have different numbers of batches: only ``after_batch`` communicates.

    Args:
        brain: of the recipe.
        loader: this rank's batches.
        stage: VALID or TEST.
        bar: told about once a second.
        count: tells the number of samples from a batch's number and the batch.
        sync: a sync of this rank alone.
        after_batch: called with the step, if given; may sync with the other ranks at a step that all of them reach.

    Ranks: local.
    """
    progress, name = brain.progress, type(brain).__name__
    meter = progress.meter
    sync.start(progress.step)
    with torch.no_grad():
        for number, batch in enumerate(start_loading(loader)):
            progress.step += 1
            samples = progress.window.weight = count(number, batch)  # the recipe may log means
            loss = brain.evaluate_batch(batch, stage)
            if loss.__class__ is tuple:
                meter.append_sum(*sum_and_count(loss, name, "evaluate_batch"))
            else:
                meter.append(one_number(loss, name, "evaluate_batch"), samples)
            meter.samples += samples
            if progress.seen is not None:
                progress.seen.sizes.append(samples)
            if progress.step >= sync.due:
                report = sync(progress.step, *meter.sums()[:2], meter.samples, Requests())
                bar.show(report.step, report.loss, report.samples)
            if after_batch is not None:
                after_batch(progress.step)


# ---------------------------------------------------------------------------------------- a loss and its backward pass


def backward(
    loss: Any,
    scale: float,
    scaler: torch.amp.GradScaler | None,
    name: str,
    *,
    retain_graph: bool = False,
    has_own_fit_batch: bool = True,
    timer: StepTimer | None = None,
) -> None:
    """Back-propagate a weighted loss; if that fails, raise an error that names the problem with the loss.

    Args:
        loss: mean over the micro-batch, shape ``()``.
        scale: its weight in the window.
        scaler: multiplies it further; or None.
        name: of the recipe's class, for the message.
        retain_graph: keep the graph for another backward pass.
        has_own_fit_batch: whether the recipe calls ``backward`` by itself, for the message.
        timer: measures the pass, if it measures the present step; or None.

    Raises:
        BatchError: the loss is not a tensor of one number, or does not depend on any parameter; DDP has averaged a part
            of the gradients already; or FSDP has freed weights that it needs.

    Ranks: collective under DDP.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> backward(weight.sum(), 0.5, None, "Line"); weight.grad
        tensor([0.5000])
    """
    try:
        if timer is not None and timer.measures:
            timer.begin_backward(loss)
        if scaler is not None or loss.numel() != 1 or loss.is_complex():
            loss = loss if scale == 1.0 else loss * scale
            (loss if scaler is None else scaler.scale(loss)).backward(retain_graph=retain_graph)
        else:  # the bits of loss * scale, two products less
            back_propagate(loss, torch.full_like(loss, scale), retain_graph=retain_graph)
        if timer is not None and timer.measures:
            timer.end_backward()
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        news = explained_backward(error, loss, name, has_own_fit_batch=has_own_fit_batch)
        if news is None:
            raise
        raise news from error


def one_number(loss: Any, name: str, hook: str = "compute_objectives") -> torch.Tensor | float:
    """Check that a loss is one number, and return it detached.

    Args:
        loss: tensor of one element, or float.
        name: of the recipe's class, for the message.
        hook: which, for the message.

    Raises:
        BatchError: it is something else.

    Ranks: local.

    Example:
        >>> one_number(torch.tensor(2.0), "Line")
        tensor(2.)
    """
    if isinstance(loss, torch.Tensor):
        if not loss.ndim or loss.numel() == 1:
            return loss.detach() if loss.requires_grad else loss
    elif isinstance(loss, (int, float)):
        return float(loss)
    raise BatchError(f"{name}.{hook} returned {loss_problem(loss)}", hook=hook)


def sum_and_count(pair: Any, name: str, hook: str = "compute_objectives") -> tuple[Any, Any]:
    """Check that a loss is a pair of sum and count, and return both.

    Args:
        pair: ``(loss_sum, count)``: a tensor of one element, and a tensor of one element or a number that is not
            negative.
        name: of the recipe's class, for the message.
        hook: which, for the message.

    Returns:
        The sum, attached as it was given; and the count, detached.

    Raises:
        BatchError: it is something else.

    Ranks: local.

    Example:
        >>> sum_and_count((torch.tensor(6.0), 3), "Line")
        (tensor(6.), 3)
    """
    problem = None
    if len(pair) != 2:  # noqa: PLR2004 -- a pair
        problem = f"a tuple of {len(pair)}: return the mean loss, or (loss_sum, count)."
    else:
        loss_sum, count = pair
        if isinstance(count, torch.Tensor):
            count = count.detach()
            if count.numel() != 1:
                problem = f"a count of shape {tuple(count.shape)}, not one number: return (loss_sum, count)."
            elif count.dim():
                count = count.reshape(())
        elif isinstance(count, bool) or not isinstance(count, Real) or not 0 <= float(count) < math.inf:
            problem = f"the count {count!r}, which is not a number >= 0: return (loss_sum, count)."
        if not isinstance(loss_sum, (torch.Tensor, float, int)) or getattr(loss_sum, "numel", int)() > 1:
            problem = f"in (loss_sum, count) {loss_problem(loss_sum)}"
    if problem is not None:
        raise BatchError(f"{name}.{hook} returned {problem}", hook=hook)
    return loss_sum, count


# -------------------------------------------------------------------------------------------------- the optimizer step


MIXED = (
    "{}.compute_objectives returned a mean loss for some micro-batches of an optimizer step and (loss_sum, count) for "
    "others. Return the same kind for every training batch."
)
TWO_SUMS = (
    "{}.fit_batch passed two (loss_sum, count) to backward() before optimizers_step(). If both count the same, add up "
    "the sums; if they belong to two optimizers, step after each, with grad_accumulation_factor=1; else pass means."
)
NOT_DIVIDED = (
    "{}.fit_batch passed (loss_sum, count) to backward() and let the window end without optimizers_step(), which "
    "divides by the count. Call self.optimizers_step() where self.should_step is true."
)
NOT_STATIC = (
    "{}.compute_objectives returned a loss that depends on no parameter, and static_graph=True promises that every "
    "batch uses the same parameters. Leave --static_graph out, or return 0.0 * predictions.sum() for such a batch."
)
APART = (
    "%s.fit_batch steps with gradients that are not averaged over the ranks: after this epoch the weights of %s are "
    "not the same on all of them, and rank 0's are saved. DDP averages what is computed through self.modules, not "
    "through hparams or a module's inner parts. Call self.optimizers_step(), which averages the rest, and not the "
    "optimizer's own step(); --check_parity 2 shows whether the gradients are then those of one process."
)
NO_OPTIMIZERS = "{}.freeze_optimizers returned None: look for a missing return."
NO_STEP = (
    "No optimizer step of %s was counted in its first epoch. Give opt_class, or fill optimizers_dict in "
    "init_optimizers; return optimizers from freeze_optimizers; in a fit_batch of your own call self.backward(loss), "
    "and where self.should_step is true self.optimizers_step(): saves, limits, schedules and logs do not see step()."
)


@dataclass(frozen=True, eq=False)
class Recipe:
    """What the class of a recipe says of itself.

    Attributes:
        name: of the class, for messages.
        has_own_fit_batch: whether it overrides ``fit_batch``.
        freezes: whether it overrides ``freeze_optimizers``.

    Ranks: local; equal on all ranks.
    """

    name: str
    has_own_fit_batch: bool = False
    freezes: bool = False


class StepHooks(Protocol):
    """The hooks of a recipe that have a say in an optimizer step.

    Ranks: all.
    """

    def freeze_optimizers(self, optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizers that step."""

    def check_gradients(self) -> None:
        """Drop gradients that are not finite."""


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Gradients that are ready for an ``optimizers_step`` of the recipe.

    Attributes:
        optimizers: for which they were made ready.
        multiplier: what is still to be applied to them.
        updates: whether the scaler chooses its next scale after the step; None: nothing is unscaled.
    """

    optimizers: list[torch.optim.Optimizer]
    multiplier: float | torch.Tensor
    updates: bool | None = None


def _no_more(_: Any) -> None:
    """Do nothing: the gradients are finished."""


class TrainStep:
    """The backward passes of an accumulation window, and the optimizer step at its end.

    Args:
        recipe: for messages, and whether it says which optimizers step.
        modules: whose gradients they are.
        strategy: how the ranks average them.
        options: of the run.
        progress: its counters and window are kept up to date.
        scaler: of fp16 gradients; may be disabled.
        ema: follows every step; or None.

    Attributes:
        optimizers: name -> optimizer, or None; the recipe's ``optimizers_dict``.
        optimizer: the single one, where a recipe has no names; or None.
        schedule: stepped after every optimizer step; or None.
        sum_divisor: what sums are divided by before fp16 scaling; None until it is agreed on.
        gc_interval: optimizer steps from one collection of garbage to the next; 0: Python decides. Of this ``fit``.
        first_gradients: watches the training until its first step with gradients; None after it.
        agree: called before the ranks send each other anything of an optimizer step; or None.
        timer: measures steps; or None.

    Ranks: collective.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> from ddpkit.strategies import Strategy
        >>> net, scaler = torch.nn.Linear(1, 1), torch.amp.GradScaler("cpu", enabled=False)
        >>> step = TrainStep(Recipe("Line"), net, Strategy(), RunOptions(), Progress(), scaler)
        >>> step.should_step
        True
    """

    def __init__(
        self,
        recipe: Recipe,
        modules: nn.ModuleDict,
        strategy: Strategy,
        options: RunOptions,
        progress: Progress,
        scaler: torch.amp.GradScaler,
        ema: WeightAverage | None = None,
    ) -> None:
        self.recipe, self.name, self.device = recipe, recipe.name, str(options.device)
        self.modules, self.strategy, self.options = modules, strategy, options
        self.progress, self.ema = progress, ema
        self.scaler = scaler
        self.optimizers: dict[str, torch.optim.Optimizer] | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedule: optim.Schedule | None = None
        self.sum_divisor: float | None = None
        self.first_gradients: FirstGradients | None = FirstGradients(self.name)
        self.agree: Callable[[], None] | None = None
        self.timer: StepTimer | None = None
        self._dropping_casts: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.gc_interval = options.gc_interval
        self._is_on_gpu = self.device.partition(":")[0] in optim.GPUS
        self._unscaled: tuple[torch.optim.Optimizer, ...] = ()
        self._prepared: _Prepared | None = None
        self._stepped: list[torch.optim.Optimizer] | None = None
        self._waiting: list[torch.optim.Optimizer] = []  # have stepped in the window that is not over

    @property
    def _active_scaler(self) -> torch.amp.GradScaler | None:
        return self.scaler if self.scaler.is_enabled() else None

    # ------------------------------------------------------------------ backward

    @property
    def should_step(self) -> bool:
        """Whether the current micro-batch closes its window."""
        window = self.progress.window
        if window.closes:
            window.is_asked, window.deferred_at = True, -1
        return window.closes

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are accumulated without being averaged over ranks."""
        self.progress.window.defer(self.progress.step)
        return self.strategy.no_sync()

    def backward(self, loss: Any, *, retain_graph: bool = False) -> None:
        """Back-propagate a loss of the current micro-batch, weighed against the others of its window.

        Args:
            loss: the mean over the batch's samples, shape ``()``; or ``(loss_sum, count)``.
            retain_graph: keep the graph for another loss that shares a part of it.

        Raises:
            BatchError: the loss is not one number, does not depend on a parameter, or cannot be added to earlier ones.
        """
        window = self.progress.window
        if window.deferred_at != self.progress.step and (
            not window.closes or (not window.is_asked and self.options.grad_accumulation_factor > 1)
        ):
            window.defer(self.progress.step)
        count, scale = None, 0.0
        if loss.__class__ is tuple:
            loss, count = sum_and_count(loss, self.name)
        elif window.counted is not None:
            raise BatchError(MIXED.format(self.name), hook="compute_objectives")
        else:
            window.has_means = window.is_weighed = True
            scale = window.loss_scale
        try:
            is_leaf = loss.is_leaf  # getattr would be a call more in every batch
        except AttributeError:  # no tensor: an error follows
            is_leaf = False
        if is_leaf and self._depends_on_nothing(loss, count):
            self._pass_without_backward(count, retain_graph=retain_graph)
            return
        if self.first_gradients is not None:
            self.first_gradients.note(loss, self.progress.step)
        if count is not None:
            scale = self._count(count)
        with self.strategy.backward_pass(self.modules, closes=window.closes, counts=window.count > 0):
            backward(
                loss,
                scale,
                self._active_scaler,
                self.name,
                retain_graph=retain_graph,
                has_own_fit_batch=self.recipe.has_own_fit_batch,
                timer=self.timer,
            )

    def _pass_without_backward(self, count: torch.Tensor | float | None, *, retain_graph: bool) -> None:
        window = self.progress.window
        with self.strategy.without_backward(closes=window.closes, counts=window.count > 0, retain_graph=retain_graph):
            if count is not None:
                self._count(count)

    def _depends_on_nothing(self, loss: torch.Tensor, count: torch.Tensor | float | None) -> bool:
        """Say whether a loss without a graph is meant so: a batch that uses nothing, as one without ground truth.

        That is a tensor which requires a gradient all the same, or a sum over nothing.

        Raises:
            BatchError: it is, and ``static_graph`` promises that no batch is.
        """
        if loss.numel() != 1:
            return False  # an error follows
        if loss.requires_grad:
            is_meant = all(loss is not one for one in self.modules.parameters())
        else:
            is_meant = count is not None and float(count) == 0.0
        if is_meant and self.options.static_graph:
            raise BatchError(NOT_STATIC.format(self.name), hook="compute_objectives")
        return is_meant

    def note_loss(self, loss: Any) -> tuple[Any, Any]:
        """Note the loss of the current micro-batch.

        Args:
            loss: as ``compute_objectives`` returned it.

        Returns:
            What ``fit_batch`` returns, detached; and the mean loss, attached.
        """
        progress, result = self.progress, loss
        if loss.__class__ is tuple:
            loss_sum, count = sum_and_count(loss, self.name)
            result, loss = (loss_sum.detach(), count if progress.window.count else 0.0), loss_sum / count
        else:
            result = loss.detach()
        progress.result, progress.result_of = result, progress.step
        return result, loss

    def _count(self, count: torch.Tensor | float) -> float:
        """Add to the window's count, and return the factor for the loss sum; at the window's end, start to average."""
        window = self.progress.window
        if window.has_means:
            raise BatchError(MIXED.format(self.name), hook="compute_objectives")
        if window.counted is not None and (window.is_overdue or window.counted_at == self.progress.step):
            words = NOT_DIVIDED if window.is_overdue else TWO_SUMS
            raise BatchError(words.format(self.name), hook="fit_batch")
        if not window.count:
            count = 0.0
        elif isinstance(count, torch.Tensor):
            # Bytes would wrap around, half precision would round, and CUDA graphs overwrite theirs in the next batch.
            count = count.to(widest_float(count.device), copy=True)
        if window.counted is None:
            window.divisor = self._divisor_of_sums(count)
        window.counted = count if window.counted is None else window.counted + count
        window.counted_at = self.progress.step
        if self.timer is not None and self.timer.measures:
            self.timer.note_count(count)
        if window.closes and self.agree is None:
            window.average = self.strategy.start_average(window.counted, self.device)
        return 1.0 / window.divisor if window.count else 0.0

    def _divisor_of_sums(self, count: torch.Tensor | float) -> float:
        """Return what loss sums are divided by, so that they stay in the range of fp16 where it is used; else 1.

        A power of two, near what the ranks' first sums of the run count. It is agreed on once, and saved.
        """
        if self._active_scaler is None and self.options["ddp_comm_hook"] != "fp16":
            return 1.0
        if self.sum_divisor is None:
            average = float(self.strategy.start_average(count, self.device)())
            if not 0.0 < average < math.inf:
                return 1.0
            self.sum_divisor = 2.0 ** max(round(math.log2(average)), 0)
        return self.sum_divisor

    # ------------------------------------------------------------------ the optimizer step

    def step_optimizers(self, brain: StepHooks) -> None:
        """Clip all gradients together, step the optimizers, drop the gradients; or skip, on all ranks alike.

        Args:
            brain: of the recipe.

        Raises:
            BatchError: the counts of the window add up to less than 0.
            NonFiniteLossError: more than ``nonfinite_patience`` steps of this epoch were not finite.
        """
        timer = self.timer
        if timer is None or not timer.measures:
            self._step_optimizers(brain)
            return
        timer.begin_optimizer()
        self._step_optimizers(brain)
        timer.end_optimizer()

    def _step_optimizers(self, brain: StepHooks) -> None:
        progress = self.progress
        if progress.follow is not None or progress.error is not None:
            progress.settle()
        prepared = self._prepared
        multiplier = self.close_window() if prepared is None else prepared.multiplier
        optimizers = self.note_optimizers_to_step(brain)
        if not optimizers:
            return
        is_ready = prepared is not None and prepared.optimizers == optimizers
        if progress.phase is not _IN_PASS:  # in a loop of the recipe's own each call is a step
            progress.window.number += 1
        finish = _no_more if is_ready else self.strategy.finish_gradients
        finish(optimizers)
        if self.first_gradients is not None:
            self._compare_first_gradients(brain)
        scaler = self._active_scaler
        if scaler is None and self.options["skip_nonfinite_grads"]:  # by name: a call less in every step
            optim.own_gradients(optimizers)
            brain.check_gradients()
        elif scaler is None and self._is_on_gpu and self._step_late(optimizers, multiplier):
            return
        known = prepared.updates if is_ready and prepared is not None else None
        updates = scaler is None or (self._note_unscaled(optimizers) if known is None else known)
        result = optim.take_step(
            optimizers,
            self.options["max_grad_norm"],
            scaler,
            multiplier,
            updates=updates,
            alone=self.strategy.steps_alone,
        )
        if progress.window.closes:
            progress.window_end = progress.step
        self._follow(optimizers, multiplier, result, progress.step, progress.window.number)

    @contextlib.contextmanager
    def final_gradients(self, brain: StepHooks) -> Iterator[None]:
        """Return a context for an ``optimizers_step`` of the recipe, which finds the gradients as a step uses them.

        They are averages over the ranks, divided by the window's count and by the scale of fp16. What the recipe makes
        of them is stepped on by ``super().optimizers_step()``, which does none of that again.

        Args:
            brain: of the recipe.
        """
        if self._prepared is not None:  # a class above has its own, too
            yield
            return
        self._prepared = self._prepare(brain)
        try:
            yield
        finally:
            self._prepared = None

    def _prepare(self, brain: StepHooks) -> _Prepared:
        self.progress.settle()
        multiplier, optimizers = self.close_window(), self.optimizers_to_step(brain)
        if not optimizers:
            return _Prepared(optimizers, multiplier)
        self.strategy.finish_gradients(optimizers)
        scaler, updates = self._active_scaler, None
        if isinstance(scaler, StepScaler):  # another's would refuse to unscale again
            updates = self._note_unscaled(optimizers)
            optim.unscale(optimizers, scaler)
        factor = float(multiplier)
        if not 0.0 < factor < math.inf:  # the step is left out, or is an error
            return _Prepared(optimizers, multiplier, updates)
        if factor != 1.0:
            stepped = optim.parameters_of(list(self.named_optimizers().values()))
            optim.multiply_gradients(dict.fromkeys((*self.modules.parameters(), *stepped)), factor)
        return _Prepared(optimizers, 1.0, updates)

    def drop_casts_after_steps(self, optimizers: Mapping[str, Any]) -> None:
        """Have autocast cast weights anew after each step, where a step may be made inside of its context.

        Args:
            optimizers: by name.
        """
        kinds = {"cpu", self.device.partition(":")[0]} - {"meta"}
        if not (self.recipe.has_own_fit_batch or any(map(torch.is_autocast_enabled, kinds))):
            return  # then the library steps, outside of it
        for one in optimizers.values():
            if isinstance(one, torch.optim.Optimizer) and one not in self._dropping_casts:
                self._dropping_casts.add(one)
                one.register_step_post_hook(drop_casts)

    def watch_anew(self) -> None:
        """Look once more, at the next step, at what is not trained: the modules are others."""
        if self.first_gradients is not None:
            self.first_gradients.stop()
        self.first_gradients = FirstGradients(self.name)

    def watch_first_step(self, brain: StepHooks) -> None:
        """Have the first step compared, too, that a ``fit_batch`` of the recipe makes by itself."""
        first = self.first_gradients
        if first is not None and self.recipe.has_own_fit_batch:
            named = self.named_optimizers()
            first.watch(named, lambda *_: first.compare(brain, self.modules, named))

    def _compare_first_gradients(self, brain: StepHooks) -> None:
        """Warn, before the first step with gradients, of parameters that are not trained; look no more after it."""
        first = self.first_gradients
        if first is None:
            return
        if first.is_settled:
            first.stop()
            self.first_gradients = None
        else:
            first.compare(brain, self.modules, self.named_optimizers())

    def _step_late(self, optimizers: list[torch.optim.Optimizer], multiplier: Any) -> bool:
        """Step without a wait for the GPU, if that can be; look at it at once where something follows each step."""
        progress, norm, alone = self.progress, self.options["max_grad_norm"], self.strategy.steps_alone
        if alone or (late := optim.take_late_step(optimizers, norm, multiplier)) is None:
            return False
        if progress.window.closes:
            progress.window_end = progress.step
        step, number = progress.step, progress.window.number  # the result is looked at in a later batch
        progress.leave_open(lambda: self._follow(optimizers, multiplier, late.result(), step, number))
        by_step = self.schedule is not None and self.schedule.every == "step"
        if self.ema is not None or by_step or self.options["ddp_comm_hook"] is not None:
            progress.settle()
        return True

    def optimizers_to_step(self, brain: StepHooks) -> list[torch.optim.Optimizer]:
        """Return the optimizers that step now."""
        if self.optimizers is not None:
            chosen = brain.freeze_optimizers(self.optimizers) if self.recipe.freezes else self.optimizers
            if chosen is None:
                raise BatchError(NO_OPTIMIZERS.format(self.name), hook="freeze_optimizers")
            return list(chosen.values())
        return [] if self.optimizer is None else [self.optimizer]

    def note_optimizers_to_step(self, brain: StepHooks) -> list[torch.optim.Optimizer]:
        """Return :meth:`optimizers_to_step`; remember them, where a recipe freezes some."""
        stepping = self.optimizers_to_step(brain)
        if self.recipe.freezes and self.optimizers:
            self._stepped = [*(self._stepped or ()), *stepping]
        return stepping

    def named_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return all optimizers by name, also a single one that a recipe has given no name."""
        return self.optimizers or ({} if self.optimizer is None else {"optimizer": self.optimizer})

    @property
    def freezes(self) -> bool:
        """Whether the recipe says which optimizers step."""
        return self.recipe.freezes and bool(self.optimizers)

    def drop_frozen_gradients(self) -> None:
        """Drop a window's gradients that no step has used, also those that came after an optimizer's step.

        Under :meth:`no_sync` an optimizer that has stepped accumulates for its next step. These gradients stay, and
        nothing is saved before that step.
        """
        stepped, self._stepped = self._stepped, None
        if stepped is not None:
            unused = [*(self.optimizers or {}).values()]
            if self.progress.window.pending(self.progress.step):
                unused = [one for one in unused if all(one is not other for other in stepped)]
            optim.zero_gradients(unused, set_to_none=True)
            if self._unscaled:  # no gradient waits for their step any more
                self.scaler.update()
                self._unscaled = ()

    def prepare_flush(self, brain: StepHooks) -> bool:
        """Say whether an own ``fit_batch`` left gradients in a window that the epoch cut short; set its multiplier."""
        window = self.progress.window
        pending = window.pending(self.progress.step)
        if not (pending and optim.gradients(self.optimizers_to_step(brain))):
            return False
        if not (window.is_weighed or window.has_means or window.counted is not None):
            window.multiplier = self.options.grad_accumulation_factor / pending  # it was divided by the factor
        return True

    def warn_if_diverged(self) -> None:
        """Warn, after an epoch, if an own ``fit_batch`` has let the ranks' weights part; of each entry once."""
        diverged = self.strategy.diverged_entries(self.modules) if self.recipe.has_own_fit_batch else []
        if diverged:
            logger.warning_once(APART, self.name, ", ".join(f"modules[{name!r}]" for name in diverged))

    @contextlib.contextmanager
    def warning_without_steps(self) -> Iterator[None]:
        """Warn if no optimizer step is counted in the first epoch, though all of its gradients were finite.

        Raises:
            ConfigError: no optimizer has had a gradient in any step.
        """
        progress = self.progress
        first, before = progress.window_end, progress.optimizer_step
        yield
        has_stepped = progress.optimizer_step > before or progress.nonfinite
        # fp16 may skip all steps of a short epoch.
        if progress.window_end > first and not (has_stepped or progress.epochs or self.scaler.is_enabled()):
            logger.warning(NO_STEP, self.name)
        if self.first_gradients is not None and progress.window_end > first:
            self.first_gradients.require(self.named_optimizers())
            self.first_gradients.stop()
            self.first_gradients = None

    def close_window(self) -> torch.Tensor | float:
        """Return the factor for the gradients before the step, and reset the count."""
        if self.agree is not None:
            self.agree()
        window = self.progress.window
        if window.counted is not None:
            average = window.average or self.strategy.start_average(window.counted, self.device)
            count = average()  # of sums, averaged over the ranks as their gradients are
            window.multiplier = window.divisor / count if isinstance(count, torch.Tensor) or count else math.inf
        return window.stepped()

    def _follow(
        self, optimizers: list[Any], multiplier: Any, result: optim.StepResult, step: int, number: int
    ) -> None:
        """Do what follows a step, made or skipped, in the window of this number."""
        if self.timer is not None:
            self.timer.gradient_norm = result.norm
        if result.stepped:
            self._follow_step(optimizers, result, step, number)
        else:
            self._follow_skipped(multiplier, result, step, number)

    def _follow_skipped(self, multiplier: Any, result: optim.StepResult, step: int, number: int) -> None:
        """Say why a step was skipped; count it, if that is the gradients' fault."""
        scaler, window = self._active_scaler, self.progress.window
        if result.norm < 0:  # by the multiplier's sign
            raise BatchError(
                f"{self.name}.compute_objectives returned (loss_sum, count) with counts that add up to less than 0: "
                "count must be >= 0.",
                hook="compute_objectives",
            )
        if math.isinf(multiplier):
            logger.warning_once(
                "The count of (loss_sum, count) was 0 over all batches of an optimizer step: such steps are left out."
            )
        elif scaler is None or scaler.get_scale() < 1.0:  # at 1 or more the scale is to blame, and has been lowered
            self.strategy.forget_errors()
            if window.skipped_in != number:
                window.skipped_in = number
                self.progress.count_skipped(result.norm, self.options.nonfinite_patience, step)

    def _follow_step(self, stepped: list[torch.optim.Optimizer], result: optim.StepResult, step: int, n: int) -> None:
        """Count the window of this number, in which optimizers have stepped; average the weights, step the schedule.

        Several steps in one window count once, as ``total_steps`` counts windows.
        """
        progress, window = self.progress, self.progress.window
        if result.clipped and window.clipped_in != n:
            window.clipped_in = n
            progress.clipped += 1
        if not result.norm < math.inf:  # then zeros stood in for this rank's own gradients
            progress.count_skipped(result.norm, None, step)
        is_first = window.stepped_in != n
        if is_first:
            window.stepped_in = n
            progress.optimizer_step += 1
        if progress.phase is _IN_PASS and self.waits_for_window:
            self._waiting += stepped
        elif is_first:
            self._follow_window(stepped)
        if is_first and self.gc_interval and progress.optimizer_step % self.gc_interval == 0:
            gc.collect()

    @property
    def waits_for_window(self) -> bool:
        """Whether something follows a window only when it is over: an own ``fit_batch`` may step several times."""
        by_step = self.schedule is not None and self.schedule.every == "step"
        return self.recipe.has_own_fit_batch and (self.ema is not None or by_step)

    def forget_window(self) -> None:
        """Forget what an interrupted pass has left; drop its gradients, where ``zero_grad`` sees a part of them."""
        self._waiting.clear()
        self._stepped = None
        if self.freezes:
            optim.zero_gradients((self.optimizers or {}).values(), set_to_none=True)

    def end_window(self) -> None:
        """Average the weights and step the schedule after a window in which an own ``fit_batch`` has stepped."""
        if self._waiting:
            stepped, self._waiting = self._waiting, []
            self._follow_window(stepped)

    def _follow_window(self, stepped: list[torch.optim.Optimizer]) -> None:
        if self.ema is not None:
            self.ema.update()
        if self.schedule is not None:
            self.schedule.after_step(stepped)

    def _note_unscaled(self, optimizers: list[torch.optim.Optimizer]) -> bool:
        """Note which optimizers are unscaled; return whether no gradients wait with the present scale."""
        known = [] if self.optimizers is None else [*self.optimizers.values()]
        if any(one is other for one in optimizers for other in self._unscaled):
            self.scaler.update(self.scaler.get_scale())  # they step once more, with gradients of the present scale
            self._unscaled = ()
        done = (*self._unscaled, *(one for one in optimizers if optim.gradients([one])))
        waiting = optim.gradients([one for one in known if all(one is not other for other in done)])
        self._unscaled = done if waiting else ()
        return not waiting
