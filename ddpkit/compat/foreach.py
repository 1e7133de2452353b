"""Operations over many tensors at once, which torch's own optimizers use and torch does not document.

Reason: a kernel for each gradient would be launched in every step whose gradients are weighed, or added up in order;
and torch's public ``get_total_norm`` makes 60 calls of Python in every step around the two that compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.utils import get_total_norm

if TYPE_CHECKING:
    from collections.abc import Sequence


def add_all(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Add tensors to tensors in place, in one pass.

    Args:
        tensors: written into.
        others: as many, of the same shapes.

    Ranks: local.

    Example:
        >>> ones = [torch.ones(1), torch.ones(2)]
        >>> add_all(ones, [torch.ones(1), torch.ones(2)]); ones
        [tensor([2.]), tensor([2., 2.])]
    """
    torch._foreach_add_(list(tensors), list(others))


def multiply_all(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors in place, in one pass for each device.

    Args:
        tensors: on any devices.
        factor: a number, or a tensor of shape ``()``.

    Ranks: local.

    Example:
        >>> ones = [torch.ones(1), torch.ones(2)]
        >>> multiply_all(ones, 3.0); ones
        [tensor([3.]), tensor([3., 3.])]
    """
    if isinstance(factor, torch.Tensor) and {tensor.dtype for tensor in tensors} == {torch.float32}:
        factor = factor.to(torch.float32)  # else one kernel each; not half precision, which cannot say a small factor
    for device in {tensor.device for tensor in tensors}:
        own = [tensor for tensor in tensors if tensor.device == device]
        there = factor.to(device) if isinstance(factor, torch.Tensor) else factor
        torch._foreach_mul_(own, there)


def norm_of_all(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all tensors as of one vector: the bits of ``torch.nn.utils.get_total_norm``.

    Args:
        tensors: on any devices.

    Returns:
        Shape ``()``, on the first one's device.

    Ranks: local.

    Example:
        >>> norm_of_all([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    kinds = {(tensor.__class__, tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) != 1 or tensors[0].__class__ is not torch.Tensor or tensors[0].device.type not in {"cpu", "cuda"}:
        return get_total_norm(tensors)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors), 2.0)))  # noqa: SLF001
    return norm
