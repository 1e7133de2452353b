"""Keeps what the modules have returned in a batch. A backward pass with gradients of zero starts
from it, if the loss has no graph.

A synchronised BatchNorm sends in its backward pass, too. Where a rank's loss depends on no
parameter, the other ranks would wait for it there; and its rows have moved their outputs, so that
its parameters get a gradient. So this rank goes backwards as they do, from what its modules have
returned, with gradients of zero.

Only models with a synchronised BatchNorm need it, and only theirs is kept, until the next batch
calls a module or the optimizers step.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit.syncbn import SyncBatchNorm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DEEPEST = 8  # levels of containers
NOT_LOOKED_INTO = (str, bytes, type, types.ModuleType, types.FunctionType, nn.Module)


def has_batch_statistics(modules: nn.Module, *, in_any_mode: bool = False) -> bool:
    """Say whether a model has a layer whose batch statistics are those of all ranks.

    Args:
        modules: the model.
        in_any_mode: whether a layer counts that is not in training mode now.

    Ranks: local.

    Example:
        >>> has_batch_statistics(nn.Linear(1, 1)), has_batch_statistics(nn.SyncBatchNorm(1))
        (False, True)
    """
    kinds = (SyncBatchNorm, nn.SyncBatchNorm)
    shared = [part for part in modules.modules() if isinstance(part, kinds)]
    return any(in_any_mode or part.training for part in shared)


def with_graph(value: Any, levels: int = DEEPEST) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module has returned that a backward pass can start from.

    Args:
        value: a tensor, or a container or object of tensors.
        levels: how deep to look.

    Ranks: local.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> len(list(with_graph({"sum": weight.sum(), "all": [weight * 2, torch.ones(1)]})))
        2
    """
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            yield value
        return
    level = [value]
    seen = {id(value)}
    for _ in range(levels):
        parts = [part for value in level for part in _parts_of(value)]
        level = []
        for part in parts:
            if id(part) in seen:
                continue
            seen.add(id(part))
            if not isinstance(part, torch.Tensor):
                level.append(part)
            elif part.grad_fn is not None:
                yield part


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, NOT_LOOKED_INTO):
        return []
    attributes: Mapping[str, Any] = getattr(
        value,
        "__dict__",
        {},
    )
    slots = [
        getattr(
            value,
            name,
            None,
        )
        for name in getattr(
            value,
            "__slots__",
            (),
        )
    ]
    return [*attributes.values(), *slots]


class BatchOutputs:
    """What the modules have returned since the last backward pass, in one batch. A copy of it is
    empty.

    Ranks: local.

    Example:
        >>> BatchOutputs().now()
        []
    """

    def __init__(self) -> None:
        self._progress: Any = None
        self._clock: Any = None
        self._place = -1, -1
        self._found: list[tuple[nn.Module, list[torch.Tensor]]] = []
        self._hooks: list[Any] = []

    def __reduce__(self) -> tuple[type[BatchOutputs], tuple[()]]:
        """Copy and save nothing: tensors with a graph cannot be copied."""
        return BatchOutputs, ()

    def begin_pass(
        self,
        progress: Any,
        clock: Any,
    ) -> None:
        """Keep what modules return from now on.

        Args:
            progress: has ``step``, the number of the batch.
            clock: has ``batch``, the number of backward passes so far.
        """
        self._progress = progress
        self._clock = clock
        self.forget()

    def note(
        self,
        module: nn.Module,
        output: Any,
    ) -> None:
        """Keep what a module has returned.

        Args:
            module: that has computed it.
            output: of any type.
        """
        if self._clock is not None:
            self.forget_earlier()
            self._found.append((module, list(with_graph(output))))

    def forget_earlier(self) -> None:
        """Let the memory of earlier batches go."""
        if self._clock is not None:
            position = self._progress.step, self._clock.batch
            if position != self._place:
                self.forget()
                self._place = position

    def follow(self, modules: nn.ModuleDict) -> bool:
        """Return whether the modules' outputs are to be kept; if so, hook the modules that are not
        wrapped.

        Args:
            modules: wrapped where something of them is trained.
        """
        for hook in self._hooks:
            hook.remove()
        is_needed = has_batch_statistics(modules, in_any_mode=True)
        plain = [
            module for module in modules.values() if not isinstance(module, DistributedDataParallel)
        ]
        self._hooks = [
            module.register_forward_hook(self._after_forward) for module in plain if is_needed
        ]
        return is_needed

    def _after_forward(
        self,
        module: nn.Module,
        _: Any,
        output: Any,
    ) -> None:
        if module.training and torch.is_grad_enabled():
            self.note(module, output)

    def now(self) -> list[tuple[nn.Module, list[torch.Tensor]]]:
        """Return what modules have returned since the last backward pass, each with the module."""
        self.forget_earlier()
        return self._found

    def forget(self) -> None:
        """Let the memory go."""
        self._found = []


def go_backwards_from(outputs: list[torch.Tensor]) -> None:
    """Go backwards with gradients of zero.

    Args:
        outputs: from which to start.

    Ranks: collective: the other ranks go backwards through the same layers.
    """
    torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
