"""The state of a file, as a module takes it: with its names, and divided as it is divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ddpkit.base import kind_of, map_values, sharded_like, unwrap
from ddpkit.checkpointing.state_names import loose_key, plain_key, rename_keys
from ddpkit.errors import CheckpointError

_LOADING_METHODS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
ON_META = (
    "it is on the meta device, without values. The Brain gives it values when it is made, with "
    "--strategy=fsdp when fit begins: {} it after that, in on_fit_start after "
    "super().on_fit_start()."
)


def has_any(state: Any, test: Callable[[Any], bool]) -> bool:
    """Say whether any value of plain containers passes a test."""
    values: list[Any] = []
    map_values(state, values.append)
    return any(map(test, values))


def is_on_meta(value: Any) -> bool:
    """Say whether a value is a tensor without values."""
    return isinstance(value, torch.Tensor) and value.is_meta


def copies_what_it_loads(obj: Any) -> bool:
    """Say whether ``load_state_dict`` copies every tensor that it is given, as torch's own modules
    do.
    """
    return isinstance(obj, nn.Module) and not any(
        vars(module).get("_load_state_dict_pre_hooks", True)
        or any(not _is_torchs(getattr(module, name)) for name in _LOADING_METHODS)
        # they keep the scales that are given
        or any(buffer.is_quantized for buffer in module.buffers(recurse=False))
        for module in unwrap(obj).modules()
    )


def _is_torchs(method: Callable[..., object]) -> bool:
    return (getattr(method, "__module__", None) or "").startswith("torch.nn.")


def state_for_module(inner: nn.Module, state: Any) -> Any:
    """Give the entries of a file's state the names that ``inner`` has for them; divide them where
    it is divided.
    """
    own = inner.state_dict()
    if has_any(own, is_on_meta):
        raise ValueError(ON_META.format("load"))  # torch would load nothing
    if not isinstance(state, Mapping):
        raise CheckpointError(f"it holds {kind_of(state)} where a module's state was expected")
    plain: dict[str, str] = {}
    loose: dict[str, list[str]] = {}
    for name in [*own, *getattr(own, "_metadata", ())]:
        plain[plain_key(inner, name)] = name
        loose.setdefault(loose_key(name), []).append(name)

    def own_name(name: str) -> str:
        alike = loose.get(loose_key(name), [])
        return plain.get(name, alike[0] if len(alike) == 1 and alike[0] not in state else name)

    renamed = rename_keys(state, own_name)
    # torch notes there whether a caller once asked
    for known in (getattr(state, "_metadata", None) or {}).values():
        # for new parameters, which no optimizer would have
        known.pop("assign_to_params_buffers", None)
    for name, value in renamed.items():
        renamed[name] = sharded_like(value, own.get(name))
    return renamed
