"""Learning-rate schedules under the names that SpeechBrain's recipes know.

Two kinds: epoch schedules return the old and the new rate, and :func:`update_learning_rate` sets
it; step schedules are called with the optimizer after each of its steps, and set the rate of all
its groups themselves. torch's own schedulers need neither.

A checkpoint holds what SpeechBrain's files hold, and either reads the other's. Loaded is the
progress alone: what a schedule was made with stays as the recipe says now. With ``--lr_scaling``
the groups hold the recipe's own rates, as always: nothing here multiplies.

Of SpeechBrain's names ``CyclicCosineScheduler``, ``IntervalScheduler``,
``InverseSquareRootScheduler``, ``LinearNoamScheduler``, ``LinearWarmupScheduler``,
``NoamIntervalScheduler``, ``TriStageLRSchedule``, ``WarmAndExpDecayLRSchedule``,
``WarmCoolDecayLRSchedule`` and ``ScheduledLoss`` are not here: keep SpeechBrain's own, which ddpkit
saves and resumes too, or take one of torch.

Ranks: all of it is local; with the same values on every rank, as stage losses are, the rates are
the same.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.logger import get_logger

__all__ = [
    "CyclicLRScheduler",
    "LinearScheduler",
    "NewBobScheduler",
    "NoamScheduler",
    "ReduceLROnPlateau",
    "StepScheduler",
    "update_learning_rate",
]

logger = get_logger(__name__)


def update_learning_rate(
    optimizer: Optimizer,
    new_lr: float,
    param_group: Iterable[int] | None = None,
) -> None:
    """Set the learning rate of an optimizer.

    Args:
        optimizer: its groups are changed.
        new_lr: what the recipe means; ``--lr_scaling`` scales it by itself.
        param_group: numbers of the groups; by default all.

    Ranks: local.

    Example:
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> update_learning_rate(sgd, 0.05)
        >>> sgd.param_groups[0]["lr"]
        0.05
    """
    groups = optimizer.param_groups
    for group in groups if param_group is None else [groups[number] for number in param_group]:
        if new_lr != group["lr"]:
            logger.info("Learning rate: %.3g -> %.3g", group["lr"], new_lr)
            _set_rate(group, new_lr)


class _Saved:
    """Saved as SpeechBrain saves it: a dict, by the names of attributes."""

    _progress: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's progress."""
        return {name: copy.copy(getattr(self, name)) for name in self._progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: of this class, or of SpeechBrain's.

        Raises:
            CheckpointError: it is of another class.
        """
        missing = [name for name in self._progress if name not in state]
        if missing:
            raise CheckpointError(
                f"it has {', '.join(state) or 'nothing'}, and not {', '.join(missing)}"
            )
        for name in self._progress:
            setattr(self, name, copy.copy(state[name]))


class NewBobScheduler(_Saved):
    """Multiplies a value when a metric has not become better by enough since the call before.

    Args:
        initial_value: of the learning rate.
        annealing_factor: multiplied with.
        improvement_threshold: of ``(previous - metric) / previous``; less is not enough.
        patient: how many times that is let pass before each annealing.

    Ranks: local; all ranks give the same metrics.

    State: value, metrics and patience are saved.

    Example:
        >>> scheduler = NewBobScheduler(1.0)
        >>> scheduler(10.0), scheduler(2.0), scheduler(2.5)
        ((1.0, 1.0), (1.0, 1.0), (1.0, 0.5))
    """

    _progress = ("hyperparam_value", "metric_values", "current_patient")

    def __init__(
        self,
        initial_value: float,
        annealing_factor: float = 0.5,
        improvement_threshold: float = 0.0025,
        patient: int = 0,
    ) -> None:
        self.hyperparam_value = initial_value
        self.annealing_factor = annealing_factor
        self.improvement_threshold = improvement_threshold
        self.patient = patient
        self.metric_values: list[float] = []
        self.current_patient = patient

    def __call__(self, metric_value: float) -> tuple[float, float]:
        """Return the value until now and the one from now on.

        Args:
            metric_value: of the validation; the lower the better, and not negative.
        """
        old = self.hyperparam_value
        metric = float(metric_value)
        if self.metric_values:
            previous = self.metric_values[-1]
            improvement = (previous - metric) / previous if previous else 0.0
            if improvement < self.improvement_threshold:
                is_over = self.current_patient == 0
                self.hyperparam_value = old * self.annealing_factor if is_over else old
                self.current_patient = self.patient if is_over else self.current_patient - 1
        self.metric_values.append(metric)
        return old, self.hyperparam_value


class ReduceLROnPlateau(_Saved):
    """Multiplies the learning rate when a loss has not fallen below its best for several epochs.

    Args:
        lr_min: the lowest rate.
        factor: multiplied with.
        patience: epochs above the best that are let pass before each reduction.
        dont_halve_until_epoch: up to this epoch nothing is reduced, and the newest loss counts as
            the best.

    Ranks: local; all ranks give the same losses.

    State: best loss, losses and patience are saved.

    Example:
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> scheduler = ReduceLROnPlateau(0.25, 0.5, patience=1, dont_halve_until_epoch=1)
        >>> [scheduler([sgd], epoch, loss) for epoch, loss in ((1, 10.0), (2, 11.0), (3, 12.0))]
        [(1.0, 1.0), (1.0, 1.0), (1.0, 0.5)]
    """

    _progress = ("losses", "anchor", "patience_counter")

    def __init__(
        self,
        lr_min: float = 1e-8,
        factor: float = 0.5,
        patience: int = 2,
        dont_halve_until_epoch: int = 65,
    ) -> None:
        self.lr_min = lr_min
        self.factor = factor
        self.patience = patience
        self.dont_halve_until_epoch = dont_halve_until_epoch
        self.losses: list[float] = []
        self.anchor = math.inf
        self.patience_counter = 0

    def __call__(
        self,
        optim_list: Sequence[Optimizer],
        current_epoch: int,
        current_loss: float,
    ) -> tuple[float, float]:
        """Return the old rate and the new rate, without setting it.

        Args:
            optim_list: optimizers; the rate of the last optimizer's first group is used.
            current_epoch: the first one is 1.
            current_loss: of the validation.
        """
        old = float(optim_list[-1].param_groups[0]["lr"])
        loss = float(current_loss)
        new = old
        if current_epoch <= self.dont_halve_until_epoch:
            self.anchor = loss
        elif loss <= self.anchor:
            self.anchor = loss
            self.patience_counter = 0
        elif self.patience_counter < self.patience:
            self.patience_counter += 1
        else:
            new = old * self.factor
            self.patience_counter = 0
        self.losses.append(loss)
        return old, max(new, self.lr_min)


class LinearScheduler:
    """Goes from one value to another in equal steps, one per epoch.

    Args:
        initial_value: in the first epoch.
        final_value: in the last one, and after it.
        epoch_count: number of epochs.

    Ranks: local.

    Example:
        >>> scheduler = LinearScheduler(1.0, 0.0, 3)
        >>> scheduler(1), scheduler(2), scheduler(3)
        ((1.0, 0.5), (0.5, 0.0), (0.0, 0.0))
    """

    def __init__(
        self,
        initial_value: float,
        final_value: float,
        epoch_count: int,
    ) -> None:
        parts = [epoch / max(epoch_count - 1, 1) for epoch in range(epoch_count)]
        self.value_at_epoch = [
            initial_value + (final_value - initial_value) * part for part in parts
        ]

    def __call__(self, current_epoch: int) -> tuple[float, float]:
        """Return the values of an epoch and of the next one.

        Args:
            current_epoch: the first one is 1.
        """
        last = len(self.value_at_epoch) - 1
        return self.value_at_epoch[min(max(current_epoch - 1, 0), last)], self.value_at_epoch[
            min(current_epoch, last)
        ]


class StepScheduler:
    """Decays in steps: ``initial_value * decay_factor ** floor((1 + epoch) / decay_drop)``.

    Args:
        initial_value: of the learning rate.
        decay_factor: 0.5 by default.
        decay_drop: epochs of a step; 2 by default.
        half_life: epochs in which the value halves, a little in each; excludes the other two.

    Raises:
        ConfigError: ``half_life`` with ``decay_factor`` or ``decay_drop``.

    Ranks: local.

    Example:
        >>> scheduler = StepScheduler(1.0)
        >>> scheduler(1), scheduler(2), scheduler(3)
        ((1.0, 0.5), (0.5, 0.5), (0.5, 0.25))
    """

    def __init__(
        self,
        initial_value: float,
        decay_factor: float | None = None,
        decay_drop: float | None = None,
        half_life: float | None = None,
    ) -> None:
        if half_life and (decay_factor or decay_drop):
            raise ConfigError(
                f"StepScheduler: half_life={half_life} says how fast to decay; leave decay_factor "
                "and decay_drop out."
            )
        self.initial_value = initial_value
        self.decay_factor = 0.5 ** (1 / half_life) if half_life else decay_factor or 0.5
        self.decay_drop = 1.0 if half_life else decay_drop or 2

    def __call__(self, current_epoch: int) -> tuple[float, float]:
        """Return the values of an epoch and of the next one.

        Args:
            current_epoch: the first one is 1.
        """
        before, after = (
            math.floor((1 + epoch) / self.decay_drop)
            for epoch in (current_epoch - 1, current_epoch)
        )
        return (
            self.initial_value * self.decay_factor**before,
            self.initial_value * self.decay_factor**after,
        )


class _OfSteps(_Saved):
    """Sets the rate of all groups of an optimizer at each call."""

    _counter = "n_steps"
    _progress: ClassVar[tuple[str, ...]] = ("losses", "n_steps")

    def __init__(self, rate: float) -> None:
        self.current_lr = rate
        self.losses: list[float] = []  # is in SpeechBrain's files
        setattr(self, self._counter, 0)

    def __call__(self, opt: Optimizer) -> tuple[float, float]:
        """Set the rate of the optimizer's next step.

        Args:
            opt: all its groups get the same rate.

        Returns:
            The rate before, which :attr:`current_lr` keeps, and the new one.
        """
        step = getattr(self, self._counter) + 1
        setattr(self, self._counter, step)
        self.current_lr = float(opt.param_groups[0]["lr"])
        rate = self._rate(step)
        for group in opt.param_groups:
            _set_rate(group, rate)
        return self.current_lr, rate

    def _rate(self, step: int) -> float:
        """Return the rate that the call of this number sets."""
        raise NotImplementedError


class NoamScheduler(_OfSteps):
    """Warms up linearly, then decays with the square root of the steps.

    Source: Vaswani et al., "Attention Is All You Need", 2017 (arXiv:1706.03762), section 5.3.

    Args:
        lr_initial: the highest rate, without ``model_size``.
        n_warmup_steps: after which the rate is highest; at least 1.
        model_size: width of the model; the rate is then ``lr_initial * model_size ** -0.5`` times
            the paper's.

    Ranks: local.

    State: the number of calls is saved.

    Example:
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> scheduler = NoamScheduler(1.0, n_warmup_steps=4)
        >>> [scheduler(sgd)[1] for _ in range(4)]
        [0.25, 0.5, 0.75, 1.0]
    """

    def __init__(
        self,
        lr_initial: float,
        n_warmup_steps: int,
        model_size: int | None = None,
    ) -> None:
        super().__init__(lr_initial)
        self.lr_initial = lr_initial
        self.n_warmup_steps = n_warmup_steps
        self.normalize = math.sqrt(n_warmup_steps if model_size is None else 1 / model_size)

    def _rate(self, step: int) -> float:
        return (
            self.lr_initial
            * self.normalize
            * min(1 / math.sqrt(step), step / math.pow(self.n_warmup_steps, 1.5))
        )


class CyclicLRScheduler(_OfSteps):
    """Goes up and down between two rates; call :meth:`on_batch_end` after each step.

    Source: Smith, "Cyclical Learning Rates for Training Neural Networks", 2015 (arXiv:1506.01186).

    Args:
        base_lr: the lowest rate.
        max_lr: the highest one, before scaling.
        step_size: steps of half a cycle.
        mode: ``"triangular"``; ``"triangular2"``, which halves the amplitude with each cycle; or
            ``"exp_range"``, which multiplies it by ``gamma`` with each step.
        gamma: of ``"exp_range"``.
        scale_fn: of the amplitude, instead of ``mode``.
        scale_mode: whether ``scale_fn`` is given the number of the ``"cycle"`` or the
            ``"iterations"``.

    Raises:
        ConfigError: another ``mode``.

    Ranks: local.

    State: the number of steps is saved.

    Example:
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> scheduler = CyclicLRScheduler(base_lr=0.0, max_lr=0.5, step_size=2)
        >>> for _ in range(3):
        ...     scheduler.on_batch_end(sgd); sgd.param_groups[0]["lr"]
        0.25
        0.5
        0.25
    """

    _counter = "clr_iterations"
    _progress = ("losses", "clr_iterations")

    def __init__(
        self,
        base_lr: float = 0.001,
        max_lr: float = 0.006,
        step_size: float = 2000.0,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_fn: Callable[[float], float] | None = None,
        scale_mode: str = "cycle",
    ) -> None:
        scales: dict[str, Callable[[float], float]] = {
            "triangular": lambda _: 1.0,
            "triangular2": lambda cycle: 2.0 ** (1 - cycle),
            "exp_range": lambda iterations: gamma**iterations,
        }
        if scale_fn is None and mode not in scales:
            raise ConfigError(
                f"CyclicLRScheduler: mode must be one of {', '.join(scales)}, got {mode!r}."
            )
        super().__init__(base_lr)
        self.base_lr = base_lr
        self.max_lr = max_lr
        self.step_size = step_size
        self.scale_fn = scales[mode] if scale_fn is None else scale_fn
        self.scale_mode = (
            scale_mode if scale_fn else "iterations" if mode == "exp_range" else "cycle"
        )

    def __call__(self, epoch: Any) -> tuple[float, float]:
        """Return the rates of the last and the next step, without setting them.

        Args:
            epoch: does not matter.
        """
        return self.current_lr, self.clr(getattr(self, self._counter) + 1)

    def clr(self, clr_iterations: float) -> float:
        """Return the rate after so many steps.

        Args:
            clr_iterations: optimizer steps.
        """
        cycle = math.floor(1 + clr_iterations / (2 * self.step_size))
        height = max(0.0, 1 - abs(clr_iterations / self.step_size - 2 * cycle + 1))
        scale = self.scale_fn(cycle if self.scale_mode == "cycle" else clr_iterations)
        return self.base_lr + (self.max_lr - self.base_lr) * height * scale

    def on_batch_end(self, opt: Optimizer) -> None:
        """Set the rate of the optimizer's next step.

        Args:
            opt: all its groups get the same rate.
        """
        super().__call__(opt)

    def _rate(self, step: int) -> float:
        return self.clr(step)


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):  # of a step that was compiled or captured with it
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
