"""The clipping rule: which norm skips a step, what gradients are multiplied by, what is clipped.

A norm here is the 2-norm over all gradients of a step together.

It is the same whether the host has read the norm or only the device knows it, and for both the
clip coefficient is computed on the device. So a step has the same bits either way.

Source: the clip coefficient ``max_norm / (norm + 1e-6)`` is as in
:func:`torch.nn.utils.clip_grad_norm_`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class StepResult(NamedTuple):
    """What became of an optimizer step.

    Attributes:
        stepped: False when it was skipped.
        norm: the gradients' norm before clipping; not finite, or negative with the multiplier, when
            the step was skipped.
        clipped: whether the gradients were scaled down to the largest norm that was allowed.

    Ranks: local; equal on every rank when the gradients are.

    Example:
        >>> StepResult(stepped=True, norm=1.5).stepped
        True
    """

    stepped: bool
    norm: float
    clipped: bool = False


def result_of_norm(norm: float, max_norm: float | None) -> StepResult:
    """Say whether a step with this norm is taken, and whether its gradients are clipped.

    Args:
        norm: of the gradients, multiplied; negative where counts add up to less than 0.
        max_norm: the largest norm; None or <= 0: no clipping.

    Ranks: local; equal on every rank when the norm is.

    Example:
        >>> result_of_norm(3.0, 1.0), result_of_norm(math.nan, 1.0).stepped
        (StepResult(stepped=True, norm=3.0, clipped=True), False)
    """
    # False for NaN. A negative norm would turn the gradients round.
    is_taken = 0.0 <= norm < math.inf
    return StepResult(is_taken, norm, is_taken and max_norm is not None and 0.0 < max_norm < norm)


def skip_flag(norm: torch.Tensor, *, can_be_negative: bool) -> torch.Tensor:
    """Return 1.0 on the device of the norm where :func:`result_of_norm` skips the step, else 0.0.

    Args:
        norm: as there, shape ``()``.
        can_be_negative: whether it was multiplied.

    Ranks: local.

    Example:
        >>> skip_flag(torch.tensor(math.inf), can_be_negative=False)
        tensor(1.)
    """
    # In few kernels, each of which the host has to launch: NaN * 0, inf * 0 and sqrt(-1) are NaN.
    return ((norm.sqrt() if can_be_negative else norm) * 0.0).ne_(0.0).float()


def gradient_factor(
    weight: float | torch.Tensor | None,
    total_norm: torch.Tensor,
    max_norm: float | None,
    norm: float = math.inf,
) -> float | torch.Tensor | None:
    """Return what the gradients are multiplied by: the weight, and the clip coefficient.

    Args:
        weight: what else they are multiplied by; None: nothing.
        total_norm: of the gradients, multiplied by the weight, shape ``()``, on their device.
        max_norm: the largest norm; None or <= 0: no clipping.
        norm: the same as ``total_norm``, where the host has read it. Then the coefficient is only
            computed for a norm near ``max_norm`` or above it: else it is 1.

    Returns:
        The factor; None: they stay as they are.

    Ranks: local.

    Example:
        >>> gradient_factor(None, torch.tensor(4.0), 1.0)
        tensor(0.2500)
    """
    # With a margin: near the limit only the device's own arithmetic tells the coefficient from 1.
    if max_norm is None or not 0.0 < max_norm < 1.01 * norm + 1e-5:
        return weight
    # 1 where nothing is clipped: then a multiplication changes no bit
    clip = torch.clamp((total_norm + 1e-6).reciprocal() * max_norm, max=1.0)
    return clip if weight is None else weight * clip


def is_one(multiplier: float | torch.Tensor) -> bool:
    """Say whether a multiplier is known to change nothing.

    Ranks: local.

    Example:
        >>> is_one(1.0), is_one(torch.tensor(1.0))
        (True, False)
    """
    # The host does not know what a tensor holds. The class, as isinstance would be one call more.
    return multiplier.__class__ is float and multiplier == 1.0
