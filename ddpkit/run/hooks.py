"""What a recipe overrides: one batch, one optimizer step, and the calls around them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit import optim
from ddpkit.device import widest_float
from ddpkit.errors import BatchError, ConfigError
from ddpkit.logger import get_logger
from ddpkit.run_opts import OptionAttributes
from ddpkit.training.batch_sizes import RunLength
from ddpkit.training.loop import Progress, backward, one_number, sum_and_count
from ddpkit.training.lr_scaling import LrScaling, scale_learning_rates
from ddpkit.training.strategy import NOTHING
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from types import SimpleNamespace

    from ddpkit.ema import WeightAverage
    from ddpkit.precision import TorchAutocast
    from ddpkit.training.strategy import Strategy

logger = get_logger(__name__)

MIXED = (
    "{}.compute_objectives returned a mean loss for some micro-batches of an optimizer step and (loss_sum, count) for "
    "others: there is no telling how they weigh against each other. Return the same kind for every training batch. "
    "(In a fit_batch of your own, backward() takes both kinds if optimizers_step() stands between them.)"
)
TWO_SUMS = (
    "{}.fit_batch passed two (loss_sum, count) to backward() before optimizers_step(): their gradients are added up "
    "before it is known what each must be divided by. If both count the same, add up the sums: "
    "backward((one + other, count)). If they belong to two optimizers, call optimizers_step() after each, with "
    "grad_accumulation_factor=1. Otherwise pass means."
)
NOT_DIVIDED = (
    "{}.fit_batch passed (loss_sum, count) to backward() and let the window end without optimizers_step(), which "
    "divides by the count. Call self.optimizers_step() where self.should_step is true, not an optimizer's own step()."
)


def _of_progress(name: str, doc: str) -> property:
    """Make a property that reads and writes an attribute of the host's progress."""

    def read(self: Hooks) -> Any:
        return getattr(self.progress, name)

    def write(self: Hooks, value: Any) -> None:
        setattr(self.progress, name, value)

    return property(read, write, doc=doc)


