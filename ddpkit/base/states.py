"""The states of modules and optimizers: plain containers of tensors, of which each rank may hold a part.

Such tensors are torch's ``DTensor``, as ``fully_shard`` makes them of parameters. They are known by what they can do:
so a run without them does not load ``torch.distributed.tensor``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_FIXED = frozenset({bool, int, float, str, bytes, type(None)})  # values that never change


def map_values(value: Any, function: Callable[[Any], Any]) -> Any:
    """Rebuild plain containers with a function's values in the place of what they hold.

    Args:
        value: plain containers of anything.
        function: called with all that is neither a container nor a number, text or None.

    Ranks: local.

    Example:
        >>> map_values({"a": [torch.ones(1), 3]}, torch.numel)
        {'a': [1, 3]}
    """
    if type(value) in {dict, OrderedDict}:
        rebuilt = type(value)((key, map_values(one, function)) for key, one in value.items())
        if type(value) is OrderedDict:
            vars(rebuilt).update(vars(value))  # the versions of a module's state
        return rebuilt
    if type(value) in {list, tuple}:
        if _FIXED.issuperset(map(type, value)):  # long ones of numbers are many
            return type(value)(value)
        return type(value)(map_values(one, function) for one in value)
    return value if type(value) in _FIXED else function(value)


def is_sharded(value: Any) -> bool:
    """Say whether a value is a tensor that is divided over the ranks.

    Ranks: local.

    Example:
        >>> is_sharded(torch.ones(2))
        False
    """
    return hasattr(value, "full_tensor") and hasattr(value, "device_mesh")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a sharded tensor, in the same memory; of another tensor, the tensor itself.

    Ranks: local.

    Example:
        >>> local_part(torch.ones(2))
        tensor([1., 1.])
    """
    own: Any = tensor.detach()
    return own.to_local() if is_sharded(tensor) else tensor


def sharded_like(value: Any, own: Any) -> Any:
    """Divide a whole tensor as another one is divided; what is of another shape, or divided, stays as it is.

    Args:
        value: the same on all ranks, such as an entry of a checkpoint.
        own: sharded by its first dimension, or not at all.

    Returns:
        A tensor with a copy of this rank's rows, on the device of ``own``; or ``value``.

    Ranks: local.

    Source: the rows of a rank are those of ``torch.chunk``, as in ``Shard(0)`` of torch 2.13; a rank may have none.

    Example:
        >>> sharded_like(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])
    """
    if not is_sharded(own) or is_sharded(value) or not isinstance(value, torch.Tensor) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import DTensor  # is loaded: `own` is one

    mesh, part = own.device_mesh, local_part(own)
    size = -(-own.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * size, own.shape[0])
    rows = value.detach()[start : start + part.shape[0]].to(part.device, copy=True)
    return DTensor.from_local(rows, mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride())


def gather_whole(tensor: Any, *, keep: bool) -> torch.Tensor:
    """Gather a sharded tensor.

    Args:
        tensor: sharded; its part may be in host memory while the ranks communicate on GPUs.
        keep: whether this rank wants it.

    Returns:
        The whole tensor on the CPU; empty where it is not kept.

    Ranks: collective, in the same order on all ranks.
    """
    gathered: torch.Tensor = tensor.detach().to(tensor.device_mesh.device_type).full_tensor()
    return gathered.cpu() if keep else gathered.new_empty(0)


# ---------------------------------------------------------------------------------------- wrappers


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """Return a module's direct submodules, past any forwarding of attributes.

    Ranks: local.
    """
    children: Mapping[str, nn.Module | None] = vars(module)["_modules"]
    return children


def inner_name(module: nn.Module) -> str | None:
    """Return the name under which a wrapper (DDP, DataParallel, ``torch.compile``) holds its module, or None.

    Ranks: local.
    """
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "module"
    return "_orig_mod" if "_orig_mod" in children_of(module) else None


def unwrap(obj: Any) -> Any:
    """Take DDP, DataParallel and ``torch.compile`` off a module; return any other object as it is.

    Ranks: local.

    Example:
        >>> inner = nn.Linear(1, 1)
        >>> unwrap(nn.DataParallel(inner)) is inner
        True
    """
    while isinstance(obj, nn.Module) and (name := inner_name(obj)) is not None:
        obj = children_of(obj)[name]
    return obj
