"""The backward passes of an accumulation window, and the optimizer step at its end: clipped, made
or skipped.

The formula that it follows stands at the top of :mod:`ddpkit.training.loop`.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ddpkit import optim
from ddpkit.base import do_nothing, reads_device
from ddpkit.device import widest_float
from ddpkit.errors import BatchError
from ddpkit.logger import get_logger
from ddpkit.precision import StepScaler, drop_casts
from ddpkit.training.context import RunContext
from ddpkit.training.epoch_phase import EpochPhase
from ddpkit.training.first_gradients import FirstGradients
from ddpkit.training.kept_average import KeptAverage
from ddpkit.training.losses import backward, sum_and_count
from ddpkit.training.norm_reading import NormReading
from ddpkit.training.recipe import StepHooks
from ddpkit.training.skipped_batches import TWO_KINDS, SkippedBatches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from ddpkit.step_times import StepTimer


logger = get_logger(__name__)

_IN_PASS = EpochPhase.IN_PASS  # to look a member up costs a call


TWO_SUMS = (
    "{}.fit_batch passed two (loss_sum, count) to backward() before optimizers_step(). If both "
    "count the same, add up the sums; if they belong to two optimizers, step after each, with "
    "grad_accumulation_factor=1; else pass means."
)
NOT_DIVIDED = (
    "{}.fit_batch passed (loss_sum, count) to backward() and let the window end without "
    "optimizers_step(), which divides by the count. Call self.optimizers_step() where "
    "self.should_step is true."
)
NOT_STATIC = (
    "{}.compute_objectives returned a loss that depends on no parameter, and static_graph=True "
    "promises that every batch uses the same parameters. Leave --static_graph out, or return 0.0 "
    "* predictions.sum() for such a batch."
)
APART = (
    "%s.fit_batch steps with gradients that are not averaged over the ranks: after this epoch the "
    "weights of %s are not the same on all of them, and rank 0's are saved. DDP averages what is "
    "computed through self.context.modules, not through hparams or a module's inner parts. Call "
    "self.optimizers_step(), which averages the rest, and not the optimizer's own step(); "
    "--check_parity 2 shows whether the gradients are then those of one process."
)
NO_OPTIMIZERS = "{}.freeze_optimizers returned None: look for a missing return."
NO_STEP = (
    "No optimizer step of %s was counted in its first epoch. Give opt_class, or fill "
    "optimizers_dict in init_optimizers; return optimizers from freeze_optimizers; in a fit_batch "
    "of your own call self.backward(loss), and where self.should_step is true "
    "self.optimizers_step(): saves, limits, schedules and logs do not see step()."
)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Gradients that are ready for an ``optimizers_step`` of the recipe.

    Attributes:
        optimizers: for which they were made ready.
        multiplier: what is still to be applied to them.
        is_final: whether nothing is: the step is going to use them as they are.
        updates: whether the scaler chooses its next scale after the step; None: nothing is
            unscaled.
    """

    optimizers: list[torch.optim.Optimizer]
    multiplier: float | torch.Tensor
    updates: bool | None = None
    is_final: bool = False


