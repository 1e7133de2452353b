"""Makes optimizers and schedules, and steps them: unscale, weigh, clip every group together, skip
if not finite, zero.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__all__ = [
    "LrScaling",
    "PendingStep",
    "RateFactor",
    "Schedule",
    "StepCounters",
    "StepResult",
    "clone_gradients",
    "drop_nonfinite",
    "gradients",
    "make_optimizer",
    "make_schedule",
    "multiply_gradients",
    "parameters_of",
    "rate_factor",
    "rm_vector_weight_decay",
    "take_late_step",
    "take_step",
    "unscale",
    "zero_gradients",
]

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use


def __dir__() -> list[str]:
    """List the public names besides what is loaded already."""
    return sorted({*globals(), *__all__})
