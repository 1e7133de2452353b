"""The parameters of optimizers, and their gradients: listed, dropped, copied, unscaled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


def gradients(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """List the gradients of all groups of all optimizers, each once.

    Args:
        optimizers: the optimizers that are about to step.

    Returns:
        The ``grad`` of every parameter that has one.

    Ranks: local.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2)); weight.sum().backward()
        >>> gradients([torch.optim.SGD([weight], lr=0.1)])
        [tensor([1., 1.])]
    """
    return [parameter.grad for parameter in parameters_of(optimizers) if parameter.grad is not None]


def unscale(optimizers: Sequence[Optimizer], scaler: torch.amp.GradScaler) -> list[Optimizer]:
    """Unscale the gradients of those optimizers that have any; the scaler refuses the others.

    Args:
        optimizers: that step.
        scaler: enabled.

    Returns:
        Those with gradients.

    Raises:
        ConfigError: two of them share a parameter.

    Ranks: local.

    Example:
        >>> unscale([], torch.amp.GradScaler("cpu"))
        []
    """
    ready = [optimizer for optimizer in optimizers if gradients([optimizer])]
    if sum(len(gradients([optimizer])) for optimizer in ready) > len(gradients(ready)):
        raise ConfigError(
            "Two optimizers that step together share a parameter, which does not work with "
            "precision=fp16. Give each parameter to one optimizer, or train with --precision=bf16."
        )
    for optimizer in ready:
        scaler.unscale_(optimizer)
    return ready


def parameters_of(optimizers: Collection[Any]) -> list[torch.nn.Parameter]:
    """Return the parameters of some optimizers, each once.

    Ranks: local.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> len(parameters_of([torch.optim.SGD([weight]), torch.optim.Adam([weight])]))
        1
    """
    found = [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    return found if len(optimizers) == 1 else list(dict.fromkeys(found))


def zero_gradients(optimizers: Iterable[Optimizer], *, set_to_none: bool) -> None:
    """Drop or zero the gradients of some optimizers.

    Args:
        optimizers: whose parameters' gradients go.
        set_to_none: drop them instead of filling them with zeros.

    Ranks: local.

    Example:
        >>> zero_gradients([], set_to_none=True)
    """
    for optimizer in optimizers:
        is_torchs = getattr(type(optimizer), "zero_grad", None) is Optimizer.zero_grad
        if not (set_to_none and is_torchs and "zero_grad" not in vars(optimizer)):
            optimizer.zero_grad(set_to_none=set_to_none)
            continue
        # as torch's does, which makes 40 calls of Python
        for parameter in parameters_of([optimizer]):
            parameter.grad = None


def clone_gradients(optimizers: Sequence[Optimizer]) -> None:
    """Copy gradients, which may be views of DDP's buckets, so that they outlive the next backward
    pass.

    Args:
        optimizers: of whose parameters.

    Ranks: local.

    Example:
        >>> clone_gradients([])
    """
    if not (optimizers and torch.distributed.is_initialized()):
        return
    for parameter in parameters_of(optimizers):
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


own_gradients = clone_gradients  # its name in earlier versions
