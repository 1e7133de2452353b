"""The loops: one pass of training, one pass of evaluation. They know nothing of files, models or ranks.

What differs between ranks, and what the ranks must agree on, comes in through the :class:`LoopHost` and a few
callables, so that a loop can be tested with a stub and no model.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ddpkit.errors import BatchError, DataError, NonFiniteLossError
from ddpkit.logger import get_logger
from ddpkit.metrics import LossMeter
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddpkit.control import Beat, BeatReport
    from ddpkit.progress import ProgressBar

logger = get_logger(__name__)


@dataclass
class Window:
    """The micro-batches of one optimizer step; where in it the loop is.

    Attributes:
        closes: whether the current micro-batch is the last of its window, after which the optimizer steps.
        count: this rank's samples in the current micro-batch; 0 for a repeated one.
        scale: what the current loss is multiplied by before its backward pass.
        correction: what the gradients of the window must be multiplied by, where the weights were not known in advance.
        multiplier: what the next optimizer step multiplies the gradients by: the correction, if ``scale`` was used.
        deferred: micro-batches in a row, up to step ``deferred_at``, that were accumulated under ``no_sync``.
        deferred_at: the last such step; -1 once the optimizers have stepped.

    Ranks: local; all but ``count`` and ``scale`` is equal on all ranks.

    Example:
        >>> window = Window()
        >>> window.defer(5); window.defer(6); window.pending(6), window.pending(7)
        (2, 0)
    """

    closes: bool = True
    count: int = 1
    scale: float = 1.0
    correction: float = 1.0
    multiplier: float = 1.0
    deferred: int = 0
    deferred_at: int = -1

    def defer(self, step: int) -> None:
        """Note that the gradients of a step are only accumulated; a step may say so more than once."""
        if step != self.deferred_at:
            self.deferred = self.deferred + 1 if step == self.deferred_at + 1 else 1
            self.deferred_at = step

    def pending(self, step: int) -> int:
        """Return how many micro-batches up to ``step`` wait for an optimizer step; 0 if ``step`` is not of them."""
        return self.deferred if step == self.deferred_at else 0

    def stepped(self) -> float:
        """Note that the optimizers step now; return what the gradients are multiplied by first."""
        multiplier, self.multiplier, self.deferred, self.deferred_at = self.multiplier, 1.0, 0, -1
        return multiplier


@dataclass
class Progress:
    """How far the run has come.

    Attributes:
        epoch: of the current or last stage.
        step: batches of the current stage, on this rank.
        optimizer_step: updates since the run began.
        nonfinite: steps skipped in the current epoch because a gradient was not finite.
        window: the current accumulation window.
        meter: losses of the current stage on this rank.

    Ranks: local.

    Example:
        >>> Progress().optimizer_step
        0
    """

    epoch: int = 0
    step: int = 0
    optimizer_step: int = 0
    nonfinite: int = 0
    window: Window = field(default_factory=Window)
    meter: LossMeter = field(default_factory=LossMeter)

    def restart(self) -> None:
        """Forget where a pass that was interrupted had come to."""
        self.step, self.window, self.meter = 0, Window(), LossMeter()

    def count_skipped(self, norm: float, patience: int) -> None:
        """Count an optimizer step that was skipped because the gradients' norm was not finite.

        Args:
            norm: equal on all ranks, so all ranks count and give up alike.
            patience: how many of them an epoch may have.

        Raises:
            NonFiniteLossError: one more than that.
        """
        self.nonfinite += 1
        where = f"epoch {self.epoch}, batch {self.step}, after optimizer step {self.optimizer_step}"
        if self.nonfinite > patience:
            raise NonFiniteLossError(
                f"{self.nonfinite} steps of epoch {self.epoch} had gradients that are not finite (norm={norm}; the "
                f"last in {where}), and nonfinite_patience={patience}. All were skipped, so the weights are still "
                "those before. Lower the learning rate, clip harder (--max_grad_norm), look at the data, or raise "
                "--nonfinite_patience."
            )
        logger.warning("The gradients are not finite (norm=%s); step skipped on all ranks: %s.", norm, where)


class LoopHost(Protocol):
    """What a loop asks of the Brain.

    Ranks: as the loops.

    Example:
        >>> LoopHost.__name__
        'LoopHost'
    """

    progress: Progress

    def fit_batch(self, batch: Any) -> torch.Tensor | float:
        """Train on one micro-batch and return its mean loss, detached."""
        ...

    def evaluate_batch(self, batch: Any, stage: Stage) -> torch.Tensor | float:
        """Evaluate one batch and return its mean loss."""
        ...


class Counts(Protocol):
    """Tells how many samples a batch has, here and over all ranks.

    Ranks: local.

    Example:
        >>> Counts.__name__
        'Counts'
    """

    def count(self, batch: int) -> int:
        """Return this rank's number of samples in a batch."""
        ...

    def total(self, batch: int) -> int:
        """Return the number of samples of a batch over all ranks."""
        ...


