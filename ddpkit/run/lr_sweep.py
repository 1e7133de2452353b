"""A slice of a run for ``python -m ddpkit lr-find``: each optimizer step has a higher learning
rate than the one before, and its loss is noted.

The training is the recipe's own: its data, its ``fit_batch``, its clipping. The loss of a step is
the mean over all its samples, on all ranks, with the weights before the step.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ddpkit.control import usage_errors
from ddpkit.distributed import get_rank, get_world_size, sum_over_ranks
from ddpkit.errors import ConfigError, NonFiniteLossError
from ddpkit.run.slice_epochs import end_slice, train_until_end
from ddpkit.training import LossMeter, one_number, sum_and_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpkit.launch import SlicePlan
    from ddpkit.run.slice_epochs import EpochTrainer
    from ddpkit.training import Window

ALL_TRIED = "all tried"
NOT_FINITE = "not finite"
DIVERGED = "diverged"
TIME_OVER = "time over"

MEMORY = 0.8  # of the mean that follows the losses, which tells whether they diverge
TIMES_THE_LEAST = 4.0  # of this mean: there the loss has left its course
NO_OPTIMIZERS = (
    "the Brain has no optimizer whose learning rate could be tried. Give it opt_class, or assign "
    "self.optimizer in init_optimizers."
)


def sweep_learning_rates(
    plan: SlicePlan,
    stages: EpochTrainer,
    brain: Any,
    loader: Any,
    epoch: int,
) -> NoReturn:
    """Train with one learning rate after the other, write the losses, and end the run.

    Args:
        plan: which rates.
        stages: train an epoch.
        brain: whose ``fit`` was called; its ``fit_batch`` and ``on_stage_end`` are replaced.
        loader: of the training set.
        epoch: the first one.

    Raises:
        RunStopped: with code 0, at the end.
        ConfigError: there is no optimizer.

    Ranks: collective.
    """
    optimizers = stages.train_step.named_optimizers().values()
    with usage_errors():
        rates = RateSetter(list(optimizers))
    sweep = LrSweep(plan, rates.set, type(brain).__name__)
    train_batch = brain.fit_batch
    window = stages.context.progress.window
    heard = stages.train_step.on_gradients

    def on_gradients() -> None:
        if heard is not None:
            heard()
        sweep.set_rate()  # again: a schedule of the recipe may have set another one

    def fit_batch(batch: Any) -> Any:
        try:
            loss = train_batch(batch)
        except NonFiniteLossError:  # on all ranks alike
            sweep.end(NOT_FINITE)
        except BaseException:
            sweep.forget_window()
            raise
        sweep.after_batch(loss, window)
        return loss

    stages.train_step.on_gradients = on_gradients
    brain.fit_batch = fit_batch
    sweep.set_rate()
    train_until_end(stages, brain, loader, epoch)


class RateSetter:
    """Sets the learning rates of optimizers; those of several groups keep their ratio.

    Args:
        optimizers: the rate that is tried is that of the first group of the first one.

    Raises:
        ConfigError: there is none.

    Example:
        >>> layers = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
        >>> groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(layers, (1, 3))]
        >>> sgd = torch.optim.SGD(groups)
        >>> RateSetter([sgd]).set(0.5)
        >>> [group["lr"] for group in sgd.param_groups]
        [0.5, 1.5]
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if not self._groups:
            raise ConfigError(NO_OPTIMIZERS)
        # a schedule that warms up has set the rate to nearly 0, and noted what it begins from
        given = [float(group.get("initial_lr", group["lr"])) for group in self._groups]
        self._ratios = [rate / given[0] if given[0] > 0 else 1.0 for rate in given]

    def set(self, rate: float) -> None:
        """Set the rate of the first group, and those of the others with it."""
        for group, ratio in zip(self._groups, self._ratios, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio


class LrSweep:
    """Notes the loss of each step, and decides, alike on all ranks, when to end.

    Args:
        plan: which rates, and how long.
        set_rate: sets a rate for the next step.
        name: of the Brain, in messages.

    Ranks: collective, but for making one.
    """

    def __init__(
        self,
        plan: SlicePlan,
        set_rate: Callable[[float], None],
        name: str = "Brain",
    ) -> None:
        self._meter = LossMeter()  # of the present window, on this rank
        self._plan = plan
        self._name = name
        self._set = set_rate
        self._losses: list[float] = []
        self._followed = 0.0
        self._least = math.inf
        self._began = time.monotonic()

    def set_rate(self) -> None:
        """Set the rate of the next step."""
        self._set(self._plan.learning_rates[len(self._losses)])

    def forget_window(self) -> None:
        """Leave out a window that has failed, and is perhaps tried again in smaller parts."""
        self._meter = LossMeter()

    def after_batch(self, loss: Any, window: Window) -> None:
        """Add the loss of a batch, and note that of its window if it is the last.

        Args:
            loss: as ``fit_batch`` returns it.
            window: of the batch.

        Raises:
            RunStopped: no further rate is tried; the result is written.
        """
        if loss.__class__ is tuple:
            loss_sum, count = sum_and_count(loss, self._name, "fit_batch")
            self._meter.append_sum(loss_sum, count if window.count else 0.0)
        else:
            self._meter.append(one_number(loss, self._name, "fit_batch"), window.weight)
        if window.closes:
            self._after_window()

    def _after_window(self) -> None:
        """Note the loss of a window whose step is made.

        Raises:
            RunStopped: no further rate is tried; the result is written.
        """
        loss, weight, nonfinite = self._meter.sums()
        self._meter = LossMeter()
        is_late = get_rank() == 0 and time.monotonic() - self._began > self._plan.max_seconds
        own = [loss, weight, float(nonfinite), float(is_late)]
        total, weights, nonfinite_sum, late = sum_over_ranks(own, "learning rates")
        if nonfinite_sum or not math.isfinite(total):
            self.end(NOT_FINITE)
        if weights:  # else every batch was skipped, and the rate is tried in the next step
            self._losses.append(total / weights)
            if self._has_diverged():
                self.end(DIVERGED)
            if len(self._losses) == len(self._plan.learning_rates):
                self.end(ALL_TRIED)
        if late:
            self.end(TIME_OVER)
        self.set_rate()

    def _has_diverged(self) -> bool:
        number = len(self._losses)
        self._followed = MEMORY * self._followed + (1.0 - MEMORY) * self._losses[-1]
        mean = self._followed / (1.0 - MEMORY**number)
        self._least = min(self._least, mean)
        rises = mean - self._least
        return self._least > 0 and rises > (TIMES_THE_LEAST - 1.0) * self._least

    def end(self, reason: str) -> NoReturn:
        """Write the result, and end the run.

        Raises:
            RunStopped: always.
        """
        result = {
            "rates": self._plan.learning_rates[: len(self._losses)],
            "losses": self._losses,
            "ended": reason,
            "world_size": get_world_size(),
        }
        end_slice(self._plan, result)


def rates_between(first: float, last: float, number: int) -> list[float]:
    """Return learning rates from a first to a last one, each a factor larger than the one before.

    Args:
        first: above 0.
        last: above the first.
        number: of rates, from 2 on.

    Example:
        >>> [round(rate, 6) for rate in rates_between(0.001, 0.1, 3)]
        [0.001, 0.01, 0.1]
    """
    factor = last / first
    return [first * factor ** (step / (number - 1)) for step in range(number)]
