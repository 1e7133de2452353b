"""Base weights that a state names and does not hold: compared with those that a module has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpkit.base import unwrap
from ddpkit.checkpointing.fingerprinting import fingerprints
from ddpkit.checkpointing.state_names import plain_key

if TYPE_CHECKING:
    from torch import nn

#: The entry of a state with the fingerprints of the parameters that stand elsewhere, by name.
BASE = "__base__"


def base_of(state: Any) -> dict[str, str]:
    """Return the fingerprints of a state's base, by name; none, where it holds all.

    Example:
        >>> base_of({"weight": 1})
        {}
    """
    found = state.get(BASE) if isinstance(state, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def without_base(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state without the entry of its base."""
    if BASE not in state:
        return state
    rest = OrderedDict((name, value) for name, value in state.items() if name != BASE)
    vars(rest).update(getattr(state, "__dict__", {}))
    return rest


def other_base(module: nn.Module, base: Mapping[str, str]) -> dict[str, str]:
    """Return what of a base a module has not, or has with other values.

    Args:
        module: wrapped or not.
        base: fingerprints by name.

    Returns:
        Names, and in words what is so.

    Ranks: all, where parameters are divided; else local.
    """
    inner = unwrap(module)
    named = inner.named_parameters(remove_duplicate=False)
    own = {plain_key(inner, name): parameter for name, parameter in named}
    present = fingerprints({name: own[name].detach() for name in sorted(base) if name in own})
    return {
        name: f"{base[name]} was its base, {present.get(name, 'nothing')} is here"
        for name in sorted(base)
        if present.get(name) != base[name]
    }
