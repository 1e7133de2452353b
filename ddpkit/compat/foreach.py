"""One operation over many tensors, which torch's own optimizers use and torch does not document.

Reason: a kernel for each gradient would be launched in every step whose gradients are weighed, or added up in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def add_all(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Add tensors to tensors in place, in one pass; otherwise one by one.

    Args:
        tensors: written into.
        others: as many, of the same shapes.

    Ranks: local.

    Example:
        >>> ones = [torch.ones(1), torch.ones(2)]
        >>> add_all(ones, [torch.ones(1), torch.ones(2)]); ones
        [tensor([2.]), tensor([2., 2.])]
    """
    at_once = getattr(torch, "_foreach_add_", None)
    if at_once is not None:
        at_once(list(tensors), list(others))
        return
    for tensor, other in zip(tensors, others, strict=True):
        tensor.add_(other)


def multiply_all(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors in place, in one pass; otherwise one by one.

    Args:
        tensors: on any devices.
        factor: a number, or a tensor of shape ``()``.

    Ranks: local.

    Example:
        >>> ones = [torch.ones(1), torch.ones(2)]
        >>> multiply_all(ones, 3.0); ones
        [tensor([3.]), tensor([3., 3.])]
    """
    at_once = getattr(torch, "_foreach_mul_", None)
    if at_once is not None:
        at_once(list(tensors), factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)