@dataclass
class Feed:
    """What a pass of training takes its batches from.

    Attributes:
        loader: yields this rank's micro-batches.
        length: their number, the same on every rank; None when it is not known.
        counts: samples of each batch; None when they are not known, and every batch weighs the same.
        factor: micro-batches per optimizer step.
        world_size: number of ranks.
        start: micro-batches of this epoch done before.
        agree: adds up an integer over the ranks; needed when ``length`` is None.

    Ranks: collective when ``length`` is None, else local.

    Example:
        >>> window = Window()
        >>> feed = Feed(loader="abc", length=3, factor=2)
        >>> [(batch, window.closes, window.scale) for batch in feed.batches(window)]
        [('a', False, 0.5), ('b', True, 0.5), ('c', True, 1.0)]
    """

    loader: Iterable[Any]
    length: int | None = None
    counts: Counts | None = None
    factor: int = 1
    world_size: int = 1
    start: int = 0
    agree: Callable[[int], int] = int

    def batches(self, window: Window) -> Iterator[Any]:
        """Yield the batches, each after setting ``window`` for it."""
        if self.length is None:
            return self._unknown(window)
        return self._known(window, self.length)

    def _known(self, window: Window, length: int) -> Iterator[Any]:
        total = 1
        window.correction = 1.0
        for number, batch in enumerate(itertools.islice(self.loader, max(length - self.start, 0)), self.start):
            place = number % self.factor
            if place == 0 or number == self.start:
                total = self._total(range(number, min(number - place + self.factor, length)))
            window.count = 1 if self.counts is None else self.counts.count(number)
            window.scale = window.count * self.world_size / total
            window.closes = place == self.factor - 1 or number == length - 1
            yield batch

    def _total(self, window: range) -> int:
        """Return the number of samples of a window over all ranks; every batch counts one where sizes are unknown."""
        if self.counts is None:
            return len(window) * self.world_size
        return sum(self.counts.total(number) for number in window)

    def _unknown(self, window: Window) -> Iterator[Any]:
        """Agree with the other ranks, batch by batch, on whether there is another one."""
        inner = iter(self.loader)
        batch, present = None, False
        for _ in range(self.start + 1):  # what was done before is read again and left out
            following, present = _take(inner)
            batch = following if present else batch
        ranks = self.agree(int(present))
        if not self.start and ranks < self.world_size:
            raise DataError(
                f"the stream gives a first batch to {ranks} of {self.world_size} rank(s) only: it is empty, or has too "
                "few items for this many processes and this batch size. Look at the stream, start fewer processes, or "
                "use a smaller batch_size."
            )
        place = done = 0
        while ranks:
            following, present_next = _take(inner)
            ranks_next = self.agree(int(present_next))
            place, done = place + 1, done + ranks
            window.count = int(present)
            window.scale = window.count / self.factor
            window.closes = place == self.factor or not ranks_next
            if window.closes:
                window.correction = self.factor * self.world_size / done
                place = done = 0
            yield batch
            batch = following if present_next else batch
            present, ranks = present_next, ranks_next


def _take(iterator: Iterator[Any]) -> tuple[Any, bool]:
    for item in iterator:
        return item, True
    return None, False


