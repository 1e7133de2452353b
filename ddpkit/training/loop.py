"""The loops: one pass of training, one pass of evaluation. They know nothing of files, models or ranks.

What differs between ranks, and what the ranks must agree on, comes in through the :class:`LoopHooks` and a few
callables, so that a loop can be tested with a stub and no model.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ddpkit.control import Requests, start_loading
from ddpkit.distributed import sum_exactly, sum_over_ranks
from ddpkit.errors import BatchError, NonFiniteLossError
from ddpkit.logger import get_logger
from ddpkit.metrics import ExactMeter, LossMeter, counted_by
from ddpkit.reporting import LoggedValues
from ddpkit.training.feed import Window
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpkit.control import PeriodicSync, SyncReport
    from ddpkit.reporting import ProgressBar
    from ddpkit.training.feed import Feed, StreamFeed
    from ddpkit.training.gathering import Seen

logger = get_logger(__name__)


@dataclass
class Progress:
    """How far the run has come.

    Attributes:
        epoch: of the current or last stage.
        step: batches of the current stage, on this rank.
        optimizer_step: updates since the run began.
        began_at: updates before the current epoch.
        is_in_pass: whether a training stage is reading its batches.
        window_end: batches of the current or last training stage up to the end of the last window, stepped or skipped.
        train_meter: losses of the training stage of this epoch on this rank, up to ``window_end``; None before it.
        train_sums: their sum over all ranks, its weight, and the samples; None until that stage is over.
        avg_train_loss: mean training loss of the epoch so far, over all ranks, about a second old.
        is_fitting: whether a call of ``fit`` runs: then a recovered checkpoint sets the position.
        nonfinite: steps skipped in the current epoch because a gradient was not finite.
        clipped: updates of the current epoch whose gradients were scaled down to ``max_grad_norm``; equal on all ranks.
        has_told_clipping: whether a line has said that gradients are clipped.
        window: the current accumulation window.
        meter: losses of the current stage on this rank.
        seen: which samples this rank has seen in the current or last stage; None before the first.
        loader: of the current or last training stage.
        result: the return value of ``fit_batch`` while ``on_fit_batch_end`` runs; it may belong to an older batch.
        result_at: number of the batch of ``result``.
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
    optimizer_step: int = 0
    began_at: int = 0
    is_in_pass: bool = False
    window_end: int = 0
    avg_train_loss: float = 0.0
    is_fitting: bool = False
    nonfinite: int = 0
    clipped: int = 0
    has_told_clipping: bool = False
    window: Window = field(default_factory=Window)
    meter: LossMeter = field(default_factory=LossMeter)
    train_meter: LossMeter | None = None
    train_sums: tuple[float, float, float] | None = None
    seen: Seen | None = None
    loader: Any = None
    result: Any = None
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
        self.new_meter = functools.partial(self.new_meter, copies=True)
        self.meter = self.new_meter()

    def restart(self) -> None:
        """Reset the position of an interrupted pass."""
        self.step, self.window, self.meter = 0, Window(), self.new_meter()
        self.window_end, self.train_meter, self.train_sums, self.loader = 0, None, None, None
        self.is_in_pass = False
        self.result, self.result_at = None, 0
        self.epochs, self.train_loss, self.valid_loss = 0, None, None
        self.logged.values.clear()

    def end_epoch(self) -> None:
        """Note that an epoch is over, its evaluation and its checkpoint too."""
        self.train_meter, self.window_end = None, 0
        self.epochs += 1

    @property
    def clipped_share(self) -> float:
        """The share of the current epoch's updates whose gradients were clipped, 0 to 1; equal on all ranks."""
        made = self.optimizer_step - self.began_at
        return self.clipped / made if made else 0.0

    def count_skipped(self, norm: float, patience: int | None) -> None:
        """Count an optimizer step that was skipped because the gradients' norm was not finite.

        Args:
            norm: equal on all ranks, so all ranks count and give up alike.
            patience: how many of them an epoch may have; None: this rank alone has such gradients, and steps with
                zeros.

        Raises:
            NonFiniteLossError: one more than that.
        """
        self.nonfinite += 1
        where = f"epoch {self.epoch}, batch {self.step}, after optimizer step {self.optimizer_step}"
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
) -> None:
    """Train on every batch of a feed.

    Args:
        brain: of the recipe.
        feed: the batches.
        sync: when the ranks sync.
        on_sync: called with the result of a sync, at the same step on every rank.
        stop_at: end the pass when this many optimizer steps have been made since the run began.
        on_window: called after every optimizer step, if given; at the same step on every rank.
        tell: returns what this rank tells at a sync, beyond its losses.

    Ranks: collective.
    """
    progress, name = brain.progress, type(brain).__name__
    window, meter = progress.window, progress.meter
    sync.start(progress.step)
    if progress.optimizer_step >= stop_at:
        return
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
            if progress.optimizer_step >= stop_at:
                return


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


