"""The floating-point operations of one early optimizer step, counted once in a run, on the main
process.

Only with ``--count_flops``: counting intercepts each operation of the step, as torch has nothing
that only watches them and leaves a user's own profilers alone (``docs/decisions``).
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit.compat import has_compiled_code, is_compiled
from ddpkit.distributed import if_main_process
from ddpkit.logger import get_logger
from ddpkit.run.observers import Observer
from ddpkit.train_logger import run_event
from ddpkit.training import FeedThrough, recomputed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddpkit.step_times import FlopCounter
    from ddpkit.training import RunContext, TrainStep, Window

logger = get_logger(__name__)

_COUNTED = 2  # the step of the run; in the first, much is done that is done once

COMPILED = "a part of the model is compiled, and its operations are not seen"
THREADS = "data_parallel_backend runs the model in threads, whose operations are not seen"
BESIDE = "--count_flops: nothing is counted in this call of fit, as %s is recorded in it."
FAILED = (
    "The operations of this step were counted (--count_flops), and some do not run under a "
    "counter. If the run goes on without the option, this is the cause."
)


class StepFlops(Observer):
    """Counts the operations of the second optimizer step that this process trains, on the main
    process alone.

    That step takes longer than others. It is not measured, on any rank.

    Args:
        context: of the run.
        train_step: has the timer.
        on_count: is given the operations, and the peak of the device or None.

    Attributes:
        is_done: whether they were counted, or cannot be.

    Ranks: all, as the passes of training. Nothing is sent.
    """

    def __init__(
        self,
        context: RunContext,
        train_step: TrainStep,
        on_count: Callable[[int, float | None], object],
    ) -> None:
        self.is_done = False
        self._has_told = False
        self._context = context
        self._train_step = train_step
        self._on_count = on_count
        self._steps = 0  # that are over
        self._counter: FlopCounter | None = None
        self._running = contextlib.ExitStack()

    def feed(self, feed: Any, others: Sequence[str] = ()) -> Any:
        """Return the feed of a pass, whose batches of the counted step are followed.

        Once the count is done this is the feed itself.

        Args:
            feed: whose batches the loop trains on; the timer of steps sees them before.
            others: what else is recorded, in which the counter would be seen.
        """
        if not self._context.options.count_flops:
            return feed
        if others and not self._has_told:
            self._has_told = True
            logger.warning(BESIDE, others[0])
        if self.is_done or others:
            return feed
        return FeedThrough(feed, functools.partial(self._batches, feed))

    def _batches(self, feed: Any, window: Window) -> Iterator[Any]:
        batches = iter(feed.batches(window))
        for batch in batches:
            is_counted = self._steps == _COUNTED - 1
            if is_counted:
                self._begin_batch()
            yield batch
            self._running.close()
            if window.closes:
                self._steps += 1
                if is_counted:
                    self._finish()
                    break
        yield from batches

    def end_batch(self) -> None:
        """Count nothing more of the present batch: another stage begins."""
        self._running.close()

    @contextlib.contextmanager
    def during_pass(self) -> Iterator[None]:
        """Return a context for a pass: nothing is counted after it, whatever ends it."""
        try:
            yield
        except Exception:
            if self._counter is not None:
                logger.warning(FAILED)
            raise
        finally:
            self._running.close()
            if not self.is_done:  # a step that is not over is not the step
                self._counter = None

    def _begin_batch(self) -> None:
        timer = self._train_step.timer
        if timer is not None:
            timer.stop()
        if not if_main_process() or self._problem():
            return
        if self._counter is None:
            from ddpkit.step_times import FlopCounter  # which a step needs once

            blocks = [recomputed(module) for module in self._context.modules.modules()]
            found = [block for block in blocks if block is not None]
            self._counter = FlopCounter(lambda: any(block.is_recomputing for block in found))
        self._running.enter_context(self._counter)

    def _problem(self) -> str:
        """Return why the operations of this run cannot be counted; empty if they can."""
        modules = self._context.modules
        if any(isinstance(module, nn.DataParallel) for module in modules.modules()):
            return THREADS
        if has_compiled_code() or any(map(is_compiled, modules.modules())):
            return COMPILED
        return ""

    def _finish(self) -> None:
        self.is_done = True
        counter = self._counter
        self._counter = None
        problem = self._problem()
        if counter is not None and not problem:
            problem = counter.problem
        name = device_name(self._context.device)
        if counter is None or problem:
            if if_main_process():
                run_event("flops", per_step=None, device=name, problem=problem)
            return
        facts: dict[str, Any] = {"per_step": counter.total, "device": name}
        peak = counter.peak(name)
        if peak is not None:
            facts["peak_per_second"] = peak
        run_event("flops", **facts)
        self._on_count(counter.total, peak)


def device_name(device: str) -> str:
    """Return what a device calls itself; its kind, where it says nothing.

    Args:
        device: such as ``"cuda:1"``.

    Ranks: local.

    Example:
        >>> device_name("cpu")
        'cpu'
    """
    kind = torch.device(device).type
    ask = getattr(getattr(torch, kind, None), "get_device_name", None)
    return kind if kind == "cpu" or ask is None else str(ask(device))
