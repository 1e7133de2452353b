"""The loops over batches: a pass of training, and a pass of evaluation. Both follow one formula.

A step weighs and back-propagates the losses of a window, clips, and steps or skips on all ranks
alike. For micro-batches ``m`` over ranks ``r``, with weights ``w[m, r]`` and losses that are means,
the optimizer steps on ``sum(w * grad) / sum(w)``. DDP averages over the ranks, so that each of them
back-propagates ``loss * w * world_size / total``; the total is known from the plan, before the
first backward pass of the window. If ``compute_objectives`` returns a sum and a count, the
gradients of the sums are accumulated, the counts are added up over the ranks once per window, and
the division is part of the optimizer step. None in the place of such a pair counts as a sum and a
count of 0 (:mod:`ddpkit.training.skipped_batches`).

The step is in :class:`~ddpkit.training.train_step.TrainStep`, the place of a batch in its window in
:class:`~ddpkit.training.window.Window`, and how far the run is in
:class:`~ddpkit.training.progress.Progress`.

The loops know no files, models or ranks. What differs between ranks, and what the ranks must agree
on, comes in through the :class:`~ddpkit.training.recipe.LoopHooks` and a few callables, so that a
loop can be tested with a stub and no model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.control import Requests, start_loading
from ddpkit.metrics import counted_by
from ddpkit.training.losses import one_number, sum_and_count
from ddpkit.training.recipe import LoopHooks
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpkit.control import PeriodicSync, SyncReport
    from ddpkit.reporting import ProgressBar
    from ddpkit.training.feed import Feed
    from ddpkit.training.progress import Progress
    from ddpkit.training.stream_feed import StreamFeed


def train_epoch(
    brain: LoopHooks,
    feed: Feed | StreamFeed,
    sync: PeriodicSync,
    on_sync: Callable[[SyncReport], None],
    stop_at: float,
    *,
    on_window: Callable[[], object] | None = None,
    tell: Callable[[], Requests] = Requests,
) -> bool:
    """Train on every batch of a feed.

    Args:
        brain: of the recipe.
        feed: the batches.
        sync: when the ranks sync.
        on_sync: called with the result of a sync, at the same step on every rank.
        stop_at: end the pass when this many optimizer steps have been made since the run began.
        on_window: called after every optimizer step, if given; at the same step on every rank. The
            pass ends where it returns something that is true.
        tell: returns what this rank sends at a sync beside its losses.

    Returns:
        Whether ``stop_at`` or ``on_window`` has ended the pass; there may be no further batch all
        the same.

    Ranks: collective.
    """
    progress = brain.progress
    name = type(brain).__name__
    window = progress.window
    meter = progress.meter
    is_single = feed.factor == 1  # to ask in every step costs a call
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
            meter.skipped += progress.skipped_at == progress.step
            if not window.closes:
                continue
            progress.window_end = progress.step
            # A copy has no batches of the next window.
            progress.train_meter = meter if is_single else meter.copy()
            if on_window is not None and on_window():
                return True
            if progress.step >= sync.due:
                on_sync(
                    sync(
                        progress.step,
                        *meter.sums()[:2],
                        meter.samples,
                        tell(),
                    )
                )
            if stop_at < math.inf and _is_reached(stop_at, progress):
                return True
    return False


def _is_reached(stop_at: float, progress: Progress) -> bool:
    """Say whether so many optimizer steps are made, the pending one included."""
    progress.resolve_at_sync()
    return progress.optimizer_step >= stop_at


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
    """Evaluate every batch of a loader. Ranks may have different numbers of batches: only
    ``after_batch`` communicates.

    Args:
        brain: of the recipe.
        loader: this rank's batches.
        stage: VALID or TEST.
        bar: told about once a second.
        count: tells the number of samples from a batch's number and the batch.
        sync: a sync of this rank alone.
        after_batch: called with the step, if given; may sync with the other ranks at a step that
            all of them reach.

    Ranks: local.
    """
    progress = brain.progress
    name = type(brain).__name__
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
            if progress.stage_batches is not None:
                progress.stage_batches.sizes.append(samples)
            if progress.step >= sync.due:
                report = sync(
                    progress.step,
                    *meter.sums()[:2],
                    meter.samples,
                    Requests(),
                )
                bar.show(report.step, report.loss, report.samples)
            if after_batch is not None:
                after_batch(progress.step)