class Hooks(OptionAttributes):
    """The overridable half of the Brain; :class:`~ddpkit.brain.Brain` fills in the attributes and runs the loops.

    Attributes:
        modules: ``torch.nn.ModuleDict``; under a wrapper, the module's own attributes can still be reached.
        hparams: namespace; empty where none were given.
        checkpointer: or None.
        optimizers_dict: name -> optimizer, once :meth:`init_optimizers` has run.
        step: batches of the current stage so far; counts from 1 while a batch is worked on.
        optimizer_step: updates since the run began.
        steps_per_epoch: optimizer steps of an epoch; None where that is not known.
        total_steps: optimizer steps of this call of ``fit``, those before a restart included; None likewise.
        nonfinite_count: steps of this epoch that were skipped because a gradient was not finite.
        ema: the average of the weights, or None without ``ema_decay``.
        lr_scale: what ``lr_scaling`` multiplies learning rates by; known once ``fit`` has begun.

    Ranks: every hook is called on every rank.

    Example:
        >>> Hooks().freeze_optimizers({})
        {}
    """

    modules: nn.ModuleDict
    hparams: SimpleNamespace
    checkpointer: Any
    opt_class: Callable[[Iterable[Any]], torch.optim.Optimizer] | None
    scheduler_class: Callable[..., Any] | None = None
    optimizer: torch.optim.Optimizer
    optimizers_dict: dict[str, torch.optim.Optimizer] | None
    _strategy: Strategy
    progress: Progress
    scaler: torch.amp.GradScaler
    training_ctx: TorchAutocast
    evaluation_ctx: TorchAutocast
    rank: int
    ema: WeightAverage | None = None
    _lr_scaling: LrScaling = LrScaling()
    steps_per_epoch: int | None = None
    total_steps: int | None = None
    _length = RunLength()
    _epochs_of_call: int | None = 1
    _schedule: optim.Schedule | None = None
    _is_stepping = False
    _sum_divisor: float | None = None
    _unscaled: tuple[torch.optim.Optimizer, ...] = ()
    _stepped: list[torch.optim.Optimizer] | None = None

    step = _of_progress("step", "Batches of the current stage so far.")
    optimizer_step = _of_progress("optimizer_step", "Optimizer updates since the run began.")
    nonfinite_count = _of_progress("nonfinite", "Skipped steps of this epoch.")

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """Compute predictions from a batch. Must be overridden; may return anything.

        Args:
            batch: as the loader yields it; move it to ``self.device``.
            stage: TRAIN, VALID or TEST.
        """
        raise NotImplementedError(f"{type(self).__name__} must define compute_forward(self, batch, stage)")

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
        """Compute the loss. Must be overridden.

        Args:
            predictions: what :meth:`compute_forward` returned.
            batch: as the loader yields it.
            stage: TRAIN, VALID or TEST.

        Returns:
            The mean over the batch's samples, shape ``()``. Or ``(loss_sum, count)``, where the loss is a mean over
            something else, such as tokens or frames: a sum of shape ``()``, and how many it is over (a number, or a
            tensor of shape ``()``; 0 where a batch has none). All that an optimizer step counts then weighs the same.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define compute_objectives(self, predictions, batch, stage)"
        )

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Called before a stage, on all ranks; ``epoch`` is None for TEST."""

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """Called after a stage, on all ranks, with the mean loss over all ranks' samples."""

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        """Called before the forward pass of every training batch."""

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: torch.Tensor, should_step: bool) -> None:
        """Called after every training batch, and after the step where there is one; ``loss`` is still attached."""

    def freeze_optimizers(self, optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, torch.optim.Optimizer]:
        """Return those of the optimizers that shall step now; all by default."""
        return optimizers

    def init_optimizers(self) -> None:
        """Make the optimizer and its scheduler.

        Override it for several: fill ``optimizers_dict`` and tell the checkpointer. ``self.steps_per_epoch`` and
        ``self.total_steps`` are known here. The Brain steps the scheduler that ``scheduler_class`` makes; those that a
        recipe makes here it steps itself.

        Raises:
            ConfigError: ``opt_class`` or ``scheduler_class`` cannot be used.
        """
        if self.opt_class is None:
            logger.info("No opt_class: nothing is optimized unless init_optimizers is overridden.")
            return
        self.optimizer = optim.make_optimizer(
            self.opt_class, self.modules, split_vectors=self.remove_vector_weight_decay
        )
        self.optimizers_dict = {"opt_class": self.optimizer}
        if self.checkpointer is not None:
            self.checkpointer.add_recoverable("optimizer", self.optimizer)
        if self.scheduler_class is not None:
            self._init_schedule(self.scheduler_class)

    def _take_length(self, length: int | None, factor: int) -> None:
        """Take in how long this call of ``fit`` trains.

        Args:
            length: batches of the training loader; None where that is not known.
            factor: batches per optimizer step.
        """
        self._length = RunLength.of(length, factor, self._epochs_of_call, self.run_opts)
        self.steps_per_epoch, self.total_steps = self._length.steps_per_epoch, self._length.total_steps

    def _init_schedule(self, scheduler_class: Callable[..., Any]) -> None:
        """Make the schedule of the optimizer, and tell the checkpointer."""
        every = self.scheduler_every
        steps = self._length.total_steps if every == "step" else self._length.epochs
        before, self._schedule = self._schedule, optim.make_schedule(scheduler_class, self.optimizer, every, steps)
        if self.checkpointer is None:
            return
        other = getattr(self.checkpointer, "recoverables", {}).get("scheduler", before)
        if other is not before:
            raise ConfigError(
                f"a recoverable of the recipe, of type {type(other).__name__}, is named 'scheduler', and so is the "
                "schedule of scheduler_class in every checkpoint. Give yours another name."
            )
        self.checkpointer.add_recoverable("scheduler", self._schedule)

    def _require_schedule(self, *, validates: bool) -> None:
        """Make sure that ``scheduler_class`` is used, and can be.

        Args:
            validates: whether there is a valid_set.

        Raises:
            ConfigError: otherwise; on every rank.
        """
        if self.scheduler_class is not None and self._schedule is None:
            raise ConfigError(
                f"scheduler_class was given, and nothing has made a schedule of it: {type(self).__name__} overrides "
                "init_optimizers or gives no opt_class. Call super().init_optimizers() there, or make the scheduler "
                "there yourself, with self.total_steps, and leave scheduler_class out."
            )
        if self._schedule is not None and self._schedule.follows_loss and not validates:
            raise ConfigError(
                "ReduceLROnPlateau follows the valid loss, and fit was given no valid_set. Give one, or use another "
                "scheduler."
            )

    @property
    def lr_scale(self) -> float:
        """What ``lr_scaling`` multiplies learning rates by: for those that a recipe sets itself."""
        return self._lr_scaling.factor

    def _scale_learning_rates(self) -> None:
        scale_learning_rates(self, self._lr_scaling)

    @property
    def should_step(self) -> bool:
        """Whether the current micro-batch closes its accumulation window, after which the optimizers step.

        For a ``fit_batch`` of your own. The same on every rank, also in the short last window of an epoch and where a
        stream ends.
        """
        window = self.progress.window
        if window.closes:
            window.is_asked, window.deferred_at = True, -1
        return window.closes

    def backward(self, loss: Any, *, retain_graph: bool = False) -> None:
        """Back-propagate a loss of the current micro-batch. For a ``fit_batch`` of your own.

        The loss is weighed against the other micro-batches of its window, on all ranks, and scaled for fp16. The ranks
        communicate in the micro-batch that closes the window. The gradients of several losses add up.

        Args:
            loss: the mean over the batch's samples, shape ``()``; or ``(loss_sum, count)``, as
                :meth:`compute_objectives` returns it, which :meth:`optimizers_step` divides.
            retain_graph: keep the graph for another loss that shares a part of it.

        Raises:
            BatchError: the loss is no tensor, no single number, or does not depend on any parameter; or it cannot be
                added to what was passed before.

        Ranks: collective under DDP where :attr:`should_step` is true; all ranks call it equally often.
        """
        self._backward(loss, retain_graph=retain_graph)

    def _backward(self, loss: Any, *, retain_graph: bool = False) -> None:
        window = self.progress.window
        if not window.closes or (self.grad_accumulation_factor > 1 and not window.is_asked):
            window.defer(self.progress.step)
        if loss.__class__ is tuple:
            loss, count = sum_and_count(loss, self)
            scale = self._count(count)
        else:
            if window.counted is not None:
                raise BatchError(MIXED.format(type(self).__name__))
            window.has_means = True
            scale = window.scale
        with self._strategy.backward_pass(self.modules, closes=window.closes, counts=window.count > 0):
            backward(loss, scale, self.scaler, self, retain_graph=retain_graph)

    def fit_batch(self, batch: Any) -> Any:
        """Train on one micro-batch: forward, loss, backward, and a step at the end of its window.

        Args:
            batch: as the loader yields it.

        Returns:
            The mean loss of the batch, detached, shape ``()``; on its device, so that nobody waits for it. Where
            :meth:`compute_objectives` returns ``(loss_sum, count)``, these two.
        """
        should_step = self.should_step
        self.on_fit_batch_start(batch, should_step)
        with self.no_sync(not should_step):
            with self.training_ctx:
                outputs = self.compute_forward(batch, Stage.TRAIN)
                loss = self.compute_objectives(outputs, batch, Stage.TRAIN)
            self._backward(loss)
        if should_step:
            self.optimizers_step()
        progress, result = self.progress, loss
        if loss.__class__ is tuple:
            loss_sum, count = sum_and_count(loss, self)
            result, loss = (loss_sum.detach(), count if progress.window.count else 0.0), loss_sum / count
        else:
            result = loss.detach()
        progress.result, progress.result_at = result, progress.step
        self.on_fit_batch_end(batch, outputs, loss, should_step)
        return result

    def _count(self, count: torch.Tensor | float) -> float:
        """Add to what the window counts, and return what the sum is multiplied by; at its end, begin to average."""
        window, name = self.progress.window, type(self).__name__
        if window.has_means:
            raise BatchError(MIXED.format(name))
        if window.counted is not None and (window.is_overdue or window.counted_at == self.progress.step):
            raise BatchError((NOT_DIVIDED if window.is_overdue else TWO_SUMS).format(name))
        if not window.count:
            count = 0.0
        elif isinstance(count, torch.Tensor):
            count = count.to(widest_float(count.device))  # bytes would wrap around, and half precision would round
        if window.counted is None:
            window.divisor = self._divisor_of_sums(count)
        window.counted = count if window.counted is None else window.counted + count
        window.counted_at = self.progress.step
        if window.closes:
            window.average = self._strategy.start_average(window.counted, self.device)
        return 1.0 / window.divisor if window.count else 0.0

    def _divisor_of_sums(self, count: torch.Tensor | float) -> float:
        """Return what sums are divided by before they are scaled for fp16, whose range they would leave.

        A power of two, near what the ranks' first sums of the run count. It is agreed on once, and saved.
        """
        if not self.scaler.is_enabled():
            return 1.0
        if self._sum_divisor is None:
            average = float(self._strategy.start_average(count, self.device)())
            if not 0.0 < average < math.inf:
                return 1.0
            self._sum_divisor = 2.0 ** max(round(math.log2(average)), 0)
        return self._sum_divisor

    def _multiplier(self) -> torch.Tensor | float:
        """Return what the gradients are multiplied by before the step; what is counted begins anew."""
        window = self.progress.window
        if window.counted is not None:
            average = window.average or self._strategy.start_average(window.counted, self.device)
            count = average()  # of sums, averaged over the ranks as their gradients are
            window.multiplier = window.divisor / count if isinstance(count, torch.Tensor) or count else math.inf
        return window.stepped()

    def evaluate_batch(self, batch: Any, stage: Stage) -> Any:
        """Evaluate one batch; called without gradients.

        Args:
            batch: as the loader yields it.
            stage: VALID or TEST.

        Returns:
            The mean loss of the batch, shape ``()``; or ``(loss_sum, count)``.
        """
        with self.evaluation_ctx:
            outputs = self.compute_forward(batch, stage)
            loss = self.compute_objectives(outputs, batch, stage)
        return sum_and_count(loss, self) if loss.__class__ is tuple else one_number(loss, self)

    def _evaluated_weights(self, stage: Stage) -> AbstractContextManager[None]:
        return self.ema.evaluated(stage) if self.evaluate_ema and self.ema is not None else NOTHING

    def optimizers_step(self) -> None:
        """Clip all gradients together, step the optimizers, drop the gradients; or skip, on all ranks alike.

        Raises:
            NonFiniteLossError: more than ``nonfinite_patience`` steps of this epoch were not finite.
        """
        multiplier = self._multiplier()
        optimizers = self._taking_part()
        if not optimizers:
            return
        self._strategy.finish_gradients()
        if self.skip_nonfinite_grads and not self.scaler.is_enabled():
            self.check_gradients()
        scaler = self.scaler if self.scaler.is_enabled() else None
        self._is_stepping = True
        updates = scaler is None or self._may_rescale(optimizers)
        result = optim.take_step(optimizers, self.max_grad_norm, scaler, multiplier, updates=updates)
        self._is_stepping = False
        self.progress.close_window()
        if result.stepped:
            self.progress.clipped += result.clipped
            self._follow_step(optimizers)
        elif result.norm < 0:
            raise BatchError(
                f"{type(self).__name__}.compute_objectives returned (loss_sum, count) with counts that add up to less "
                "than nothing over an optimizer step: count what the sum is over."
            )
        elif math.isinf(multiplier):
            logger.warning_once(
                "The count of (loss_sum, count) was 0 over all batches of an optimizer step: such steps are left out."
            )
        elif scaler is None or scaler.get_scale() < 1.0:  # above it the scale is to blame, which now gets smaller
            self.progress.count_skipped(result.norm, self.nonfinite_patience)

    def _follow_step(self, stepped: list[torch.optim.Optimizer]) -> None:
        """Count an optimizer step; average the weights and step the schedule after it."""
        self.progress.optimizer_step += 1
        if self.ema is not None:
            self.ema.update()
        if self._schedule is not None:
            self._schedule.after_step(stepped)

    def _may_rescale(self, optimizers: list[torch.optim.Optimizer]) -> bool:
        """Say whether the loss scale may change with this step, or gradients with the present one wait for another."""
        known = [] if self.optimizers_dict is None else [*self.optimizers_dict.values()]
        if any(one is other for one in optimizers for other in self._unscaled):
            self.scaler.update()  # they step once more
            self._unscaled = ()
        done = (*self._unscaled, *optimizers)
        waiting = optim.gradients([one for one in known if all(one is not other for other in done)])
        self._unscaled = done if waiting else ()
        return not waiting

    @property
    def _freezes(self) -> bool:
        """Whether the recipe says which optimizers step."""
        return type(self).freeze_optimizers is not Hooks.freeze_optimizers and bool(self.optimizers_dict)

    def _drop_frozen_gradients(self) -> None:
        """Drop what a window has given to optimizers that have not stepped in it, so that nothing outlives it."""
        stepped, self._stepped = self._stepped, None
        if stepped is not None:
            known = (self.optimizers_dict or {}).values()
            frozen = [one for one in known if all(one is not other for other in stepped)]
            optim.zero_gradients(frozen, set_to_none=True)

    def _taking_part(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that step now; and remember them, where a recipe freezes some."""
        active = self._active_optimizers()
        if self._freezes:
            self._stepped = [*(self._stepped or ()), *active]
        return active

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradients of the optimizers that are not frozen, or drop them."""
        optim.zero_gradients(self._active_optimizers(), set_to_none=set_to_none)

    def no_sync(self, use: bool = True) -> AbstractContextManager[None]:
        """Return a context in which gradients are accumulated without being averaged over ranks.

        It must be around the forward pass, too. An exception leaves everything as it was before.

        Args:
            use: False returns a context that does nothing.
        """
        if not use:
            return NOTHING
        self.progress.window.defer(self.progress.step)
        return self._strategy.no_sync()

    def check_loss_isfinite(self, loss: torch.Tensor) -> None:
        """Warn on this rank if a loss is not finite; waits for the device. For recipes that override ``fit_batch``.

        The step itself is skipped on all ranks by :meth:`optimizers_step`, which also counts and gives up.
        """
        if not torch.isfinite(loss).all():
            logger.warning(
                "The loss of step %d is %s on rank %d.", self.step, loss.tolist(), self.rank, main_process_only=False
            )

    def check_gradients(self) -> None:
        """Drop every parameter's gradient that is not finite, with a warning (option ``skip_nonfinite_grads``)."""
        for name in optim.drop_nonfinite(self.modules):
            logger.warning("The gradient of %s is not finite and is left out of step %d.", name, self.step)

    def update_average(self, loss: torch.Tensor | float, avg_loss: float) -> float:
        """Take one loss into a running mean over ``step`` batches; one that is not finite changes nothing.

        Args:
            loss: of the current batch.
            avg_loss: mean of the batches before.

        Returns:
            The new mean.
        """
        value = float(loss)
        return avg_loss + (value - avg_loss) / max(self.step, 1) if math.isfinite(value) else avg_loss

    def _active_optimizers(self) -> list[torch.optim.Optimizer]:
        if self.optimizers_dict is not None:
            return list(self.freeze_optimizers(self.optimizers_dict).values())
        single = getattr(self, "optimizer", None)
        return [] if single is None else [single]

    def _flush_window(self) -> None:
        """Step on gradients that an overridden ``fit_batch`` accumulated in a window that the epoch's end cut short."""
        window = self.progress.window
        pending = window.pending(self.step)
        if pending and optim.gradients(self._active_optimizers()):
            if not (window.is_weighed or window.has_means or window.counted is not None):
                window.multiplier = self.grad_accumulation_factor / pending  # it was divided by the factor
            self.optimizers_step()
        window.stepped()
