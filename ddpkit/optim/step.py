"""An optimizer step: weigh, clip every group together, skip if not finite, zero.

The norm is taken over the parameters of all groups of all optimizers that step, and read once.
After the gradients have been averaged it is the same number on every rank, so that whether to skip
needs no further agreement.

What a norm means for a step says :mod:`ddpkit.optim.clipping`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ddpkit.base import is_sharded, local_part, reads_device
from ddpkit.compat import multiply_all, norm_of_all, watches_all_steps
from ddpkit.device import widest_float
from ddpkit.optim.clipping import StepResult, gradient_factor, is_one, result_of_norm, skip_flag
from ddpkit.optim.fused import WIDE, WITH_FUSED
from ddpkit.optim.parameters import (
    clone_gradients,
    gradients,
    parameters_of,
    unscale,
    zero_gradients,
)
from ddpkit.optim.pending_step import PendingStep
from ddpkit.precision import drop_casts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@reads_device
def take_step(
    optimizers: Sequence[Optimizer],
    max_norm: float | None,
    scaler: torch.amp.GradScaler | None = None,
    multiplier: float | torch.Tensor = 1.0,
    *,
    updates: bool = True,
    alone: bool = False,
    norm_of_parts: Callable[[list[Any]], torch.Tensor] | None = None,
) -> StepResult:
    """Update the parameters with the accumulated gradients, and clear the gradients.

    Args:
        optimizers: the optimizers that step.
        max_norm: the gradients of all of them together are scaled down to this norm; None or <= 0:
            no clipping.
        scaler: the loss scaler of fp16 training, if it is enabled.
        multiplier: applied to the gradients, in the same pass as the clipping: a number, or a
            tensor of shape ``()`` on their device, which nobody then waits for. It divides by what
            was not known during the window.
        updates: let the scaler choose its next scale; False while gradients of other optimizers
            still have this scale.
        alone: each rank steps with its own gradients (post-local SGD). If one is not finite on this
            rank, all of this rank's become zero and it steps all the same, so that all ranks make
            the same number of steps.
        norm_of_parts: gives the norm of gradients of which each rank has a part, as of one vector
            of all of them; None: the root of the sum of the parts' squares.

    Returns:
        Whether the step was taken, the norm, and whether that was clipped. A step is skipped, and
        its gradients dropped, when a gradient is not finite.

    Ranks: local; gradients must have been averaged over the ranks before. Where each rank has a
        part of them, collective: one small sum gives all the same norm.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1)); (3 * weight).sum().backward()
        >>> take_step([torch.optim.SGD([weight], lr=1.0)], max_norm=None), weight.item()
        (StepResult(stepped=True, norm=3.0, clipped=False), -3.0)
    """
    # Their steps may keep the gradients.
    if foreign := [
        optimizer for optimizer in optimizers if not type(optimizer).__module__.startswith("torch.")
    ]:
        clone_gradients(foreign)
    if scaler is not None:
        optimizers = unscale(optimizers, scaler)
    found, total_norm = _with_norm(optimizers, norm_of_parts)
    weight = None if is_one(multiplier) else multiplier
    total_norm = total_norm if weight is None else total_norm * weight
    result = result_of_norm(total_norm.item(), max_norm)
    if result.stepped:
        factor = gradient_factor(weight, total_norm, max_norm, result.norm)
        if factor is not None:
            multiply_all(found, factor)
    stepped = result.stepped or (alone and _zeroed(found, multiplier))
    if stepped:
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None and optimizers and updates:
        scaler.update()
    zero_gradients(optimizers, set_to_none=True)
    return result if result.stepped else result._replace(stepped=stepped)


def take_late_step(
    optimizers: Sequence[Optimizer],
    max_norm: float | None,
    multiplier: float | torch.Tensor = 1.0,
) -> PendingStep | None:
    """Step as :func:`take_step` does, bit for bit, where the GPU can decide on skipping and nobody
    waits for it.

    Args:
        optimizers: the optimizers that step.
        max_norm: as for :func:`take_step`.
        multiplier: likewise.

    Returns:
        The step, which is made or skipped and not counted yet; None: nothing was done, and
        :func:`take_step` has to.

    Ranks: local; gradients must have been averaged over the ranks before.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1)); (3 * weight).sum().backward()
        >>> (
        ...     take_late_step([torch.optim.SGD([weight], lr=1.0, fused=True)], None).result(),
        ...     weight.item(),
        ... )
        (StepResult(stepped=True, norm=3.0, clipped=False), -3.0)
    """
    found = gradients(optimizers)
    if not _skip_by_themselves(optimizers, found):
        return None
    norm = norm_of_all(found)
    weight = None if is_one(multiplier) else multiplier
    norm = norm if weight is None else norm * weight
    pending = PendingStep(norm, max_norm)
    skip = skip_flag(norm, can_be_negative=weight is not None)
    factor = gradient_factor(weight, norm, max_norm)
    if factor is not None:
        multiply_all(found, factor)
    stepping: Sequence[Any] = optimizers
    for optimizer in stepping:
        # as torch's GradScaler hands it over
        optimizer.grad_scale = None
        optimizer.found_inf = skip
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
    zero_gradients(optimizers, set_to_none=True)
    return pending


def _skip_by_themselves(optimizers: Sequence[Optimizer], found: list[torch.Tensor]) -> bool:
    """Say whether fused kernels of torch can skip this step with nothing left behind.

    No hook and no wrapper may see the step. Every parameter must have its state: a step that is
    skipped makes none, and SGD's kernel begins with uninitialised momentum where it skips its first
    step (torch 2.13).
    """
    kinds = {
        (
            gradient.__class__,
            gradient.dtype,
            gradient.device,
            gradient.layout,
        )
        for gradient in found
    }
    kind, dtype, _, layout = kinds.pop() if len(kinds) == 1 else (None, None, None, None)
    if (
        kind is not torch.Tensor
        or dtype not in WIDE
        or layout is not torch.strided
        or watches_all_steps()
    ):
        return False
    for optimizer in optimizers:
        parts = vars(optimizer)
        own: Any = parts.get("step")
        # torch's schedulers wrap it
        inner = own.__wrapped__ if hasattr(own, "_wrapped_by_lr_sched") else None
        is_plain = own is None or inner is type(optimizer).step
        if type(optimizer) not in WITH_FUSED or _is_watched(optimizer) or not is_plain:
            return False
        for group in optimizer.param_groups:
            kept = "exp_avg" if "betas" in group else "momentum_buffer" if group["momentum"] else ""
            stepping = [
                parameter for parameter in group["params"] if kept and parameter.grad is not None
            ]
            if not group["fused"] or any(
                optimizer.state.get(parameter, {}).get(kept) is None for parameter in stepping
            ):
                return False
    return True


def _is_watched(optimizer: Optimizer) -> bool:
    """Say whether a hook sees the steps of an optimizer; one that only drops casts does not
    look.
    """
    hooks = [vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")]
    return any(hook is not drop_casts for found in hooks if found for hook in found.values())


@reads_device
def _zeroed(found: list[torch.Tensor], multiplier: float | torch.Tensor) -> bool:
    """Fill all gradients with zeros; not if the multiplier, the same on all ranks, is why they are
    not finite.
    """
    if not 0.0 < multiplier < math.inf:
        return False
    for gradient in found:
        gradient.zero_()
    return True


@reads_device
def _dense(parameter: torch.Tensor) -> Any:
    """Return a gradient; of a sparse one (``nn.Embedding(sparse=True)``) the values of its rows,
    each row once.
    """
    gradient: Any = parameter.grad
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient.coalesce()
    return parameter.grad.values()


def _with_norm(
    optimizers: Sequence[Optimizer],
    norm_of_parts: Callable[[list[Any]], torch.Tensor] | None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return what this rank has of the gradients, and the norm of all of them on all ranks as of
    one vector.
    """
    found: list[Any] = gradients(optimizers)
    if not found or found[0].__class__ is torch.Tensor or not is_sharded(found[0]):
        try:
            return found, norm_of_all(found)
        except NotImplementedError:  # torch has no norm of sparse gradients
            found = [
                _dense(parameter)
                for parameter in parameters_of(optimizers)
                if parameter.grad is not None
            ]
            return found, norm_of_all(found)
    parts = [local_part(gradient) for gradient in found]
    if norm_of_parts is not None:
        return parts, norm_of_parts(found)
    square = norm_of_all(parts).to(widest_float(parts[0].device)).square()
    shared = square.to(found[0].device_mesh.device_type)  # the parts may be in host memory
    torch.distributed.all_reduce(shared, group=found[0].device_mesh.get_group())
    return parts, shared.sqrt().to(square.device)


def multiply_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply gradients by a number, this rank's part where they are divided.

    Args:
        parameters: whose gradients.
        factor: the number.

    Ranks: local.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1)); weight.sum().backward()
        >>> multiply_gradients([weight], 0.5); weight.grad
        tensor([0.5000])
    """
    found: list[Any] = [parameter for parameter in parameters if parameter.grad is not None]
    multiply_all(
        [
            local_part(parameter.grad) if is_sharded(parameter.grad) else _dense(parameter)
            for parameter in found
        ],
        factor,
    )


@reads_device
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
        if parameter.grad is not None and not torch.isfinite(_dense(parameter)).all():
            parameter.grad = None
            dropped.append(name)
    return dropped
