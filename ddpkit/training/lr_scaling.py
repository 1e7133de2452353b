"""Learning-rate scaling: a rate that a recipe set for a reference batch size, scaled to the batch size of the run.

A batch ``k`` times as large makes ``k`` times fewer steps per epoch. So the learning rate is multiplied by ``k``
(linear) or by its square root (sqrt, as the noise of a gradient shrinks). The batch size is counted per optimizer step:
the samples of all ranks and of the accumulation window.

The factor is applied only during each step. Parameter groups, schedulers and checkpoints keep the recipe's rates. So
every schedule is the unscaled schedule times the factor, and a run can be resumed with another batch size.

Source: linear, Goyal et al., "Accurate, Large Minibatch SGD", 2017 (arXiv:1706.02677); square root, Krizhevsky, "One
weird trick for parallelizing convolutional neural networks", 2014 (arXiv:1404.5997).
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpkit.run_opts import RunOptions
    from ddpkit.training.sizes import BatchSizes

logger = get_logger(__name__)

MARK = "ddpkit_lr_scale"
"""Key in older checkpoints: the factor already applied to the rates of a group and of its schedulers."""

# Of optimizers whose steps are scaled: two Brains may have the same one, and the one that trains scales it.
_scalings: weakref.WeakKeyDictionary[Optimizer, LrScaling] = weakref.WeakKeyDictionary()
# Of optimizers inside of a step, or after one that failed: the recipe's rates.
_own_rates: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()


def require_reference(options: Any) -> None:
    """Make sure that there is a batch size that learning rates are scaled from.

    Args:
        options: ``lr_scaling`` and ``reference_batch_size`` count.

    Raises:
        ConfigError: otherwise.

    Ranks: local.
    """
    if options.lr_scaling != "none" and options.reference_batch_size is None:
        raise ConfigError(
            f"lr_scaling={options.lr_scaling} needs reference_batch_size: the samples of an optimizer step, over all "
            "processes, that the learning rates are meant for. Give --reference_batch_size=N, or --lr_scaling=none."
        )


def scaling_factor(rule: str, samples: int, reference: int) -> float:
    """Return the factor for a learning rate.

    Args:
        rule: ``"none"``, ``"linear"`` or ``"sqrt"``.
        samples: of an optimizer step, over all ranks.
        reference: samples of a step that the learning rate was meant for.

    Ranks: local.

    Example:
        >>> scaling_factor("linear", 256, 64), scaling_factor("sqrt", 256, 64), scaling_factor("none", 256, 64)
        (4.0, 2.0, 1.0)
    """
    ratio = samples / reference
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


class LrScaling:
    """Multiplies the learning rates of optimizers while they step.

    Attributes:
        factor: on the learning rates.
        reason: in words.

    Ranks: local; alike on every rank.

    Example:
        >>> import torch
        >>> from ddpkit.run_opts import RunOptions
        >>> from ddpkit.training import BatchSizes
        >>> weight = torch.nn.Parameter(torch.zeros(1)); weight.grad = torch.ones(1)
        >>> scaling, sgd = LrScaling(), torch.optim.SGD([weight], lr=0.5)
        >>> options = RunOptions(lr_scaling="linear", reference_batch_size=8)
        >>> scaling.choose(options, BatchSizes(1, (16, 16), factor=1, per_step=16, steps=7, samples=99))
        >>> scaling.follow({"sgd": sgd}); sgd.step()
        >>> weight.item(), sgd.param_groups[0]["lr"]
        (-1.0, 0.5)
    """

    def __init__(self) -> None:
        self.factor, self.reason = 1.0, "lr_scaling=none"

    def choose(self, options: RunOptions, sizes: BatchSizes) -> None:
        """Find the factor for a call of ``fit``.

        Args:
            options: ``lr_scaling`` and ``reference_batch_size`` count.
            sizes: of the training.

        Raises:
            ConfigError: the reference batch size is missing, or the samples per step are unknown.
        """
        rule, reference = options.lr_scaling, options.reference_batch_size
        require_reference(options)
        if rule == "none" or reference is None:
            return
        if sizes.per_step is None:
            raise ConfigError(
                f"lr_scaling={rule} needs a step of known size, and the batches of the training come from a batch "
                "sampler without batch_size, or whole out of the dataset. Use --lr_scaling=none, or give batch_size."
            )
        self.factor = scaling_factor(rule, sizes.per_step, reference)
        processes = sizes.virtual_on or sizes.world_size
        shown = f"{sizes.per_step} samples per step ({processes} process(es), accumulation {sizes.factor})"
        self.reason = f"lr_scaling={rule}, {shown}, reference_batch_size={reference}: x {self.factor:.6g}"

    def follow(self, optimizers: Mapping[str, Any]) -> None:
        """Scale the steps of optimizers from now on, and say so in one line.

        Args:
            optimizers: by name.

        Raises:
            ConfigError: one of them is not torch's, and has no hooks around its step.
        """
        lines = []
        for name, optimizer in optimizers.items():
            is_known = optimizer in _scalings
            if all(self.ratio(group) == 1.0 for group in optimizer.param_groups) and not is_known:
                continue
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"lr_scaling cannot scale {name}, a {type(optimizer).__name__}: it is not a torch.optim.Optimizer. "
                    "Use --lr_scaling=none and set its learning rate for this run."
                )
            before = [float(group["lr"]) for group in optimizer.param_groups]
            after = [float(group["lr"]) * self.ratio(group) for group in optimizer.param_groups]
            lines.append(f"{name} {_shown(before)} -> {_shown(after)}")
            _scalings[optimizer] = self
            if not is_known:
                optimizer.register_step_pre_hook(_scale)
                optimizer.register_step_post_hook(_restore)
        if lines:
            logger.announce("Learning rates (%s): %s.", self.reason, "; ".join(lines))

    def ratio(self, group: Mapping[str, Any]) -> float:
        """Return the factor for one parameter group."""
        return self.factor / float(group.get(MARK, 1.0))


def _scale(optimizer: Optimizer, *_: Any) -> None:
    groups = optimizer.param_groups
    for group, rate in zip(groups, _own_rates.setdefault(optimizer, [one["lr"] for one in groups]), strict=True):
        group["lr"] = rate * _scalings[optimizer].ratio(group)


def _restore(optimizer: Optimizer, *_: Any) -> None:
    for group, rate in zip(optimizer.param_groups, _own_rates.pop(optimizer), strict=True):
        group["lr"] = rate


def _shown(rates: list[float]) -> str:
    return ", ".join(dict.fromkeys(f"{rate:.6g}" for rate in rates))
