"""The average of the weights that a run keeps: of a part, or of the option ``ema_decay``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpkit.ema import WeightAverage
    from ddpkit.training import RunContext


def average_of_run(context: RunContext) -> WeightAverage | None:
    """Return the average that a part keeps, or that ``ema_decay`` asks for; None without either.

    Args:
        context: of the run, whose modules it follows.

    Raises:
        ConfigError: ``ema_decay`` is no decay.

    Ranks: local.
    """
    average: WeightAverage | None = context.parts.weight_average()
    if average is None and context.options.ema_decay is not None:
        from ddpkit import ema  # which few runs need

        average = ema.WeightAverage(context.modules, context.options.ema_decay)
    if average is not None:
        average.follow_modules_of(context)
    return average
