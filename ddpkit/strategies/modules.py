"""The modules of a recipe: on their device, equal on all ranks, and without their wrappers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ddpkit.base import is_sharded
from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

META = (
    "modules[{!r}] has {} parameter(s) or buffer(s) on the meta device, without values, such as {!r}. Build it without "
    "torch.device('meta'): --strategy=fsdp divides it when fit begins, and until then a process holds its weights, "
    "without gradients and optimizer. Or give it values first: module.to_empty(device='cpu'), then load_state_dict, or "
    "reset_parameters of each layer."
)


class AttributeForwarding(nn.Module):
    """Makes the attributes of the wrapped ``module`` reachable through its wrapper, for reading and for writing.

    What the wrapper has itself, or got while it was made, is its own; all else is the module's. A base class, beside
    torch's own wrapper.

    Ranks: local.
    """

    _is_made = False

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if value.__class__ is bool and name in own:
            own[name] = value  # DDP writes one in every forward pass; torch's own way takes a microsecond
        elif name in own or not self._is_made or name == "module" or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)

    def __len__(self) -> int:
        return len(self.module)

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("module")
            if inner is None:
                raise
            return getattr(inner, name)


def broadcast_from_main(module: nn.Module, device: str) -> None:
    """Give every rank the parameters and buffers of rank 0, so that also what is frozen and random is equal everywhere.

    Args:
        module: is changed.
        device: of this rank; what is elsewhere is left alone.

    Ranks: collective.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.device.type == torch.device(device).type:
            sent = tensor.detach().contiguous()  # else NCCL refuses it, and gloo sends it in the order of memory
            torch.distributed.broadcast(sent, src=0)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(sent)


def take_device(device: str) -> None:
    """Make a device the current one of this process: what asks for "cuda" without a number then gets the rank's own.

    Else memory that is pinned, kernels that recipes bring along, and tensors on ``"cuda"`` would each open a context of
    this process on the first GPU, half a gigabyte large.

    Args:
        device: of this rank, such as ``"cuda:1"``; nothing is done for one without a number.

    Ranks: local.

    State: the current device.

    Example:
        >>> take_device("cpu")
    """
    kind, _, number = device.partition(":")
    set_device = getattr(getattr(torch, kind, None), "set_device", None)
    if number and callable(set_device):
        set_device(torch.device(device))


def modules_on_device(modules: Mapping[str, Any], device: str) -> nn.ModuleDict:
    """Gather a recipe's modules on a device; each through its own ``to``, in case it moves more than tensors.

    Args:
        modules: by name.
        device: such as ``"cuda:1"``.

    Raises:
        ConfigError: an entry is not a module, or has no values yet (``torch.device("meta")``).

    Ranks: local.

    Example:
        >>> modules_on_device({"net": nn.Linear(1, 1)}, "cpu").net.weight.device
        device(type='cpu')
    """
    for name, module in modules.items():
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"modules[{name!r}] is a {type(module).__name__}, not a torch.nn.Module. Pass modules only."
            )
        empty = [path for path, one in [*module.named_parameters(), *module.named_buffers()] if one.is_meta]
        if empty and torch.device(device).type != "meta":
            raise ConfigError(META.format(name, len(empty), empty[0]))
        module.to(device)
    return nn.ModuleDict(dict(modules)).to(device)


def trained_parameters(module: nn.Module) -> frozenset[int]:
    """Return the identities of the parameters of a module that require a gradient.

    Ranks: local.

    Example:
        >>> len(trained_parameters(nn.Linear(1, 1)))
        2
    """
    return frozenset(id(parameter) for parameter in module.parameters() if parameter.requires_grad)


