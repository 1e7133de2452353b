"""A backward pass without gradients: what DDP needs of a rank whose loss depends on no parameter.

DDP averages the gradients of a module once each of its parameters has reported one. A loss that depends on none, such
as that of a batch without ground truth, reports nothing, and the other ranks would wait. Here each parameter reports
that there is no gradient, which DDP takes for a zero.

Where no rank has any gradient there is nothing to average, and a parameter must end up without one, as on one process:
an optimizer may move what has a gradient of zero. So such ranks count themselves in the store. Other ranks do not look.

Source: torch's autograd engine runs the accumulation of an undefined gradient, and with it DDP's hook
(``Reducer::autograd_hook`` of torch 2.13, which says that the hook may fire with an undefined gradient).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit.base import POSITION, temporarily
from ddpkit.comm import get_runtime
from ddpkit.compat import expect_backward_pass, has_gradient_hooks, version_of
from ddpkit.errors import BatchError
from ddpkit.strategies.batch_outputs import has_batch_statistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpkit.strategies.ddp import WrappedDDP

NOT_CALLED = (
    "the loss of a batch depends on no parameter, and the batch did not call {}. The other processes may wait for "
    "this one there: {}. Call the module in every batch, and return 0.0 * outputs.sum() where a batch has no target."
)
STATISTICS = "the batch statistics of its SyncBatchNorm layers are those of all processes"
SEVERAL = "with several entries it is not known which of them the others have called"


class _NoGradients(torch.autograd.Function):
    """A zero that depends on parameters, and has no gradient with respect to any of them."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        """Return a zero, shape ``()``."""
        ctx.like = [one if has_gradient_hooks(one) else None for one in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return no gradients; zeros where a recipe's own hook expects a tensor."""
        return tuple(None if one is None else torch.zeros_like(one) for one in ctx.like)


_zero_of: Any = _NoGradients.apply


class _Unused(nn.Module):
    """Stands in for a module that a batch has not called."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._parameters_of_module = tuple(parameters)  # not registered: they are the module's

    def forward(self) -> torch.Tensor:
        """Return a zero that depends on the parameters."""
        zero: torch.Tensor = _zero_of(*self._parameters_of_module)
        return zero


def _trained(module: WrappedDDP) -> list[nn.Parameter]:
    return [one for one in module.module.parameters() if one.requires_grad]


def has_gradients(module: WrappedDDP) -> bool:
    """Say whether a trained parameter of a module has a gradient.

    Ranks: local.
    """
    return any(one.grad is not None for one in _trained(module))


def call_without_batch(modules: Sequence[WrappedDDP]) -> None:
    """Prepare the backward pass of a batch that has called no wrapped module, as DDP's forward pass would.

    Args:
        modules: all that are wrapped.

    Raises:
        BatchError: it is not known what the other ranks do in this batch.

    Ranks: collective: the other ranks call the module.
    """
    names = ", ".join(f"modules[{one.gradient_reduction.entry!r}]" for one in modules)
    if len(modules) > 1:
        raise BatchError(NOT_CALLED.format(f"any of {names}", SEVERAL))
    [module] = modules
    if has_batch_statistics(module.module):
        raise BatchError(NOT_CALLED.format(names, STATISTICS))
    if module.gradient_reduction.skipped:
        module.pass_over()  # while it has its own parameters
    with temporarily(module, module=_Unused(_trained(module))), torch.enable_grad():
        module.forward()


def go_backwards(module: WrappedDDP) -> None:
    """Report to DDP that a batch has given no gradient.

    Args:
        module: called with gradients.

    Ranks: collective where DDP averages, or compares what is used.
    """
    with torch.enable_grad():
        zero = _zero_of(*_trained(module))
        expect_backward_pass(module, zero)
        zero.backward()


def complete(module: WrappedDDP, number: int) -> None:
    """Let a module's gradients be averaged over the ranks, in which the last backward pass of this rank has no part.

    Args:
        module: called with gradients, in a batch that closes a window.
        number: of the optimizer step; equal on all ranks.

    Ranks: collective: the other ranks do the same, or their backward pass does.
    """
    is_without = (
        not has_gradients(module) and not module.find_unused_parameters
    )  # which DDP looks after itself
    if is_without:
        announce(module, number)  # before this rank takes part: so whoever has the average finds all
    go_backwards(module)
    if is_without:
        drop_if_all_are_without(module, number)


def announce(module: WrappedDDP, number: int | str) -> None:
    """Tell the other ranks that this one's gradients come from no loss. Called before the average.

    Args:
        module: whose gradients they are.
        number: of the average; equal on all ranks.

    Ranks: local.
    """
    get_runtime().store.add(_key(module, number), 1)


def drop_if_all_are_without(module: WrappedDDP, number: int | str) -> None:
    """Drop a module's gradients if every rank has announced that its own come from no loss. After the average.

    Args:
        module: whose gradients they are.
        number: as :func:`announce` was given it.

    Ranks: those that have announced it.
    """
    store = get_runtime().store
    parameters = _trained(module)
    key = _key(module, number)
    if not parameters[0].is_cpu:
        torch.accelerator.synchronize()  # until the others have taken part
    ranks = store.add(key, 0)
    if ranks == module.process_group.size():
        for parameter in parameters:
            parameter.grad = None
    if store.add(f"{key}/read", 1) == ranks:
        store.delete_key(key)
        store.delete_key(f"{key}/read")


def _key(module: WrappedDDP, number: int | str) -> str:
    return f"ddpkit/without/{POSITION.sessions}/{number}/{module.gradient_reduction.entry}"


def gradient_versions(module: WrappedDDP) -> list[tuple[int, int]]:
    """Return what changes once a backward pass has reached a gradient of a module.

    Ranks: local.
    """
    return [(id(one.grad), version_of(one.grad)) for one in _trained(module)]


def drop_zeros(module: WrappedDDP) -> None:
    """Drop a module's gradients if all of them are zero. Waits for the device.

    Ranks: local.
    """
    parameters = _trained(module)
    gradients = [one.grad for one in parameters if one.grad is not None]
    if not any(bool(one.any()) for one in gradients):
        for parameter in parameters:
            parameter.grad = None
