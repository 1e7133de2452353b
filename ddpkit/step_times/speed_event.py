"""The ``speed`` event of ``metrics.jsonl``: a second of steps in a line, with the spread over the
ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.step_times.medians import median
from ddpkit.step_times.phases import PHASES, STEP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpkit.step_times.seconds import SecondOfSteps

_DIGITS = 6  # significant ones: times are not known better


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the least, the median and the most of a value over the ranks, and which rank has the
    most.

    Args:
        values: by rank.

    Example:
        >>> spread([1.0, 4.0, 2.0])
        {'min': 1.0, 'median': 2.0, 'max': 4.0, 'max_rank': 1}
    """
    most = max(values)
    return {
        "min": _rounded(min(values)),
        "median": _rounded(median(values)),
        "max": _rounded(most),
        "max_rank": list(values).index(most),
    }


def speed_fields(
    second: SecondOfSteps,
    flops_per_step: float | None = None,
    peak_per_second: float | None = None,
) -> dict[str, Any]:
    """Return the fields of the event.

    Args:
        second: what the ranks have told.
        flops_per_step: floating-point operations of a step on one rank; None: not known.
        peak_per_second: what the rank's device can do at most; None: not known.
    """
    fields: dict[str, Any] = {
        "epoch": second.epoch,
        "step": second.step,
        "optimizer_step": second.optimizer_step,
        "seconds": _rounded(second.seconds),
        "windows": second.windows,
        "batches_per_window": _rounded(second.batches_per_window),
        "world_size": second.world_size,
        "samples_per_second": _rounded(second.samples_per_second),
        "step_seconds": spread([phase[STEP] for phase in second.phases]),
        "phases": {phase: spread([times[phase] for times in second.phases]) for phase in PHASES},
        "memory": _memory(second),
    }
    optional = {
        "tokens_per_second": second.tokens_per_second,
        "gradient_norm": second.gradient_norm,
        "learning_rate": second.learning_rate,
        "loss": second.loss,
        "exchanged_bytes": second.exchanged_bytes or None,
        "host_bound": max(second.is_host_bound, default=0.0) or None,
    }
    optional |= _flops(second, flops_per_step, peak_per_second)
    return fields | {name: value for name, value in optional.items() if value is not None}


def _flops(
    second: SecondOfSteps,
    per_step: float | None,
    peak: float | None,
) -> dict[str, float | None]:
    if not per_step:
        return {}
    per_second = per_step / max(second.step_seconds, 1e-9)
    return {
        "flops_per_step": per_step,
        "flops_per_second": _rounded(per_second),
        "mfu": _rounded(per_second / peak) if peak else None,
    }


def _memory(second: SecondOfSteps) -> dict[str, dict[str, float]]:
    names = second.memory[0] if second.memory else {}
    by_name = {name: [memory[name] for memory in second.memory if name in memory] for name in names}
    return {name: spread(values) for name, values in by_name.items()}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
