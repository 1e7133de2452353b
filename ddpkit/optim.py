"""One optimizer step: unscale, weigh, clip every group together, skip if not finite, step, zero.

The norm is taken over the parameters of all groups of all optimizers that step, and read once. After the gradients have
been averaged it is the same number on every rank, so that whether to skip needs no further agreement.

Source: the clip coefficient is that of :func:`torch.nn.utils.clip_grad_norm_`, ``max_norm / (norm + 1e-6)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.optim import Optimizer


@dataclass(frozen=True)
class StepResult:
    """What became of an optimizer step.

    Attributes:
        stepped: False when it was skipped.
        norm: the gradients' norm before clipping; not finite, or negative with the multiplier, when the step was
            skipped.

    Ranks: local; equal on every rank when the gradients are.

    Example:
        >>> StepResult(stepped=True, norm=1.5).stepped
        True
    """

    stepped: bool
    norm: float


def gradients(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """List the gradients of all groups of all optimizers, each once.

    Args:
        optimizers: those that are about to step.

    Returns:
        The ``grad`` of every parameter that has one.

    Ranks: local.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2)); weight.sum().backward()
        >>> gradients([torch.optim.SGD([weight], lr=0.1)])
        [tensor([1., 1.])]
    """
    return [parameter.grad for parameter in _parameters(optimizers)]


def _parameters(optimizers: Sequence[Optimizer]) -> list[Any]:
    """List the parameters that have a gradient, each once."""
    found = [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    if len(optimizers) > 1:  # a parameter may belong to two optimizers
        return list({id(parameter): parameter for parameter in found}.values())
    return found


def take_step(
    optimizers: Sequence[Optimizer],
    max_norm: float | None,
    scaler: torch.amp.GradScaler | None = None,
    multiplier: float | torch.Tensor = 1.0,
) -> StepResult:
    """Update the parameters with the gradients that have been accumulated, and drop these.

    Args:
        optimizers: those that step.
        max_norm: the gradients of all of them together are scaled down to this norm; None or <= 0: no clipping.
        scaler: the loss scaler of fp16 training, if it is enabled.
        multiplier: applied to the gradients, in the same pass as the clipping: a number, or a tensor of shape ``()``
            on their device, which nobody then waits for. It divides by what was not known during the window.

    Returns:
        Whether the step was taken, and the norm. A step is skipped, and its gradients dropped, when a gradient is not
        finite.

    Ranks: local; gradients must have been averaged over the ranks before.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1)); (3 * weight).sum().backward()
        >>> take_step([torch.optim.SGD([weight], lr=1.0)], max_norm=None), weight.item()
        (StepResult(stepped=True, norm=3.0), -3.0)
    """
    if scaler is not None:
        optimizers = _unscale(optimizers, scaler)
    parameters = _parameters(optimizers)
    found = [parameter.grad for parameter in parameters]
    total_norm = get_total_norm(found)
    is_plain = isinstance(multiplier, float) and multiplier == 1.0
    if not is_plain:
        total_norm = total_norm * multiplier
    norm = total_norm.item()
    finite = math.isfinite(norm) and norm >= 0.0  # below: by a multiplier that makes no sense
    clips = finite and max_norm is not None and 0.0 < max_norm < 1.01 * norm + 1e-5  # else surely nothing is clipped
    if is_plain and clips:
        clip_grads_with_norm_(parameters, cast("float", max_norm), total_norm)
    elif finite and not is_plain:
        torch._foreach_mul_(found, _factor(multiplier, total_norm, max_norm if clips else None))
    if finite:
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None and optimizers:
        scaler.update()
    zero_gradients(optimizers, set_to_none=True)
    return StepResult(stepped=finite, norm=norm)


def _factor(multiplier: float | torch.Tensor, total_norm: torch.Tensor, max_norm: float | None) -> float | torch.Tensor:
    """Return what the gradients are multiplied by so that the multiplier is applied and the norm is clipped."""
    if max_norm is None:
        return multiplier
    return multiplier * torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def _unscale(optimizers: Sequence[Optimizer], scaler: torch.amp.GradScaler) -> list[Optimizer]:
    """Unscale the gradients of those optimizers that have any; the scaler refuses the others."""
    ready = [optimizer for optimizer in optimizers if gradients([optimizer])]
    if sum(len(gradients([optimizer])) for optimizer in ready) > len(gradients(ready)):
        raise ConfigError(
            "Two optimizers that step together share a parameter, and the fp16 scaler would unscale its gradient "
            "twice. Give each parameter to one optimizer, or train with --precision=bf16."
        )
    for optimizer in ready:
        scaler.unscale_(optimizer)
    return ready


def make_optimizer(
    opt_class: Callable[[Iterable[Any]], Optimizer], modules: torch.nn.Module, *, split_vectors: bool = False
) -> Optimizer:
    """Call a recipe's ``opt_class`` with all parameters; one that is frozen may be unfrozen later.

    Args:
        opt_class: returns an optimizer.
        modules: whose parameters are optimized.
        split_vectors: two groups of what is trained now, of which the vectors have no weight decay.

    Returns:
        The optimizer.

    Raises:
        ConfigError: nothing can be trained, or ``opt_class`` returned something that is no optimizer.

    Ranks: local.

    Example:
        >>> type(make_optimizer(torch.optim.Adam, torch.nn.Linear(1, 1))).__name__
        'Adam'
    """
    parameters = list(modules.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ConfigError(
            "opt_class was given, but no entry of modules has a trainable parameter: there is nothing to optimize. "
            "Pass the model in modules, or leave opt_class out."
        )
    groups: Any = rm_vector_weight_decay(modules) if split_vectors else parameters
    try:
        optimizer = opt_class(groups)
    except (TypeError, ValueError) as error:
        given = getattr(opt_class, "keywords", None)
        shown = f" with {', '.join(f'{name}={value!r}' for name, value in given.items())}" if given else ""
        raise ConfigError(f"opt_class{shown} makes no optimizer: {type(error).__name__}: {error}") from error
    missing = [name for name in ("param_groups", "step", "zero_grad") if not hasattr(optimizer, name)]
    if missing:
        raise ConfigError(
            f"opt_class returned a {type(optimizer).__name__}, which is no optimizer (it has no {', '.join(missing)}). "
            "opt_class is called with the parameters and returns a torch.optim.Optimizer, for example "
            "opt_class: !name:torch.optim.Adam with lr: 0.001."
        )
    return optimizer


def rm_vector_weight_decay(modules: torch.nn.Module) -> list[dict[str, Any]]:
    """Make two parameter groups: vectors (biases, normalisation) without weight decay, then all the rest.

    Args:
        modules: whose trainable parameters are divided.

    Returns:
        Two groups for an optimizer's constructor.

    Ranks: local.

    Example:
        >>> [len(group["params"]) for group in rm_vector_weight_decay(torch.nn.Linear(2, 3))]
        [1, 1]
    """
    parameters = [parameter for parameter in modules.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim == 1], "weight_decay": 0.0},
        {"params": [parameter for parameter in parameters if parameter.ndim != 1]},
    ]


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
        optimizer.zero_grad(set_to_none=set_to_none)


def drop_nonfinite(modules: torch.nn.Module) -> list[str]:
    """Drop the gradients that are not finite; waits for the device once per parameter.

    Args:
        modules: whose parameters are looked at.

    Returns:
        The names of the parameters whose gradient was dropped.

    Ranks: local.

    Example:
        >>> drop_nonfinite(torch.nn.Linear(1, 1))
        []
    """
    dropped = []
    for name, parameter in modules.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            parameter.grad = None
            dropped.append(name)
    return dropped
