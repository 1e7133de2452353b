"""Learning-rate scaling: a batch ``k`` times as large makes ``k`` times fewer steps per epoch.

So the learning rate is multiplied by ``k`` (linear) or by its square root (sqrt, as the noise of a
gradient shrinks): the samples of a step against those that the rate was set for. The factor is
applied only during each step: parameter groups, schedulers and checkpoints keep the recipe's rates.
So every schedule is the unscaled schedule times the factor, and a run can be resumed with another
batch size.

Source: linear, Goyal et al., "Accurate, Large Minibatch SGD", 2017 (arXiv:1706.02677); square root,
Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014
(arXiv:1404.5997).
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ddpkit.base import kind_of
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.optim.factor_on_rates import RateFactor, factors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpkit.run_opts import RunOptions
    from ddpkit.training import BatchSizes

logger = get_logger(__name__)

# Of optimizers inside of a step, or after one that failed: the recipe's rates.
_own_rates: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()


class LrScaling:
    """Multiplies the learning rates of optimizers while they step.

    Args:
        applied: gets the factor, which whoever has it may set back; None: one of its own.

    Attributes:
        factor: on the learning rates.
        reason: in words.

    Ranks: local; alike on every rank.

    Example:
        >>> import torch
        >>> from ddpkit.data import Division
        >>> from ddpkit.run_opts import RunOptions
        >>> from ddpkit.training import BatchSizes
        >>> weight = torch.nn.Parameter(torch.zeros(1)); weight.grad = torch.ones(1)
        >>> scaling, sgd = LrScaling(), torch.optim.SGD([weight], lr=0.5)
        >>> options = RunOptions(lr_scaling="linear", reference_batch_size=8)
        >>> sizes = BatchSizes(Division(), (16, 16), factor=1, per_step=16, steps=7, samples=99)
        >>> scaling.choose(options, sizes)
        >>> scaling.follow({"sgd": sgd}); sgd.step()
        >>> weight.item(), sgd.param_groups[0]["lr"]
        (-1.0, 0.5)
    """

    def __init__(self, applied: RateFactor | None = None) -> None:
        self._applied = RateFactor() if applied is None else applied
        self.reason = "lr_scaling=none"

    @property
    def factor(self) -> float:
        """What learning rates are multiplied by."""
        return self._applied.value

    def choose(self, options: RunOptions, sizes: BatchSizes) -> None:
        """Find the factor for a call of ``fit``.

        Args:
            options: ``lr_scaling`` and ``reference_batch_size`` count.
            sizes: of the training.

        Raises:
            ConfigError: the reference batch size is missing, or the samples per step are unknown.
        """
        rule = options.lr_scaling
        reference = options.reference_batch_size
        if rule == "none":
            return
        if reference is None:
            raise ConfigError(
                f"lr_scaling={rule} needs reference_batch_size: the samples of an optimizer step, "
                "over all processes, that the learning rates are meant for. Give "
                "--reference_batch_size=N, or --lr_scaling=none."
            )
        if sizes.per_step is None:
            raise ConfigError(
                f"lr_scaling={rule} needs a step of known size, and the batches of the training "
                "come from a batch sampler without batch_size, or whole out of the dataset. Use "
                "--lr_scaling=none, or give batch_size."
            )
        ratio = sizes.per_step / reference
        self._applied.follows_batch = True
        self._applied.value = ratio if rule == "linear" else math.sqrt(ratio)
        processes = sizes.division.in_words
        shown = f"{sizes.per_step} samples per step ({processes}, accumulation {sizes.factor})"
        self.reason = (
            f"lr_scaling={rule}, {shown}, reference_batch_size={reference}: x {self.factor:.6g}"
        )

    def follow(self, optimizers: Mapping[str, Any]) -> None:
        """Scale the steps of optimizers from now on, and say so in one line.

        Args:
            optimizers: by name.

        Raises:
            ConfigError: one of them is not torch's, and has no hooks around its step.
        """
        lines = []
        for name, optimizer in optimizers.items():
            is_known = optimizer in factors
            if self.factor == 1.0 and not is_known:
                continue
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"lr_scaling cannot scale {name}, {kind_of(optimizer)}: it is not a "
                    "torch.optim.Optimizer. Use --lr_scaling=none and set its learning rate for "
                    "this run."
                )
            before = [float(group["lr"]) for group in optimizer.param_groups]
            lines.append(
                f"{name} {_shown(before)} -> {_shown([rate * self.factor for rate in before])}"
            )
            factors[optimizer] = self._applied
            if not is_known:
                optimizer.register_step_pre_hook(_scale)
                optimizer.register_step_post_hook(_restore)
        if lines:
            logger.announce("Learning rates (%s): %s.", self.reason, "; ".join(lines))


def rate_factor(optimizer: Any) -> float:
    """Return what the learning rates of an optimizer are multiplied by in its steps.

    Args:
        optimizer: any.

    Returns:
        The factor of ``--lr_scaling``; 1 where its steps are not scaled.

    Ranks: local; alike on every rank.

    Example:
        >>> import torch
        >>> rate_factor(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
        1.0
    """
    factor = factors.get(optimizer) if isinstance(optimizer, Optimizer) else None
    return 1.0 if factor is None else factor.value


def _scale(optimizer: Optimizer, *_: Any) -> None:
    groups = optimizer.param_groups
    for group, rate in zip(
        groups,
        _own_rates.setdefault(optimizer, [group["lr"] for group in groups]),
        strict=True,
    ):
        group["lr"] = rate * factors[optimizer].value


def _restore(optimizer: Optimizer, *_: Any) -> None:
    for group, rate in zip(
        optimizer.param_groups,
        _own_rates.pop(optimizer, ()),
        strict=False,
    ):
        group["lr"] = rate


def _shown(rates: list[float]) -> str:
    return ", ".join(dict.fromkeys(f"{rate:.6g}" for rate in rates))
