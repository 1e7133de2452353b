"""Modules on the meta device, and their first values."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from ddpkit.base import is_sharded, local_part
from ddpkit.compat import without_weak_references
from ddpkit.errors import ConfigError
from ddpkit.seed import global_seed

if TYPE_CHECKING:
    from collections.abc import Mapping


NO_VALUES = (
    "modules: {} is on the meta device, without values, and {} {}. Give the class a "
    "reset_parameters() that sets all parameters and buffers of its own and none of the parts "
    "inside, as torch's layers have it; or build the module without torch.device('meta')."
)
UNSET = 0xA5  # in every byte: nothing that anybody sets all numbers of a tensor to


def is_on_meta(module: nn.Module) -> bool:
    """Say whether a module has parameters or buffers on the meta device, without values.

    Example:
        >>> is_on_meta(nn.Linear(1, 1, device="meta"))
        True
    """
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def give_values(
    name: str,
    module: nn.Module,
    device: str,
) -> None:
    """Give what is on the meta device its first values, by the ``reset_parameters`` of each part of
    a module.

    Each part draws on the CPU from a seed of its own, made of the run's seed and the name of the
    part: the values do not depend on the device, the strategy, or on what else is given values in
    the same call. Random numbers that are drawn later stay the same.

    Args:
        name: of the module, such as ``"net"`` for an entry of ``modules`` and ``"net.layers.0"``
            for a part of it.
        module: is changed; tensors with values keep them.
        device: where all parameters and buffers go, also those with values.

    Raises:
        ConfigError: a part has no ``reset_parameters``, or it leaves a tensor of its own, or
            changes parts that are divided over the ranks already.

    Ranks: local. Without ``seed_everything`` the values differ between ranks until rank 0 sends its
    own.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 2, device="meta"))
        >>> give_values("net", net, "cpu")
        >>> net[0].weight.shape, is_on_meta(net)
        (torch.Size([2, 3]), False)
    """
    state = torch.get_rng_state()
    seed = global_seed()
    seed = torch.initial_seed() if seed is None else seed
    for path, part in reversed(list(module.named_modules())):  # as they were built: children first
        own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        empty = {key: tensor for key, tensor in own if tensor.is_meta}
        if empty:
            whole = f"{name}.{path}".strip(".")
            torch.default_generator.manual_seed(zlib.crc32(f"{seed} {whole}".encode()))
            _reset(
                whole,
                part,
                empty,
            )
    torch.set_rng_state(state)
    for tensor in (*module.parameters(), *module.buffers()):
        if not is_sharded(tensor):
            tensor.data = tensor.data.to(device)


def _reset(
    name: str,
    part: nn.Module,
    empty: Mapping[str, torch.Tensor],
) -> None:
    """Initialise the empty tensors of one part in place; tied tensors stay tied."""
    kind = type(part).__name__
    reset = getattr(
        part,
        "reset_parameters",
        getattr(
            part,
            "_reset_parameters",
            None,
        ),
    )
    if reset is None:
        raise ConfigError(
            NO_VALUES.format(
                name,
                kind,
                "has no reset_parameters()",
            )
        )
    divided = [local_part(parameter) for parameter in part.parameters() if is_sharded(parameter)]
    before = [tensor.clone() for tensor in divided]
    for tensor in empty.values():
        values = torch.empty_like(tensor, device="cpu")
        _bytes_of(values).fill_(UNSET)
        values = (
            nn.Parameter(values, tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else values
        )
        vars(values).update(vars(tensor))  # marks of the recipe's own
        with without_weak_references(part):
            torch.utils.swap_tensors(tensor, values)  # type: ignore[no-untyped-call]
    reset()
    left = [
        key
        for key in empty
        if getattr(part, key).numel() and (_bytes_of(getattr(part, key)) == UNSET).all()
    ]
    if left:
        raise ConfigError(
            NO_VALUES.format(name, f"{kind}.reset_parameters()", f"leaves some: {', '.join(left)}")
        )
    if not all(
        map(
            torch.equal,
            before,
            divided,
        )
    ):
        raise ConfigError(
            NO_VALUES.format(
                name,
                f"{kind}.reset_parameters()",
                "changes parts inside that are divided",
            )
        )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
