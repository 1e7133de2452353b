"""Modules and optimizers that no checkpoint holds: a user should know of them before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def modules_not_saved(
    modules: Mapping[str, nn.Module] | nn.ModuleDict,
    recoverables: Mapping[str, Any],
) -> list[str]:
    """Name the modules with trained parameters that no recoverable holds: after a restart they
    would be untrained.

    Args:
        modules: by name.
        recoverables: of a checkpointer: modules, or objects with modules among their attributes.

    Returns:
        Names.

    Example:
        >>> net, head = nn.Linear(1, 1), nn.Linear(2, 1)
        >>> modules_not_saved({"net": net, "head": head}, {"net": net})
        ['head']
    """
    saved = [part for part in parts_of(recoverables) if isinstance(part, nn.Module)]
    held = {id(parameter) for module in saved for parameter in module.parameters()}
    return [
        name
        for name, module in modules.items()
        if any(
            parameter.requires_grad and id(parameter) not in held
            for parameter in module.parameters()
        )
    ]


def optimizers_not_saved(
    optimizers: Mapping[str, Any] | None,
    recoverables: Mapping[str, Any],
) -> list[str]:
    """Name the optimizers that no recoverable holds: a restart would lose their moments.

    Args:
        optimizers: by name, or None.
        recoverables: of a checkpointer; one may have the optimizer among its attributes.

    Returns:
        Names.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        >>> optimizers_not_saved({"opt_class": sgd}, {"net": nn.Linear(1, 1)})
        ['opt_class']
    """
    held = set(map(id, parts_of(recoverables)))
    return [name for name, optimizer in (optimizers or {}).items() if id(optimizer) not in held]


def parts_of(recoverables: Mapping[str, Any]) -> Iterator[Any]:
    """Yield recoverables, their attributes, and the items of attributes that are containers.

    Args:
        recoverables: of a checkpointer.

    Example:
        >>> list(parts_of({"net": 1}))
        [1]
    """
    for recoverable in recoverables.values():
        yield recoverable
        for value in getattr(recoverable, "__dict__", {}).values():
            inner = list(value.values()) if isinstance(value, dict) else value
            yield from inner if isinstance(inner, (list, tuple)) else (inner,)
