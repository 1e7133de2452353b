"""``--auto_micro_batch``: an optimizer step that some rank has no memory for is repeated on all, in
smaller parts.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit.base import StageData, kind_of, temporarily
from ddpkit.data import PlannedBatchSampler
from ddpkit.dataloader import plan_of
from ddpkit.distributed import get_rank, get_world_size, sum_over_ranks
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.optim import parameters_of
from ddpkit.run.passes import Passes
from ddpkit.seed import restore_rng_state, rng_state
from ddpkit.strategies import send_from_main
from ddpkit.training import FeedThrough, KeptMetrics, Window, metrics_among

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpkit.data import SamplingPlan
    from ddpkit.run.memory_report import MemoryReport
    from ddpkit.run.run_state import RunState
    from ddpkit.training import Feed, RunContext, StreamFeed, TrainStep

logger = get_logger(__name__)

UNAGREED = (
    "auto_micro_batch: {}.optimizers_step does not call super().optimizers_step(), in which the "
    "processes agree on whether all have had enough memory. Call it, or leave --auto_micro_batch "
    "out."
)


class StepTooLargeError(Exception):
    """Some other rank had no memory for the optimizer step; never seen by a user."""


class StepFitsError(Exception):
    """All ranks had memory for the first step of the run, and are to try a larger micro-batch;
    likewise.
    """


class AutoMicroBatch(Passes):
    """Repeats what is left of a pass with micro-batches of half the size where a step does not fit
    into memory.

    In the first step of a run it then searches by bisection between the size that fits and the size
    that did not.

    The ranks send each other nothing of a step before they have agreed that each had enough memory
    so far: after the backward passes, and before each exchange of batch statistics. A rank that has
    run out of memory says so at the next of these points, and all ranks leave the step there. DDP
    averages the gradients after the last of them, in one piece, not while they are computed.

    Args:
        context: of the run.
        train_step: of the run.
        run_state: gets the step plan.
        memory: tells what took the memory, where no size fits.

    Ranks: collective.

    State: ``micro_batch_size`` and ``grad_accumulation_factor`` that are in use; the plan of the
    loader.
    """

    def __init__(
        self,
        context: RunContext,
        train_step: TrainStep,
        run_state: RunState,
        memory: MemoryReport,
    ) -> None:
        self.context = context
        self.train_step = train_step
        self.run_state = run_state
        self._memory = memory
        self._kept = KeptMetrics(())  # as the step began; a repeated step must not count twice
        self._is_open = False  # whether the ranks have still to agree on a step
        self._plan: SamplingPlan  # of the pass
        self._searches = False  # whether the run has made no step yet
        # what is known from that: the largest size that fits, the smallest that does not
        self._fits = self._fails = 0
        # held while a larger size is tried: for what an optimizer will keep
        self._room: torch.Tensor | None = None
        self._random: dict[str, Any] | None = None  # as the step began
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []  # likewise
        # whose buffers rank 0 sends after an agreement, as DDP in a forward pass
        self._sends: list[nn.Module] = []

    def require(self, loader: Any) -> None:
        """Refuse what cannot be repeated, or divided.

        Args:
            loader: of the training.

        Raises:
            ConfigError: the run uses something that cannot be repeated.
        """
        context = self.context
        options = self.context.options
        waits = get_world_size() > 1 and any(
            isinstance(module, nn.SyncBatchNorm) for module in context.modules.modules()
        )
        strategy = context.strategy
        recipe = context.recipe
        refused = {
            f"with {strategy.name}, {strategy.unrepeatable}": strategy.unrepeatable != "",
            (
                "without global_batch_size, which it divides: give --global_batch_size"
            ): context.accumulation.global_batch_size is None,
            "with static_graph": options.static_graph,
            (
                "with fp16, whose scale is agreed on inside of a step (use bf16)"
            ): self.train_step.scaler.is_enabled(),
            f"with a fit_batch of its own, as {recipe.name} has it": recipe.has_own_fit_batch,
            (
                "with torch.nn.SyncBatchNorm, where a process that has run out of memory leaves "
                "the others waiting: give the model BatchNorm, which ddpkit synchronises"
            ): waits,
            (
                f"with {kind_of(loader)}, whose batches it cannot divide: give a dataset with "
                "a length"
            ): not (
                isinstance(plan_of(loader), PlannedBatchSampler)
                and getattr(loader, "batch_sampler", None)
            ),
        }
        for words in (words for words, is_so in refused.items() if is_so):
            raise ConfigError(
                f"auto_micro_batch does not work {words}. Change that, or leave "
                "--auto_micro_batch out."
            )

    def begin_with(self, size: int) -> None:
        """Begin with a size that has fitted before, or with a smaller one that is asked for.

        Args:
            size: samples at a time on each process.
        """
        accumulation = self.context.accumulation
        size = min(size, accumulation.micro_batch_size or size)
        accumulation.use({"micro_batch_size": size, "grad_accumulation_factor": 1})

    def begin(self, *owners: Any) -> None:
        """Note in whose metrics the pass counts."""
        self._kept = metrics_among(*owners)

    def run(self, one_pass: Callable[[], float], loader: Any) -> float:
        """Make a pass; after each step that was too large, make what is left of it, in smaller
        micro-batches.

        Args:
            one_pass: goes on where the progress says, with batches of :meth:`feed`.
            loader: of this rank.

        Returns:
            What it returns.

        Raises:
            ConfigError: a step is too large with one sample at a time.
        """
        with self._agreeing():
            while True:
                error = ""
                self._plan = loader.batch_sampler.plan
                try:
                    return one_pass()
                except StepFitsError:
                    size = self._between()
                except StepTooLargeError:
                    size = self._smaller()
                except torch.OutOfMemoryError as found:
                    if not self._is_open:
                        raise
                    error = f" ({str(found).partition(chr(10))[0]})"
                    size = self._smaller()
                    logger.warning(
                        "Rank %d ran out of memory%s.",
                        get_rank() or 0,
                        error,
                        main_process_only=False,
                    )
                    if not size:
                        self._memory.tell(found)
                    self._ask(failed=True)
                self._divide(loader.batch_sampler, size, error)  # here what was computed is freed

    def _smaller(self) -> int:
        """Return the size to go on with where the present one is too large."""
        size = self._plan.batch_size
        self._fails = size
        if self._searches and 0 < self._fits < size:
            return self._between()
        self._fits = 0
        return size // 2

    def _between(self) -> int:
        """Return a size between what fits and what does not that makes fewer batches; or what
        fits.
        """
        while self._fails - self._fits > 1:
            middle = (self._fits + self._fails) // 2
            if self._parts(middle) < self._parts(self._fits):
                return middle
            self._fits = middle
        return self._fits

    def _parts(self, size: int) -> int:
        return -(-self._plan.global_batch_size // (size * get_world_size()))

    def ready(self, otherwise: Callable[[], object]) -> Callable[[], object]:
        """Return what is to be called when a pass has its loader's iterator.

        Args:
            otherwise: the result in a first attempt.
        """
        return (
            otherwise
            if self._random is None
            else functools.partial(restore_rng_state, self._random)
        )

    def feed(self, feed: Feed | StreamFeed) -> FeedThrough:
        """Return a feed that tells when a step begins."""
        return FeedThrough(feed, functools.partial(self._batches, feed))

    def _batches(self, feed: Feed | StreamFeed, window: Window) -> Iterator[Any]:
        begins = True
        for batch in feed.batches(window):
            if begins:
                self.begin_step()
            begins = window.closes
            yield batch

    def begin_step(self) -> None:
        """Note what a second attempt at this step begins with.

        Raises:
            ConfigError: the ranks have not agreed on the step before.
        """
        if self._is_open:
            raise ConfigError(UNAGREED.format(self.context.recipe.name))
        self._is_open, self._random = True, rng_state()
        self._kept.keep()
        if self._searches and 0 < self._fits < self._plan.batch_size:
            weights = sum(
                parameter.numel() * parameter.element_size()
                for parameter in self.context.modules.parameters()
            )
            self._room = torch.empty(
                2 * weights,
                dtype=torch.uint8,
                device=self.context.device,
            )
        self._buffers = [
            (owner, name, getattr(owner, name).clone()) for owner, name, _ in self._buffers
        ]

    def agree(self) -> None:
        """Let the ranks agree, after the backward passes of a step, on whether all had enough
        memory for it.

        Raises:
            StepTooLargeError: one had not.
            StepFitsError: all had, and more may fit.
        """
        self._ask()
        if self._searches and self._fails:
            self._fits = self._plan.batch_size
            if self._parts(self._between()) < self._plan.micro_batches:
                raise StepFitsError
        self._is_open = False
        self._searches = False
        self._room = None
        send_from_main(buffer for module in self._sends for buffer in module.buffers())

    def _before_statistics(self) -> None:
        if self._is_open:
            self._ask()

    def _ask(self, *, failed: bool = False) -> None:
        """Tell the other ranks whether this one has run out of memory, which then raises nothing,
        and ask them.
        """
        if sum_over_ranks([float(failed)], "auto_micro_batch")[0] and not failed:
            raise StepTooLargeError

    @contextlib.contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Return a context in which nothing of a step is sent before the ranks have agreed on
        it.
        """
        from ddpkit.syncbn import SyncBatchNorm  # which few runs need

        step = self.train_step
        strategy = self.context.strategy
        modules = self.context.modules
        saved = modules.state_dict(keep_vars=True)
        owners = dict(modules.named_modules())
        places = [
            (name.rpartition("."), buffer)
            for name, buffer in modules.named_buffers()
            if name in saved
        ]
        self._buffers = [(owners[path], name, buffer) for (path, _, name), buffer in places]
        wrapped = getattr(strategy, "wrapped", ())
        self._sends = [module.module for module in wrapped if module.broadcast_buffers]
        for module in wrapped:
            # else DDP sends its buffers in the first forward pass
            module.require_forward_param_sync = False
        self._random = None
        step.agree = self.agree
        self._searches = not self.context.progress.optimizer_step
        self._fits = 0
        self._fails = 0
        try:
            with (
                strategy.no_sync(),
                temporarily(SyncBatchNorm, before_sending=self._before_statistics),
                temporarily(StageData, may_repeat=True),
            ):
                yield
        finally:
            step.agree = None
            self._is_open = False
            self._buffers = []
            self._room = None

    def _divide(
        self,
        sampler: PlannedBatchSampler,
        size: int,
        error: str,
    ) -> None:
        """Go back to the end of the last step, and make micro-batches of another size."""
        progress = self.context.progress
        plan = self._plan
        progress.resolve_pending()  # of the step before, whose window goes
        self._is_open = False
        self._room = None
        if not size:
            raise ConfigError(
                "auto_micro_batch: one sample at a time is too much for the memory of a "
                f"process{error}, in epoch {progress.epoch}, optimizer step "
                f"{progress.optimizer_step + 1}. Use a smaller model or shorter samples, "
                "--activation_checkpointing, or --precision=bf16."
            )
        factor = self._parts(size)
        sampler.divide(factor)
        size = sampler.plan.batch_size
        self.context.accumulation.use(
            {"micro_batch_size": size, "grad_accumulation_factor": factor}
        )
        # The step is repeated, so all is put back to its beginning. From now on batches are counted
        # in the new size: at the end of a step both sizes have done the same samples.
        progress.repeat_window(plan.micro_batches, factor)
        self._kept.put_back()
        self.run_state.step_plan = replace(
            self.run_state.step_plan,
            grad_accumulation_factor=factor,
            per_process=size,
        )
        with torch.no_grad():
            for owner, name, before in self._buffers:
                getattr(owner, name).copy_(before)
        for parameter in (
            *self.context.modules.parameters(),
            *parameters_of(self.train_step.named_optimizers().values()),
        ):
            parameter.grad = None
        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        words = (
            "optimizer step %d was too large for the memory. It is repeated, and the run goes on, "
            "with"
        )
        if size > plan.batch_size:
            words = (
                "optimizer step %d fits into the memory. It is repeated to see whether more does:"
            )
        words = (
            f"auto_micro_batch: {words} at most %d samples at a time on a process "
            "(--micro_batch_size=%d), "
        )
        logger.announce(
            words + "accumulated over %d batches.",
            progress.optimizer_step + 1,
            size,
            size,
            factor,
        )
