"""A backward pass without gradients: what DDP needs of a rank whose loss depends on no parameter.

DDP averages the gradients of a module once each of its parameters has reported one. A loss that
depends on none, such as that of a batch without ground truth, reports nothing, and the other ranks
would wait. Here each parameter reports that there is no gradient
(:mod:`ddpkit.strategies.no_gradients`).

Where no rank has any gradient there is nothing to average, and a parameter must end up without one,
as on one process: an optimizer may move what has a gradient of zero. So such ranks count themselves
in the store. Other ranks do not look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ddpkit.base import POSITION, temporarily
from ddpkit.comm import get_runtime
from ddpkit.compat import version_of
from ddpkit.errors import BatchError
from ddpkit.strategies.batch_outputs import has_batch_statistics
from ddpkit.strategies.no_gradients import go_backwards, has_gradients, trained_of, zero_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpkit.strategies.wrapped_ddp import WrappedDDP

NOT_CALLED = (
    "the loss of a batch depends on no parameter, and the batch did not call {}. The other "
    "processes may wait for this one there: {}. Call the module in every batch, and return 0.0 * "
    "outputs.sum() where a batch has no target."
)
STATISTICS = "the batch statistics of its SyncBatchNorm layers are those of all processes"
SEVERAL = "with several entries it is not known which of them the others have called"


class _Unused(nn.Module):
    """Stands in for a module that a batch has not called."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._parameters_of_module = tuple(parameters)  # not registered: they are the module's

    def forward(self) -> torch.Tensor:
        """Return a zero that depends on the parameters."""
        zero: torch.Tensor = zero_of(*self._parameters_of_module)
        return zero


def call_without_batch(modules: Sequence[WrappedDDP]) -> None:
    """Prepare the backward pass of a batch that has called no wrapped module, as DDP's forward pass
    would.

    Args:
        modules: all that are wrapped.

    Raises:
        BatchError: it is not known what the other ranks do in this batch.

    Ranks: collective: the other ranks call the module.
    """
    names = ", ".join(f"modules[{module.gradient_reduction.entry!r}]" for module in modules)
    if len(modules) > 1:
        raise BatchError(NOT_CALLED.format(f"any of {names}", SEVERAL))
    [module] = modules
    if has_batch_statistics(module.module):
        raise BatchError(NOT_CALLED.format(names, STATISTICS))
    if module.gradient_reduction.skipped:
        module.pass_over()  # while it has its own parameters
    with temporarily(module, module=_Unused(trained_of(module))), torch.enable_grad():
        module.forward()


def complete(module: WrappedDDP, number: int) -> None:
    """Let a module's gradients be averaged over the ranks, in which the last backward pass of this
    rank has no part.

    Args:
        module: called with gradients, in a batch that closes a window.
        number: of the optimizer step; equal on all ranks.

    Ranks: collective: the other ranks do the same, or their backward pass does.
    """
    is_without = (
        not has_gradients(module) and not module.find_unused_parameters
    )  # which DDP looks after itself
    if is_without:
        # before this rank takes part: a rank that has the average then finds all announcements
        announce(module, number)
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
    """Drop a module's gradients if every rank has announced that its own come from no loss. After
    the average.

    Args:
        module: whose gradients they are.
        number: as :func:`announce` was given it.

    Ranks: the ranks that have announced it.
    """
    store = get_runtime().store
    parameters = trained_of(module)
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
    return [(id(parameter.grad), version_of(parameter.grad)) for parameter in trained_of(module)]


def drop_zeros(module: WrappedDDP) -> None:
    """Drop a module's gradients if all of them are zero. Waits for the device.

    Ranks: local.
    """
    parameters = trained_of(module)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not any(bool(gradient.any()) for gradient in gradients):
        for parameter in parameters:
            parameter.grad = None
