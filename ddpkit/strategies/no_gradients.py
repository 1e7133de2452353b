"""A backward pass that reports to DDP that there is no gradient, which DDP takes for a zero.

Source: torch's autograd engine runs the accumulation of an undefined gradient, and with it DDP's
hook (``Reducer::autograd_hook`` of torch 2.13, which says that the hook may fire with an undefined
gradient).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit.compat import expect_backward_pass, has_gradient_hooks

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


class _NoGradients(torch.autograd.Function):
    """A zero that depends on parameters, and has no gradient with respect to any of them."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        """Return a zero, shape ``()``."""
        ctx.like = [
            parameter if has_gradient_hooks(parameter) else None for parameter in parameters
        ]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return no gradients; zeros where a recipe's own hook expects a tensor."""
        return tuple(
            None if gradient is None else torch.zeros_like(gradient) for gradient in ctx.like
        )


#: Of parameters: a zero that depends on them, and has no gradient with respect to any.
zero_of: Any = _NoGradients.apply


def trained_of(module: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters of a wrapped module that require a gradient.

    Ranks: local.
    """
    return [parameter for parameter in module.module.parameters() if parameter.requires_grad]


def has_gradients(module: DistributedDataParallel) -> bool:
    """Say whether a trained parameter of a module has a gradient.

    Ranks: local.
    """
    return any(parameter.grad is not None for parameter in trained_of(module))


def go_backwards(module: DistributedDataParallel) -> None:
    """Report to DDP that a batch has given no gradient.

    Args:
        module: called with gradients.

    Ranks: collective where DDP averages, or compares what is used.
    """
    with torch.enable_grad():
        zero = zero_of(*trained_of(module))
        expect_backward_pass(module, zero)
        zero.backward()