def train_epoch(
    host: LoopHost,
    feed: Feed,
    beat: Beat,
    on_beat: Callable[[BeatReport], None],
    stop_at: float,
    *,
    on_window: Callable[[], None] | None = None,
    main_seconds: Callable[[], float] = float,
) -> None:
    """Train on every batch of a feed.

    Args:
        host: whose hooks do the work.
        feed: the batches.
        beat: when the ranks confer.
        on_beat: called with what they learnt, at the same step on every rank.
        stop_at: end the pass when this many optimizer steps have been made since the run began.
        on_window: called after every optimizer step, if given; at the same step on every rank.
        main_seconds: what the main process tells at a beat.

    Ranks: collective.

    Example:
        >>> train_epoch.__name__
        'train_epoch'
    """
    progress = host.progress
    window, meter = progress.window, progress.meter
    beat.start(progress.step)
    if progress.optimizer_step >= stop_at:
        return
    for batch in feed.batches(window):
        progress.step += 1
        meter.append(one_number(host.fit_batch(batch), host, "fit_batch"), window.count)
        if not window.closes:
            continue
        if on_window is not None:
            on_window()
        if progress.step >= beat.due:
            loss_sum, samples, _ = meter.sums()
            on_beat(beat(progress.step, loss_sum, samples, main_seconds()))
        if progress.optimizer_step >= stop_at:
            return


def evaluate_epoch(
    host: LoopHost,
    loader: Iterable[Any],
    stage: Stage,
    bar: ProgressBar,
    *,
    counts: Counts | None = None,
    limit: int | None = None,
    beat: Beat,
) -> None:
    """Evaluate every batch of a loader. No collective: ranks may have different numbers of batches.

    Args:
        host: whose hooks do the work.
        loader: this rank's batches.
        stage: VALID or TEST.
        bar: told about once a second.
        counts: samples of each batch; None weighs all alike.
        limit: stop after so many batches.
        beat: a beat of this rank alone.

    Ranks: local.

    Example:
        >>> evaluate_epoch.__name__
        'evaluate_epoch'
    """
    progress = host.progress
    meter = progress.meter
    beat.start(progress.step)
    with torch.no_grad():
        for number, batch in enumerate(itertools.islice(loader, limit)):
            progress.step += 1
            loss = one_number(host.evaluate_batch(batch, stage), host, "evaluate_batch")
            meter.append(loss, 1 if counts is None else counts.count(number))
            if progress.step >= beat.due:
                loss_sum, samples, _ = meter.sums()
                report = beat(progress.step, loss_sum, samples, 0.0)
                bar.show(report.step, report.loss, report.samples)


def backward(loss: Any, scale: float, scaler: torch.amp.GradScaler, host: object) -> None:
    """Back-propagate a weighted loss; if that cannot be done, say what is wrong with the loss.

    Args:
        loss: mean over the micro-batch, shape ``()``.
        scale: its weight in the window.
        scaler: multiplies it further when it is enabled.
        host: whose ``compute_objectives`` made it, for the message.

    Raises:
        BatchError: the loss is no tensor, no single number, or does not depend on any parameter.

    Ranks: collective under DDP.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> backward(weight.sum(), 0.5, torch.amp.GradScaler(enabled=False), None); weight.grad
        tensor([0.5000])
    """
    try:
        scaled = loss if scale == 1.0 else loss * scale
        (scaler.scale(scaled) if scaler.is_enabled() else scaled).backward()
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        problem = loss_problem(loss)
        if problem is None:
            raise
        raise BatchError(f"{type(host).__name__}.compute_objectives returned {problem}") from error


def one_number(loss: Any, host: object, hook: str = "compute_objectives") -> torch.Tensor | float:
    """Check that a loss is one number, and return it detached.

    Args:
        loss: tensor of one element, or float.
        host: whose hook made it, for the message.
        hook: which, for the message.

    Raises:
        BatchError: it is something else.

    Ranks: local.

    Example:
        >>> one_number(torch.tensor(2.0), None)
        tensor(2.)
    """
    if isinstance(loss, torch.Tensor):
        if loss.numel() == 1:
            return loss.detach() if loss.requires_grad else loss
    elif isinstance(loss, (int, float)):
        return float(loss)
    raise BatchError(f"{type(host).__name__}.{hook} returned {loss_problem(loss)}")


def loss_problem(loss: Any) -> str | None:
    """Say what is wrong with a loss, or return None.

    Ranks: local.

    Example:
        >>> loss_problem(3.0)
        'a float, not a tensor: return the loss itself, without .item().'
    """
    if not isinstance(loss, torch.Tensor):
        return f"a {type(loss).__name__}, not a tensor: return the loss itself, without .item()."
    if loss.numel() != 1:
        return f"a tensor of shape {tuple(loss.shape)}, not one number: return its mean over the batch."
    if not loss.requires_grad:
        return (
            "a loss that does not require a gradient: it does not depend on a trainable parameter. Look for "
            "torch.no_grad(), .detach() or .item() on the way, and for frozen parameters."
        )
    return None
