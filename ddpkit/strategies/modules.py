"""The modules of a recipe: on their device, equal on all ranks, and without their wrappers."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ddpkit.base import is_sharded, local_part, unwrap
from ddpkit.errors import ConfigError
from ddpkit.seed import global_seed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

NO_VALUES = (
    "modules: {} is on the meta device, without values, and {} {}. Give the class a reset_parameters() that sets all "
    "parameters and buffers of its own and none of the parts inside, as torch's layers have it; or build the module "
    "without torch.device('meta')."
)
UNSET = 255  # in every byte: NaN as a number


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


def is_on_meta(module: nn.Module) -> bool:
    """Say whether a module has parameters or buffers on the meta device, without values.

    Ranks: local.

    Example:
        >>> is_on_meta(nn.Linear(1, 1, device="meta"))
        True
    """
    return any(one.is_meta for one in (*module.parameters(), *module.buffers()))


def give_values(name: str, module: nn.Module, device: str) -> None:
    """Give what is on the meta device its first values, by the ``reset_parameters`` of each part of a module.

    Each part draws on the CPU from a seed of its own, made of the run's seed and the name of the part: the values do
    not depend on the device, the strategy, or on what else is given values in the same call. Random numbers that are
    drawn later stay the same.

    Args:
        name: of the module, such as ``"net"`` for an entry of ``modules`` and ``"net.layers.0"`` for a part of it.
        module: is changed; what has values keeps them.
        device: where parameters and buffers go to, those that had values, too.

    Raises:
        ConfigError: a part has no ``reset_parameters``, or it leaves a tensor of its own, or changes parts that are
            divided over the ranks already.

    Ranks: local. Without ``seed_everything`` the values differ between ranks until rank 0 sends its own.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 2, device="meta"))
        >>> give_values("net", net, "cpu")
        >>> net[0].weight.shape, is_on_meta(net)
        (torch.Size([2, 3]), False)
    """
    state, seed = torch.get_rng_state(), global_seed()
    seed = torch.initial_seed() if seed is None else seed
    for path, part in reversed(list(module.named_modules())):  # as they were built: children first
        own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        empty = {key: one for key, one in own if one.is_meta}
        if empty:
            whole = f"{name}.{path}".strip(".")
            torch.default_generator.manual_seed(zlib.crc32(f"{seed} {whole}".encode()))
            _reset(whole, part, empty)
    torch.set_rng_state(state)
    for one in (*module.parameters(), *module.buffers()):
        if not is_sharded(one):
            one.data = one.data.to(device)


def _reset(name: str, part: nn.Module, empty: Mapping[str, torch.Tensor]) -> None:
    """Give the empty tensors of one part their values, in place: those that are tied to others stay so."""
    kind = type(part).__name__
    reset = getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))
    if reset is None:
        raise ConfigError(NO_VALUES.format(name, kind, "has no reset_parameters()"))
    divided = [local_part(one) for one in part.parameters() if is_sharded(one)]
    before = [one.clone() for one in divided]
    for one in empty.values():
        values = torch.empty_like(one, device="cpu")
        _bytes_of(values).fill_(UNSET)
        values = nn.Parameter(values, one.requires_grad) if isinstance(one, nn.Parameter) else values
        vars(values).update(vars(one))  # marks of the recipe's own
        torch.utils.swap_tensors(one, values)  # type: ignore[no-untyped-call]
    reset()
    left = [key for key in empty if getattr(part, key).numel() and (_bytes_of(getattr(part, key)) == UNSET).all()]
    if left:
        raise ConfigError(NO_VALUES.format(name, f"{kind}.reset_parameters()", f"leaves some: {', '.join(left)}"))
    if not all(map(torch.equal, before, divided)):
        raise ConfigError(NO_VALUES.format(name, f"{kind}.reset_parameters()", "changes parts inside that are divided"))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def broadcast_from_main(module: nn.Module, device: str) -> None:
    """Give every rank the parameters and buffers of rank 0, so that also what is frozen and random is equal everywhere.

    Args:
        module: is changed.
        device: of this rank; what is elsewhere is left alone.

    Ranks: collective.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.device.type == torch.device(device).type and not is_sharded(tensor):
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


def modules_on_device(modules: Mapping[str, Any], device: str, *, keeps_meta: bool = False) -> nn.ModuleDict:
    """Gather a recipe's modules on a device; each through its own ``to``, in case it moves more than tensors.

    Args:
        modules: by name.
        device: such as ``"cuda:1"``.
        keeps_meta: leave entries that are on the meta device there, for :func:`give_values` later; else they get their
            values now.

    Raises:
        ConfigError: no names are given, an entry is not a module, or is on the meta device and cannot be given values.

    Ranks: local.

    Example:
        >>> modules_on_device({"net": nn.Linear(1, 1)}, "cpu").net.weight.device
        device(type='cpu')
    """
    if not hasattr(modules, "items"):
        raise ConfigError(f"modules is a {type(modules).__name__}, not modules by name: pass {{'net': net}}.")
    for name, module in modules.items():
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"modules[{name!r}] is a {type(module).__name__}, not a torch.nn.Module. Pass modules only."
            )
    gathered = nn.ModuleDict(dict(modules))
    if is_on_meta(gathered) and not keeps_meta and torch.device(device).type != "meta":
        give_values("", gathered, device)  # of all entries at once: two may share a weight
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
    batch_statistics = {id(buffer) for part in batch_norms(module) for buffer in part.buffers(recurse=False)}
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
    rest = "" if shared == len(layers) else f": {shared} of {len(layers)} layers; the others by those of each process"
    return f"over the rows of all processes (--sync_batchnorm={given}){rest}"


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
    """Refuse two entries that share a trainable parameter, or one on the meta device.

    Raises:
        ConfigError: naming both entries and the parameter.

    Ranks: local.

    Example:
        >>> refuse_shared_parameters(nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}))
    """
    owner: dict[int, tuple[str, str]] = {}
    for entry, module in modules.items():
        for name, parameter in unwrap(module).named_parameters():
            if not (parameter.requires_grad or parameter.is_meta):
                continue
            other = owner.setdefault(id(parameter), (entry, name))
            if other[0] != entry:
                raise ConfigError(
                    f"modules[{entry!r}] and modules[{other[0]!r}] share the parameter {other[1]!r}: its gradient "
                    "would be averaged twice, or it would get two values from the meta device. Keep it in one entry."
                )
