"""The modules of a recipe by name: on a device, equal on all ranks, and the parts of given
classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit.base import is_sharded, kind_of, unwrap
from ddpkit.errors import ConfigError
from ddpkit.strategies.meta_modules import give_values, is_on_meta
from ddpkit.strategies.sending import send_from_main

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def broadcast_from_main(module: nn.Module, device: str) -> None:
    """Give every rank the parameters and buffers of rank 0, so that also what is frozen and random
    is equal everywhere.

    Args:
        module: is changed.
        device: of this rank; what is elsewhere is left alone.

    Ranks: collective.
    """
    kind = torch.device(device).type
    send_from_main(
        tensor
        for tensor in [*module.parameters(), *module.buffers()]
        if tensor.device.type == kind and not is_sharded(tensor)
    )


def take_device(device: str) -> None:
    """Make a device the current one of this process: what asks for "cuda" without a number then
    gets the rank's own.

    Else memory that is pinned, kernels that recipes bring along, and tensors on ``"cuda"`` would
    each open a context of this process on the first GPU, half a gigabyte large.

    Args:
        device: of this rank, such as ``"cuda:1"``; a device without a number is left alone.

    Ranks: local.

    State: the current device.
    """
    kind, _, number = device.partition(":")
    set_device = getattr(
        getattr(
            torch,
            kind,
            None,
        ),
        "set_device",
        None,
    )
    if number and callable(set_device):
        set_device(torch.device(device))


def modules_on_device(
    modules: Mapping[str, Any],
    device: str,
    *,
    keeps_meta: bool = False,
) -> nn.ModuleDict:
    """Gather a recipe's modules on a device; each through its own ``to``, in case it moves more
    than tensors.

    Args:
        modules: by name.
        device: such as ``"cuda:1"``.
        keeps_meta: leave entries that are on the meta device there, for :func:`give_values` later;
            else they get their values now.

    Raises:
        ConfigError: no names are given, an entry is not a module, or is on the meta device and
            cannot be given values.

    Ranks: local.

    Example:
        >>> modules_on_device({"net": nn.Linear(1, 1)}, "cpu").net.weight.device
        device(type='cpu')
    """
    if not hasattr(modules, "items"):
        raise ConfigError(
            f"modules is {kind_of(modules)}, not modules by name: pass {{'net': net}}."
        )
    for name, module in modules.items():
        if not isinstance(module, nn.Module):
            raise ConfigError(f"modules[{name!r}] is {kind_of(module)}, not a torch.nn.Module.")
    gathered = nn.ModuleDict(dict(modules))
    if is_on_meta(gathered) and not keeps_meta and torch.device(device).type != "meta":
        give_values(
            "",
            gathered,
            device,
        )  # of all entries at once: two may share a weight
    for module in modules.values():
        if not is_on_meta(module):
            module.to(device)
    return gathered if is_on_meta(gathered) else gathered.to(device)


def trained_parameters(module: nn.Module) -> frozenset[int]:
    """Return the identities of the parameters of a module that require a gradient.

    Ranks: local.

    Example:
        >>> len(trained_parameters(nn.Linear(1, 1)))
        2
    """
    return frozenset(id(parameter) for parameter in module.parameters() if parameter.requires_grad)


def blocks_of(
    modules: nn.Module,
    classes: Collection[str],
    option: str,
) -> dict[str, nn.Module]:
    """Find the parts of a model whose class has one of the given names.

    Args:
        modules: the model.
        classes: names of classes, such as ``"TransformerEncoderLayer"``.
        option: which gave them, for the message.

    Returns:
        By their names in the model; each once.

    Raises:
        ConfigError: no part has this class.

    Ranks: local.

    Example:
        >>> list(blocks_of(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ["ReLU"], "compile_blocks"))
        ['1']
    """
    parts = {name: module for name, module in modules.named_modules() if name}
    there = {type(part).__name__ for part in parts.values()}
    unknown = sorted(set(classes) - there)
    if unknown:
        raise ConfigError(
            f"{option}={list(classes)!r} names {', '.join(map(repr, unknown))}, and the classes "
            f"in the modules are: {', '.join(sorted(there)) or 'none'}."
        )
    return {name: part for name, part in parts.items() if type(part).__name__ in classes}


def refuse_wrapped(
    name: str,
    module: nn.Module,
    option: str,
) -> None:
    """Refuse an entry that is wrapped, or whose parameters are divided over the ranks, already.

    Args:
        name: of the entry.
        module: the entry.
        option: what ddpkit would do with it.

    Raises:
        ConfigError: naming the entry.

    Ranks: local.

    Example:
        >>> refuse_wrapped("net", nn.DataParallel(nn.Linear(1, 1)), "strategy='fsdp'")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: strategy='fsdp': modules['net'] is wrapped or sharded already
        (DataParallel)...
    """
    is_wrapped = isinstance(module, (DistributedDataParallel, nn.DataParallel))
    if is_wrapped or any(map(is_sharded, module.parameters())):
        raise ConfigError(
            f"{option}: modules[{name!r}] is wrapped or sharded already "
            f"({type(module).__name__}). Give the module itself; --strategy=fsdp shards it."
        )


def refuse_shared_parameters(modules: nn.ModuleDict) -> None:
    """Refuse two entries that share a trainable parameter, or one on the meta device.

    Raises:
        ConfigError: naming both entries and the parameter.

    Ranks: local.
    """
    owner: dict[int, tuple[str, str]] = {}
    for entry, module in modules.items():
        for name, parameter in unwrap(module).named_parameters():
            if not (parameter.requires_grad or parameter.is_meta):
                continue
            other = owner.setdefault(id(parameter), (entry, name))
            if other[0] != entry:
                raise ConfigError(
                    f"modules[{entry!r}] and modules[{other[0]!r}] share the parameter "
                    f"{other[1]!r}: its gradient would be averaged twice, or it would get two "
                    "values from the meta device. Keep it in one entry."
                )
