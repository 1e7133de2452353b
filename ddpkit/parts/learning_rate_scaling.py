"""Scales the learning rates with the samples of a step, with the option ``lr_scaling``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.optim import LrScaling
from ddpkit.parts.own import OwnPart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from ddpkit.run_opts import RunOptions
    from ddpkit.training import BatchSizes, RunContext


class LearningRateScaling(OwnPart):
    """Finds the factor of each call of ``fit``, and has the optimizers step with it.

    Args:
        options: ``lr_scaling`` and ``reference_batch_size`` count.
        scaling: multiplies rates while optimizers step.

    Ranks: all; the factor is the same on each.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> options = RunOptions(lr_scaling="linear", reference_batch_size=8)
        >>> LearningRateScaling(options, LrScaling()).scaling.factor
        1.0
    """

    def __init__(self, options: RunOptions, scaling: LrScaling) -> None:
        self.options = options
        self.scaling = scaling

    @classmethod
    def of_run(cls, context: RunContext) -> Self:
        """Make it with the factor of the run, which ``Brain.lr_scale`` shows."""
        return cls(context.options, LrScaling(context.rate_factor))

    def on_sizes_known(self, brain: Any, sizes: BatchSizes) -> None:
        """Find the factor: it follows from the samples of a step."""
        self.scaling.choose(self.options, sizes)

    def on_optimizers_made(self, brain: Any, optimizers: Mapping[str, Any]) -> None:
        """Scale their steps from now on."""
        self.scaling.follow(optimizers)
