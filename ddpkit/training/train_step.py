"""One optimizer step: weigh and back-propagate the losses of a window, clip, step, or skip on all ranks alike."""

from __future__ import annotations

import contextlib
import gc
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ddpkit import optim
from ddpkit.device import widest_float
from ddpkit.errors import BatchError
from ddpkit.logger import get_logger
from ddpkit.training.loop import Progress, backward, sum_and_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import nn

    from ddpkit.ema import WeightAverage
    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies import Strategy

logger = get_logger(__name__)

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
APART = (
    "%s.fit_batch steps with gradients that are not averaged over the ranks: after this epoch the weights of %s are "
    "not the same on all of them, and rank 0's are saved. DDP averages what is computed through self.modules, not "
    "through hparams or a module's inner parts. Call self.optimizers_step(), which averages the rest, and not the "
    "optimizer's own step(); --check_parity 2 shows whether the gradients are then those of one process."
)
NO_STEP = (
    "No optimizer step of %s was counted in its first epoch. Give opt_class, or fill optimizers_dict in "
    "init_optimizers; return optimizers from freeze_optimizers; in a fit_batch of your own call self.backward(loss), "
    "and where self.should_step is true self.optimizers_step(): saves, limits, schedules and logs do not see step()."
)


@dataclass(frozen=True)
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
        agree: called before the ranks send each other anything of an optimizer step; or None.

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
        self.agree: Callable[[], None] | None = None
        self._gc_interval = options.gc_interval
        self._unscaled: tuple[torch.optim.Optimizer, ...] = ()
        self._stepped: list[torch.optim.Optimizer] | None = None

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """Of fp16 gradients; may be disabled."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler, self._active_scaler = scaler, scaler if scaler.is_enabled() else None

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
        if loss.__class__ is tuple:
            loss, count = sum_and_count(loss, self.name)
            scale = self._count(count)
        else:
            if window.counted is not None:
                raise BatchError(MIXED.format(self.name))
            window.has_means = window.is_weighed = True
            scale = window.loss_scale
        with self.strategy.backward_pass(self.modules, closes=window.closes, counts=window.count > 0):
            backward(loss, scale, self._active_scaler, self.name, retain_graph=retain_graph)

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
        progress.result, progress.result_at = result, progress.step
        return result, loss

    def _count(self, count: torch.Tensor | float) -> float:
        """Add to the window's count, and return the factor for the loss sum; at the window's end, start to average."""
        window = self.progress.window
        if window.has_means:
            raise BatchError(MIXED.format(self.name))
        if window.counted is not None and (window.is_overdue or window.counted_at == self.progress.step):
            raise BatchError((NOT_DIVIDED if window.is_overdue else TWO_SUMS).format(self.name))
        if not window.count:
            count = 0.0
        elif isinstance(count, torch.Tensor):
            # Bytes would wrap around, half precision would round, and CUDA graphs overwrite theirs in the next batch.
            count = count.to(widest_float(count.device), copy=True)
        if window.counted is None:
            window.divisor = self._divisor_of_sums(count)
        window.counted = count if window.counted is None else window.counted + count
        window.counted_at = self.progress.step
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
        multiplier, optimizers = self.close_window(), self.note_optimizers_to_step(brain)
        if not optimizers:
            return
        self.strategy.finish_gradients()
        scaler = self._active_scaler
        if scaler is None and self.options["skip_nonfinite_grads"]:  # by name: a call less in every step
            optim.own_gradients(optimizers)
            brain.check_gradients()
        updates = scaler is None or self._note_unscaled(optimizers)
        result = optim.take_step(
            optimizers,
            self.options["max_grad_norm"],
            scaler,
            multiplier,
            updates=updates,
            alone=self.strategy.steps_alone,
        )
        if self.progress.window.closes:
            self.progress.window_end = self.progress.step
        if result.stepped:
            self._follow_step(optimizers, result)
        elif result.norm < 0:  # by the multiplier's sign
            raise BatchError(
                f"{self.name}.compute_objectives returned (loss_sum, count) with counts that add up to less than 0: "
                "count must be >= 0."
            )
        elif math.isinf(multiplier):
            logger.warning_once(
                "The count of (loss_sum, count) was 0 over all batches of an optimizer step: such steps are left out."
            )
        elif scaler is None or scaler.get_scale() < 1.0:  # at 1 or more the scale is to blame, and has been lowered
            self.strategy.forget_errors()
            self.progress.count_skipped(result.norm, self.options.nonfinite_patience)

    def optimizers_to_step(self, brain: StepHooks) -> list[torch.optim.Optimizer]:
        """Return the optimizers that step now."""
        if self.optimizers is not None:
            chosen = brain.freeze_optimizers(self.optimizers) if self.recipe.freezes else self.optimizers
            if chosen is None:
                raise BatchError(f"{self.name}.freeze_optimizers returned None: look for a missing return.")
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
        """Drop a window's gradients of optimizers that have not stepped in it."""
        stepped, self._stepped = self._stepped, None
        if stepped is not None:
            known = (self.optimizers or {}).values()
            frozen = [one for one in known if all(one is not other for other in stepped)]
            optim.zero_gradients(frozen, set_to_none=True)

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
        """Warn if no optimizer step is counted in the first epoch, though all of its gradients were finite."""
        progress = self.progress
        first, before = progress.window_end, progress.optimizer_step
        yield
        has_stepped = progress.optimizer_step > before or progress.nonfinite
        # fp16 may skip all steps of a short epoch.
        if progress.window_end > first and not (has_stepped or progress.epochs or self.scaler.is_enabled()):
            logger.warning(NO_STEP, self.name)

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

    def _follow_step(self, stepped: list[torch.optim.Optimizer], result: optim.StepResult) -> None:
        """Count an optimizer step; average the weights, step the schedule and collect garbage after it."""
        self.progress.clipped += result.clipped
        if not result.norm < math.inf:  # then zeros stood in for this rank's own gradients
            self.progress.count_skipped(result.norm, None)
        self.progress.optimizer_step += 1
        if self.ema is not None:
            self.ema.update()
        if self.schedule is not None:
            self.schedule.after_step(stepped)
        if self._gc_interval and self.progress.optimizer_step % self._gc_interval == 0:
            gc.collect()

    def _note_unscaled(self, optimizers: list[torch.optim.Optimizer]) -> bool:
        """Note which optimizers are unscaled; return whether no gradients wait with the present scale."""
        known = [] if self.optimizers is None else [*self.optimizers.values()]
        if any(one is other for one in optimizers for other in self._unscaled):
            self.scaler.update()  # they step once more
            self._unscaled = ()
        done = (*self._unscaled, *optimizers)
        waiting = optim.gradients([one for one in known if all(one is not other for other in done)])
        self._unscaled = done if waiting else ()
        return not waiting