def unwrap(module: nn.Module) -> nn.Module:
    """Take DDP, DataParallel and ``torch.compile`` off a module.

    Ranks: local.

    Example:
        >>> inner = nn.Linear(1, 1)
        >>> unwrap(nn.DataParallel(inner)) is inner
        True
    """
    while True:
        if isinstance(module, (DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif "_orig_mod" in dict(module.named_children()):
            module = module.get_submodule("_orig_mod")
        else:
            return module


def blocks_of(modules: nn.Module, classes: Collection[str], option: str) -> dict[str, nn.Module]:
    """Find the parts of a model whose class has one of the given names.

    Args:
        modules: the model.
        classes: names of classes, such as ``"TransformerEncoderLayer"``.
        option: which gave them, for the message.

    Returns:
        By their names in the model; each once.

    Raises:
        ConfigError: no part is of such a class.

    Ranks: local.

    Example:
        >>> list(blocks_of(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ["ReLU"], "compile_blocks"))
        ['1']
    """
    parts = {name: one for name, one in modules.named_modules() if name}
    there = {type(one).__name__ for one in parts.values()}
    unknown = sorted(set(classes) - there)
    if unknown:
        raise ConfigError(
            f"{option}={list(classes)!r} names {', '.join(map(repr, unknown))}, and the classes in the modules are: "
            f"{', '.join(sorted(there)) or 'none'}."
        )
    return {name: one for name, one in parts.items() if type(one).__name__ in classes}


def has_moving_buffers(module: nn.Module) -> bool:
    """Say whether a module has saved floating-point buffers that are not batch statistics.

    Such buffers (codebooks, running normalisers) may drift apart between ranks, so DDP broadcasts them from rank 0
    before each training forward pass, as it does by default. Batch statistics are equal already.

    Ranks: local.

    Example:
        >>> has_moving_buffers(nn.BatchNorm1d(3))
        False
    """
    saved = module.state_dict(keep_vars=True)
    batch_statistics = {
        id(buffer)
        for part in module.modules()
        if isinstance(part, _BatchNorm)
        for buffer in part.buffers(recurse=False)
    }
    return any(
        name in saved and buffer.is_floating_point() and id(buffer) not in batch_statistics
        for name, buffer in module.named_buffers()
    )


def batch_norms(modules: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers of a model, synchronised or not.

    Ranks: local.

    Example:
        >>> len(batch_norms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
        1
    """
    return [part for part in modules.modules() if isinstance(part, _BatchNorm)]


def batch_norm_row(modules: nn.Module, synchronises: bool | None) -> str:
    """Say over which rows the BatchNorm layers of a model normalise in training; nothing where it has none.

    Args:
        modules: after its conversion.
        synchronises: the option ``sync_batchnorm``.

    Ranks: local.

    Example:
        >>> model = nn.Sequential(nn.SyncBatchNorm(2), nn.SyncBatchNorm(2), nn.BatchNorm1d(2))
        >>> batch_norm_row(model, None)
        'over the rows of all processes (--sync_batchnorm=auto): 2 of 3 layers; the others by those of each process'
        >>> batch_norm_row(model, False)
        'each process by its own rows, as --sync_batchnorm=off says'
    """
    layers = batch_norms(modules)
    if not layers:
        return ""
    if synchronises is False:
        return "each process by its own rows, as --sync_batchnorm=off says"
    from ddpkit.syncbn import SyncBatchNorm  # loaded already where there is one

    shared = sum(isinstance(one, (SyncBatchNorm, nn.SyncBatchNorm)) for one in layers)
    given = "auto" if synchronises is None else "on"
    words = f"over the rows of all processes (--sync_batchnorm={given})"
    return (
        words
        if shared == len(layers)
        else (f"{words}: {shared} of {len(layers)} layers; the others by those of each process")
    )


def refuse_wrapped(name: str, module: nn.Module, option: str) -> None:
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
        ddpkit.errors.ConfigError: strategy='fsdp': modules['net'] is wrapped or sharded already (DataParallel)...
    """
    is_wrapped = isinstance(module, (DistributedDataParallel, nn.DataParallel))
    if is_wrapped or any(map(is_sharded, module.parameters())):
        raise ConfigError(
            f"{option}: modules[{name!r}] is wrapped or sharded already ({type(module).__name__}). Give the module "
            "itself; --strategy=fsdp shards it."
        )


def refuse_shared_parameters(modules: nn.ModuleDict) -> None:
    """Refuse two entries that share a trainable parameter.

    Raises:
        ConfigError: naming both entries and the parameter.

    Ranks: local.

    Example:
        >>> refuse_shared_parameters(nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}))
    """
    owner: dict[int, tuple[str, str]] = {}
    for entry, module in modules.items():
        for name, parameter in unwrap(module).named_parameters():
            if not parameter.requires_grad:
                continue
            other = owner.setdefault(id(parameter), (entry, name))
            if other[0] != entry:
                raise ConfigError(
                    f"modules[{entry!r}] and modules[{other[0]!r}] share the trainable parameter {other[1]!r}, whose "
                    "gradient DDP would average twice. Keep the parameter in one entry of modules only."
                )