class TrainStep:
    """The backward passes of an accumulation window, and the optimizer step at its end.

    Args:
        context: of the run.
        scaler: of fp16 gradients; may be disabled.
        average: of the weights, which follows every step; None: none is kept.

    Attributes:
        optimizers: name -> optimizer, or None; the recipe's ``optimizers_dict``.
        optimizer: the single one, where a recipe has no names; or None.
        schedule: stepped after every optimizer step; or None.
        sum_divisor: what sums are divided by before fp16 scaling; None until it is agreed on.
        first_gradients: watches the training until its first step with gradients; None after it.
        skipped_batches: knows what stands for the loss of a batch that the recipe skips.
        norm_reading: chooses, on a GPU, whether a step's norm is read before it or a step later.
        agree: called before the ranks send each other anything of an optimizer step; or None.
        timer: measures steps; or None.
        on_gradients: called before each step with its final gradients; or None.
        step_counted: called for each step when it is counted, perhaps a batch later; or None.
        after_window: called after each window in which optimizers have stepped; or None.

    Ranks: collective.
    """

    def __init__(
        self,
        context: RunContext,
        scaler: torch.amp.GradScaler,
        average: KeptAverage | None = None,
    ) -> None:
        self.context = context
        self.average = average or KeptAverage(context)
        self.scaler = scaler
        self.optimizers: dict[str, torch.optim.Optimizer] | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedule: optim.Schedule | None = None
        self.sum_divisor: float | None = None
        self.first_gradients: FirstGradients | None = FirstGradients(context.recipe.name)
        self.skipped_batches = SkippedBatches(context)
        self.norm_reading = NormReading()
        self.agree: Callable[[], None] | None = None
        self.timer: StepTimer | None = None
        self.on_gradients: Callable[[], None] | None = None
        self.step_counted: Callable[[], None] | None = None
        self.after_window: Callable[[], None] | None = None
        self._dropping_casts: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._is_on_gpu = context.device.partition(":")[0] in optim.GPUS
        self._unscaled: tuple[torch.optim.Optimizer, ...] = ()
        self._prepared: _Prepared | None = None
        self._stepped: list[torch.optim.Optimizer] | None = None
        # stepped already in the window that is still open
        self._waiting: list[torch.optim.Optimizer] = []

    @property
    def _active_scaler(self) -> torch.amp.GradScaler | None:
        return self.scaler if self.scaler.is_enabled() else None

    # ------------------------------------------------------------------ backward

    @property
    def should_step(self) -> bool:
        """Whether the current micro-batch closes its window."""
        window = self.context.progress.window
        if window.closes:
            window.is_asked = True
            window.deferred_at = -1
        return window.closes

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are accumulated without being averaged over ranks."""
        progress = self.context.progress
        progress.window.defer(progress.step)
        return self.context.strategy.no_sync()

    def backward(
        self,
        loss: Any,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Back-propagate a loss of the current micro-batch, weighed against the others of its
        window.

        Args:
            loss: the mean over the batch's samples, shape ``()``; or ``(loss_sum, count)``.
            retain_graph: keep the graph for another loss that shares a part of it.

        Raises:
            BatchError: the loss is not one number, does not depend on a parameter, or cannot be
                added to earlier ones.
        """
        window = self.context.progress.window
        if window.deferred_at != self.context.progress.step and (
            not window.closes or (not window.is_asked and self.context.accumulation.factor > 1)
        ):
            window.defer(self.context.progress.step)
        count = None
        scale = 0.0
        if loss.__class__ is tuple:
            loss, count = sum_and_count(loss, self.context.recipe.name)
        elif window.counted is not None:
            raise BatchError(TWO_KINDS.format(self.context.recipe.name), hook="compute_objectives")
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
        if self.first_gradients is not None or self.skipped_batches.is_noting:
            self._look_at_first_windows(loss)
        if count is not None:
            scale = self._count(count)
        with self.context.strategy.backward_pass(
            self.context.modules,
            closes=window.closes,
            counts=window.count > 0,
        ):
            backward(
                loss,
                scale,
                self._active_scaler,
                self.context.recipe.name,
                retain_graph=retain_graph,
                has_own_fit_batch=self.context.recipe.has_own_fit_batch,
                timer=self.timer,
            )

    def settle_loss(self, loss: Any) -> Any:
        """Return the loss of a training batch; for one that the recipe skips, a sum and a count
        of 0.

        Args:
            loss: as ``compute_objectives`` returned it.
        """
        return self.skipped_batches.settle(loss)

    def _look_at_first_windows(self, loss: torch.Tensor) -> None:
        """Have what the first loss depends on noted; tell the other ranks which kind it is."""
        if self.first_gradients is not None:
            self.first_gradients.note(loss, self.context.progress.step)
        self._agree_on_losses()

    def _agree_on_losses(self) -> None:
        """Let the ranks tell each other which kinds of losses they have, once in a pass, before
        they send a count.
        """
        must_send = self.context.progress.window.closes or (
            self._divides_sums and self.sum_divisor is None
        )
        # a step that may be repeated sends nothing before the ranks agree: close_window does this
        if self.skipped_batches.is_noting and must_send and self.agree is None:
            self.skipped_batches.agree()

    def _pass_without_backward(
        self,
        count: torch.Tensor | float | None,
        *,
        retain_graph: bool,
    ) -> None:
        window = self.context.progress.window
        with self.context.strategy.without_backward(
            self.context.modules,
            closes=window.closes,
            counts=window.count > 0,
            retain_graph=retain_graph,
        ):
            self._agree_on_losses()
            if count is not None:
                self._count(count)

    def _depends_on_nothing(self, loss: torch.Tensor, count: torch.Tensor | float | None) -> bool:
        """Say whether a loss without a graph is meant so: a batch that uses nothing, as one without
        ground truth.

        That is a tensor which requires a gradient all the same, or a sum over nothing.

        Raises:
            BatchError: it is, and ``static_graph`` promises that no batch is.
        """
        if loss.numel() != 1:
            return False  # an error follows
        if loss.requires_grad:
            is_meant = all(loss is not parameter for parameter in self.context.modules.parameters())
        else:
            is_meant = count is not None and float(count) == 0.0
        if is_meant and self.context.options.static_graph:
            raise BatchError(NOT_STATIC.format(self.context.recipe.name), hook="compute_objectives")
        return is_meant

    def record_loss(self, loss: Any) -> tuple[Any, Any]:
        """Record the loss of the current micro-batch.

        Args:
            loss: as ``compute_objectives`` returned it.

        Returns:
            What ``fit_batch`` returns, detached; and the mean loss, attached.
        """
        progress = self.context.progress
        result = loss
        if loss.__class__ is tuple:
            loss_sum, count = sum_and_count(loss, self.context.recipe.name)
            result = (loss_sum.detach(), count if progress.window.count else 0.0)
            loss = loss_sum / count
        else:
            result = loss.detach()
        progress.result, progress.result_of = result, progress.step
        return result, loss

    def end_batch(self) -> None:
        """Note that the loss is recorded, and the step made if it was due."""
        progress = self.context.progress
        progress.result_at = progress.step

    def _count(self, count: torch.Tensor | float) -> float:
        """Add to the window's count, and return the factor for the loss sum; at the window's end,
        start to average.
        """
        window = self.context.progress.window
        if window.has_means:
            raise BatchError(TWO_KINDS.format(self.context.recipe.name), hook="compute_objectives")
        if window.counted is not None and (
            window.is_overdue or window.counted_at == self.context.progress.step
        ):
            words = NOT_DIVIDED if window.is_overdue else TWO_SUMS
            raise BatchError(words.format(self.context.recipe.name), hook="fit_batch")
        if not window.count:
            count = 0.0
        elif isinstance(count, torch.Tensor):
            # Bytes would wrap around, half precision would round, and CUDA graphs overwrite theirs
            # in the next batch.
            count = count.to(widest_float(count.device), copy=True)
        if window.counted is None:
            window.divisor = self._divisor_of_sums(count)
        window.counted = count if window.counted is None else window.counted + count
        window.counted_at = self.context.progress.step
        if self.timer is not None and self.timer.measures:
            self.timer.note_count(count)
        # a step that may be repeated sends nothing before the ranks agree: close_window starts it
        if window.closes and self.agree is None:
            window.average = self.context.strategy.start_average(
                window.counted, self.context.device
            )
        return 1.0 / window.divisor if window.count else 0.0

    @property
    def _divides_sums(self) -> bool:
        """Whether gradients travel, or are computed, in the range of fp16."""
        return self._active_scaler is not None or self.context.strategy.sends_fp16

    @reads_device
    def _divisor_of_sums(self, count: torch.Tensor | float) -> float:
        """Return what loss sums are divided by, so that they stay in the range of fp16 where it is
        used; else 1.

        A power of two, near what the ranks' first sums of the run count. It is agreed on once, and
        saved.
        """
        if not self._divides_sums:
            return 1.0
        if self.sum_divisor is None:
            average = float(self.context.strategy.start_average(count, self.context.device)())
            if not 0.0 < average < math.inf:  # not kept: the next window tells better
                return 1.0
            self.sum_divisor = 2.0 ** max(round(math.log2(average)), 0)
        return self.sum_divisor

    # ------------------------------------------------------------------ the optimizer step

    def step_optimizers(self, brain: StepHooks) -> None:
        """Clip all gradients together, step the optimizers, drop the gradients; or skip, on all
        ranks alike.

        Args:
            brain: of the recipe.

        Raises:
            BatchError: the counts of the window add up to less than 0.
            NonFiniteLossError: more than ``nonfinite_patience`` steps of this epoch were not
                finite.
        """
        timer = self.timer
        if timer is None or not timer.measures:
            self._step_with_gradients_heard(brain)
            return
        timer.begin_optimizer()
        self._step_with_gradients_heard(brain)
        timer.end_optimizer()

    def _step_with_gradients_heard(self, brain: StepHooks) -> None:
        """Step; before that, have the final gradients heard, where something listens."""
        if self.on_gradients is None:
            self._step_optimizers(brain)
            return
        with self.final_gradients(brain):
            # not final: the step is left out, or an error follows
            if self._prepared is not None and self._prepared.is_final:
                self.on_gradients()
            self._step_optimizers(brain)

    def _step_optimizers(self, brain: StepHooks) -> None:
        progress = self.context.progress
        # The norm of the step before is read only now: the GPU had a whole step meanwhile.
        if progress.pending is not None or progress.pending_error is not None:
            progress.resolve_at_sync()
        prepared = self._prepared
        multiplier = self.close_window() if prepared is None else prepared.multiplier
        optimizers = self.note_optimizers_to_step(brain)
        if not optimizers:
            self._leave_step_out()
            return
        is_ready = prepared is not None and prepared.optimizers == optimizers
        if progress.phase is not _IN_PASS:  # in a loop of the recipe's own each call is a step
            progress.window.number += 1
        finish = do_nothing if is_ready else self.context.strategy.finish_gradients
        finish(optimizers)
        if self.first_gradients is not None:
            self._compare_first_gradients(brain)
        # Three ways. With skip_nonfinite_grads a hook drops gradients that are not finite, and the
        # rest is stepped on. It may keep what it sees, so views of DDP's buckets are copied. On a
        # GPU the kernels skip by themselves, and the host reads the norm in a later batch, where
        # that is quicker. Otherwise the norm is read before the step: fp16 has a scale to lower, a
        # CPU has nothing to wait for, and not every optimizer can skip by itself.
        scaler = self._active_scaler
        # by name: a call less in every step
        if scaler is None and self.context.options["skip_nonfinite_grads"]:
            optim.clone_gradients(optimizers)
            brain.check_gradients()
        elif scaler is None and self._is_on_gpu and self._step_late(optimizers, multiplier):
            return
        known = prepared.updates if is_ready and prepared is not None else None
        updates = scaler is None or (self._note_unscaled(optimizers) if known is None else known)
        result = optim.take_step(
            optimizers,
            self.context.options["max_grad_norm"],
            scaler,
            multiplier,
            updates=updates,
            alone=self.context.strategy.steps_locally,
            norm_of_parts=self.context.strategy.norm_of_parts,
        )
        if progress.window.closes:
            progress.window_end = progress.step
        self._after_step(
            optimizers,
            multiplier,
            result,
            progress.step,
            progress.window.number,
        )

    def _leave_step_out(self) -> None:
        """Tell the strategy that no optimizer steps, unless it was told before the recipe's own
        ``optimizers_step``.
        """
        if self._prepared is None or self._prepared.optimizers:
            self.context.strategy.leave_step_out()

    @contextlib.contextmanager
    def final_gradients(self, brain: StepHooks) -> Iterator[None]:
        """Return a context for an ``optimizers_step`` of the recipe, which finds the gradients as a
        step uses them.

        They are averages over the ranks, divided by the window's count and by the scale of fp16.
        What the recipe makes of them is stepped on by ``super().optimizers_step()``, which does
        none of that again.

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
        self.context.progress.resolve_at_sync()
        multiplier = self.close_window()
        optimizers = self.optimizers_to_step(brain)
        if not optimizers:
            self.context.strategy.leave_step_out()
            return _Prepared(optimizers, multiplier)
        self.context.strategy.finish_gradients(optimizers)
        scaler = self._active_scaler
        updates = None
        if isinstance(scaler, StepScaler):  # another's would refuse to unscale again
            updates = self._note_unscaled(optimizers)
            optim.unscale(optimizers, scaler)
        factor = float(multiplier)
        if not 0.0 < factor < math.inf:  # the step is left out, or is an error
            return _Prepared(optimizers, multiplier, updates)
        if factor != 1.0:
            stepped = optim.parameters_of(list(self.named_optimizers().values()))
            optim.multiply_gradients(
                dict.fromkeys((*self.context.modules.parameters(), *stepped)), factor
            )
        return _Prepared(optimizers, 1.0, updates, is_final=True)

    def drop_casts_after_steps(self, optimizers: Mapping[str, Any]) -> None:
        """Have autocast cast weights anew after each step, where a step may be made inside of its
        context.

        Args:
            optimizers: by name.
        """
        kinds = {"cpu", self.context.device.partition(":")[0]} - {"meta"}
        if not (
            self.context.recipe.has_own_fit_batch or any(map(torch.is_autocast_enabled, kinds))
        ):
            return  # then the library steps, outside of it
        for optimizer in optimizers.values():
            if (
                isinstance(optimizer, torch.optim.Optimizer)
                and optimizer not in self._dropping_casts
            ):
                self._dropping_casts.add(optimizer)
                optimizer.register_step_post_hook(drop_casts)

    def watch_anew(self) -> None:
        """Look once more, at the next step, at what is not trained: the modules are others."""
        if self.first_gradients is not None:
            self.first_gradients.stop()
        self.first_gradients = FirstGradients(self.context.recipe.name)

    def watch_first_step(self, brain: StepHooks) -> None:
        """Have the first step compared, too, that a ``fit_batch`` of the recipe makes by itself."""
        first = self.first_gradients
        if first is not None and self.context.recipe.has_own_fit_batch:
            named = self.named_optimizers()
            first.watch(named, lambda *_: first.compare(brain, self.context.modules, named))

    def _compare_first_gradients(self, brain: StepHooks) -> None:
        """Warn, before the first step with gradients, of parameters that are not trained; look no
        more after it.
        """
        first = self.first_gradients
        if first is None:
            return
        if first.is_done:
            first.stop()
            self.first_gradients = None
        else:
            first.compare(brain, self.context.modules, self.named_optimizers())

    def _step_late(self, optimizers: list[torch.optim.Optimizer], multiplier: Any) -> bool:
        """Step without a wait for the GPU, if that can be, and is tried or quicker. The step is
        pending until a sync point.

        It is resolved at once where something follows each step.
        """
        progress = self.context.progress
        may_be_late = self.norm_reading.begin_step()
        if self.context.strategy.steps_locally or not may_be_late:
            return False
        pending = optim.take_late_step(
            optimizers, self.context.options["max_grad_norm"], multiplier
        )
        if pending is None:
            return False
        self.norm_reading.has_read_later = True
        if progress.window.closes:
            progress.window_end = progress.step
        # taken now: it is resolved in a later batch, when both have changed
        batch = progress.step
        window_number = progress.window.number
        pending.then(
            lambda result: self._after_step(optimizers, multiplier, result, batch, window_number)
        )
        progress.pending = pending
        if self._follows_each_step or self.context.strategy.awaits_steps:
            progress.resolve_at_sync()
        return True

    @property
    def _follows_each_step(self) -> bool:
        """Whether something follows each step: an average, a schedule of steps, or a part."""
        by_step = self.schedule is not None and self.schedule.every == "step"
        return self.average.weights is not None or by_step or self.after_window is not None

    def optimizers_to_step(self, brain: StepHooks) -> list[torch.optim.Optimizer]:
        """Return the optimizers that step now."""
        if self.optimizers is not None:
            chosen = (
                brain.freeze_optimizers(self.optimizers)
                if self.context.recipe.freezes
                else self.optimizers
            )
            if chosen is None:
                raise BatchError(
                    NO_OPTIMIZERS.format(self.context.recipe.name), hook="freeze_optimizers"
                )
            return list(chosen.values())
        return [] if self.optimizer is None else [self.optimizer]

    def note_optimizers_to_step(self, brain: StepHooks) -> list[torch.optim.Optimizer]:
        """Return :meth:`optimizers_to_step`; remember them, where a recipe freezes some."""
        stepping = self.optimizers_to_step(brain)
        if self.context.recipe.freezes and self.optimizers:
            self._stepped = [*(self._stepped or ()), *stepping]
        return stepping

    def named_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return all optimizers by name, also the single one without a name."""
        return self.optimizers or ({} if self.optimizer is None else {"optimizer": self.optimizer})

    @property
    def freezes(self) -> bool:
        """Whether the recipe says which optimizers step."""
        return self.context.recipe.freezes and bool(self.optimizers)

    def drop_frozen_gradients(self) -> None:
        """Drop a window's gradients that no step has used, also those that came after an
        optimizer's step.

        Under :meth:`no_sync` an optimizer that has stepped accumulates for its next step. These
        gradients stay, and nothing is saved before that step.
        """
        stepped = self._stepped
        self._stepped = None
        if stepped is not None:
            unused = [*(self.optimizers or {}).values()]
            if self.context.progress.window.num_deferred(self.context.progress.step):
                unused = [
                    optimizer
                    for optimizer in unused
                    if all(optimizer is not other for other in stepped)
                ]
            optim.zero_gradients(unused, set_to_none=True)
            if self._unscaled:  # no gradient waits for their step any more
                self.scaler.update()
                self._unscaled = ()

    def prepare_flush(self, brain: StepHooks) -> bool:
        """Say whether an own ``fit_batch`` left gradients in a window that the epoch cut short; set
        its multiplier.
        """
        window = self.context.progress.window
        pending = window.num_deferred(self.context.progress.step)
        if not (pending and optim.gradients(self.optimizers_to_step(brain))):
            return False
        if not (window.is_weighed or window.has_means or window.counted is not None):
            # it was divided by the factor
            window.multiplier = self.context.accumulation.factor / pending
        return True

    def warn_if_diverged(self) -> None:
        """Warn, after an epoch, if an own ``fit_batch`` has let the ranks' weights part; of each
        entry once.
        """
        diverged = (
            self.context.strategy.diverged_entries(self.context.modules)
            if self.context.recipe.has_own_fit_batch
            else []
        )
        if diverged:
            logger.warning_once(
                APART,
                self.context.recipe.name,
                ", ".join(f"modules[{name!r}]" for name in diverged),
            )

    @contextlib.contextmanager
    def warning_without_steps(self) -> Iterator[None]:
        """Warn if no optimizer step is counted in the first epoch, though all of its gradients were
        finite.

        Raises:
            ConfigError: no optimizer has had a gradient in any step.
        """
        progress = self.context.progress
        first = progress.window_end
        before = progress.optimizer_step
        yield
        progress.resolve_pending()
        has_stepped = progress.optimizer_step > before or progress.nonfinite
        if not progress.optimizer_step:
            self.skipped_batches.require_some(progress.step)
        # fp16 may skip all steps of a short epoch.
        if progress.window_end > first and not (
            has_stepped or progress.epochs or self.scaler.is_enabled()
        ):
            logger.warning(NO_STEP, self.context.recipe.name)
        if self.first_gradients is not None and progress.window_end > first:
            self.first_gradients.require(self.named_optimizers())
            self.first_gradients.stop()
            self.first_gradients = None

    def close_window(self) -> torch.Tensor | float:
        """Return the factor for the gradients before the step, and reset the count."""
        if self.agree is not None:
            self.agree()
            if self.skipped_batches.is_noting:
                self.skipped_batches.agree()
        window = self.context.progress.window
        if window.counted is not None:
            average = window.average or self.context.strategy.start_average(
                window.counted, self.context.device
            )
            count = average()  # of sums, averaged over the ranks as their gradients are
            window.multiplier = (
                window.divisor / count if isinstance(count, torch.Tensor) or count else math.inf
            )
        return window.stepped()

    def _after_step(
        self,
        optimizers: list[Any],
        multiplier: Any,
        result: optim.StepResult,
        batch: int,
        window_number: int,
    ) -> None:
        """Do what follows a step, made or skipped, after a batch, in the window of this number."""
        if self.timer is not None:
            self.timer.gradient_norm = result.norm
        if result.stepped:
            self._after_taken_step(optimizers, result, batch, window_number)
        else:
            self._after_skipped_step(multiplier, result, batch, window_number)

    def _after_skipped_step(
        self,
        multiplier: Any,
        result: optim.StepResult,
        batch: int,
        window_number: int,
    ) -> None:
        """Say why a step was skipped; count it, if that is the gradients' fault."""
        scaler = self._active_scaler
        window = self.context.progress.window
        if result.norm < 0:  # by the multiplier's sign
            raise BatchError(
                f"{self.context.recipe.name}.compute_objectives returned (loss_sum, count) with "
                "counts that add up to less than 0: count must be >= 0.",
                hook="compute_objectives",
            )
        if math.isinf(multiplier):
            if window.skipped_in != window_number:
                window.skipped_in = window_number
                self.context.progress.count_empty_step()
            logger.warning_once(
                "The count of (loss_sum, count) was 0 over all batches of an optimizer step, or "
                "compute_objectives returned None for all of them: such steps are left out."
            )
        elif scaler is None or scaler.get_scale() < 1.0:
            # at 1 or more the scale is to blame, and has been lowered
            self.context.strategy.forget_errors()
            if window.skipped_in != window_number:
                window.skipped_in = window_number
                self.context.progress.count_skipped(
                    result.norm, self.context.options.nonfinite_patience, batch
                )

    def _after_taken_step(
        self,
        stepped: list[torch.optim.Optimizer],
        result: optim.StepResult,
        batch: int,
        window_number: int,
    ) -> None:
        """Count the window of this number, in which optimizers have stepped; average the weights,
        step the schedule.

        Several steps in one window count once, as ``total_steps`` counts windows.
        """
        progress = self.context.progress
        window = self.context.progress.window
        if result.clipped and window.clipped_in != window_number:
            window.clipped_in = window_number
            progress.clipped += 1
        if not result.norm < math.inf:  # then zeros stood in for this rank's own gradients
            progress.count_skipped(result.norm, None, batch)
        is_first = window.stepped_in != window_number
        if is_first:
            window.stepped_in = window_number
            progress.optimizer_step += 1
        # the recipe first: to ask whether it waits is a call in every step
        if self.context.recipe.has_own_fit_batch and (
            progress.phase is _IN_PASS and self.waits_for_window
        ):
            self._waiting += stepped
        elif is_first:
            self._update_after_window(stepped)
        if is_first and self.step_counted is not None:
            self.step_counted()

    @property
    def waits_for_window(self) -> bool:
        """Whether something follows a window only when it is over: an own ``fit_batch`` may step
        several times.
        """
        return self.context.recipe.has_own_fit_batch and self._follows_each_step

    def forget_window(self) -> None:
        """Forget what an interrupted pass has left; drop its gradients, where ``zero_grad`` sees a
        part of them.
        """
        self._waiting.clear()
        self._stepped = None
        self.skipped_batches.begin_pass()
        if self.freezes:
            optim.zero_gradients((self.optimizers or {}).values(), set_to_none=True)

    def end_window(self) -> None:
        """Average the weights and step the schedule after a window in which an own ``fit_batch``
        has stepped.
        """
        if self._waiting:
            stepped = self._waiting
            self._waiting = []
            self._update_after_window(stepped)

    def _update_after_window(self, stepped: list[torch.optim.Optimizer]) -> None:
        if self.average.weights is not None:
            self.average.weights.update()
        if self.schedule is not None:
            self.schedule.after_step(stepped)
        if self.after_window is not None:
            self.after_window()

    def _note_unscaled(self, optimizers: list[torch.optim.Optimizer]) -> bool:
        """Note which optimizers are unscaled; return whether no gradients wait with the present
        scale.
        """
        known = [] if self.optimizers is None else [*self.optimizers.values()]
        if any(optimizer is other for optimizer in optimizers for other in self._unscaled):
            # they step once more, with gradients of the present scale
            self.scaler.update(self.scaler.get_scale())
            self._unscaled = ()
        done = (
            *self._unscaled,
            *(optimizer for optimizer in optimizers if optim.gradients([optimizer])),
        )
        waiting = optim.gradients(
            [optimizer for optimizer in known if all(optimizer is not other for other in done)]
        )
        self._unscaled = done if waiting else ()
        return not waiting