PARTS = (
    "{}.fit_batch called backward() twice on losses that share a part of one module, and DDP averages each gradient "
    'once: "{}". Add the losses up and call self.backward once; or put all passes under `with self.no_sync():`.'
)

FREED = (
    '{}: the backward pass came to weights that --strategy=fsdp has freed: "{}". Four things lead there. An operation '
    "in place on the output of a module (outputs += 1, outputs.masked_fill_(...)), which cuts off what gathers them: "
    "write outputs = outputs + 1. A module that returns an object, in which torch does not find the tensors: return "
    "them, or a tuple, list, dict or dataclass of them. Gradients of gradients (torch.autograd.grad with "
    "create_graph=True, as for a gradient penalty): use --strategy=zero1 or ddp. A second backward pass over one "
    "forward pass: add the losses up, or call the module once more."
)
FREED_SAYS = "storage of size 0"  # so a tensor whose memory was freed says, in torch 2.13


def backward(
    loss: Any, scale: float, scaler: torch.amp.GradScaler | None, name: str, *, retain_graph: bool = False
) -> None:
    """Back-propagate a weighted loss; if that fails, raise an error that names the problem with the loss.

    Args:
        loss: mean over the micro-batch, shape ``()``.
        scale: its weight in the window.
        scaler: multiplies it further; or None.
        name: of the recipe's class, for the message.
        retain_graph: keep the graph for another backward pass.

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
        if scale != 1.0 and (scaler is not None or loss.numel() != 1 or loss.is_complex()):
            loss, scale = loss * scale, 1.0
        weight = None if scale == 1.0 else torch.full_like(loss, scale)  # the bits of loss * scale, two products less
        (loss if scaler is None else scaler.scale(loss)).backward(weight, retain_graph=retain_graph)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        if "mark a variable ready only once" in str(error):
            raise BatchError(PARTS.format(name, str(error).partition(".")[0])) from error
        if FREED_SAYS in str(error):
            raise BatchError(FREED.format(name, str(error).partition("\n")[0])) from error
        problem = loss_problem(loss)
        if problem is None:
            raise
        raise BatchError(f"{name}.compute_objectives returned {problem}") from error


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
    raise BatchError(f"{name}.{hook} returned {loss_problem(loss)}")


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
        raise BatchError(f"{name}.{hook} returned {problem}")
    return loss_sum, count


def loss_problem(loss: Any) -> str | None:
    """Return the problem with a loss in words, or None.

    Ranks: local.

    Example:
        >>> loss_problem(3.0)
        'a float, not a tensor: return the loss itself, without .item().'
    """
    if loss is None:
        return "a NoneType, not a tensor: look for a missing return."
    if not isinstance(loss, torch.Tensor):
        return f"a {type(loss).__name__}, not a tensor: return the loss itself, without .item()."
    if loss.numel() != 1:
        return f"a tensor of shape {tuple(loss.shape)}, not one number: return its mean over the batch."
    if loss.requires_grad:
        return None
    return (
        "a loss that does not require a gradient: it does not depend on a trainable parameter. Look for "
        "torch.no_grad(), .detach() and frozen parameters."
    )
