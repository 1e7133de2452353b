"""How the hook of an object is found: what saves it, what loads it, what takes over pretrained
parameters.

An object's hook is found through its class's method resolution order: the first class with a hook
counts. Methods marked by SpeechBrain's own ``mark_as_saver``, ``mark_as_loader`` and
``mark_as_transfer`` count as hooks of their class, so that its modules keep their state. Anything
with ``state_dict`` and ``load_state_dict`` needs no hook.

A save hook runs on the main process. One whose attribute ``save_on_main_only`` is False runs on
every rank, always with the same path, and decides itself which rank writes what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from ddpkit.base import (
    DEFAULT_LOAD_HOOKS,
    DEFAULT_SAVE_HOOKS,
    DEFAULT_TRANSFER_HOOKS,
    HOOKS_OF_ROLE,
    LoadHook,
    SaveHook,
    TransferHook,
)
from ddpkit.checkpointing.hooks import torch_recovery, torch_save
from ddpkit.compat import speechbrain_hook
from ddpkit.types import Stateful

HookT = TypeVar("HookT", bound=Callable[..., object])


def find_save_hook(obj: Any) -> SaveHook | None:
    """Return what saves an object, or None when nothing does.

    Ranks: local.

    Example:
        >>> from torch import nn
        >>> find_save_hook(nn.Linear(1, 1)) is torch_save
        True
    """
    return get_default_hook(obj, DEFAULT_SAVE_HOOKS) or (
        torch_save if isinstance(obj, Stateful) else None
    )


def find_load_hook(obj: Any) -> LoadHook | None:
    """Return what loads an object, or None when nothing does.

    Ranks: local.

    Example:
        >>> find_load_hook(object()) is None
        True
    """
    return get_default_hook(obj, DEFAULT_LOAD_HOOKS) or (
        torch_recovery if isinstance(obj, Stateful) else None
    )


def find_transfer_hook(obj: Any) -> TransferHook | None:
    """Return what takes over pretrained parameters for an object, or None when nothing does.

    Ranks: local.

    Example:
        >>> from torch import nn
        >>> from ddpkit.checkpointing import torch_parameter_transfer
        >>> find_transfer_hook(nn.Linear(1, 1)) is torch_parameter_transfer
        True
    """
    return get_default_hook(obj, DEFAULT_TRANSFER_HOOKS)


def saves_on_every_rank(hook: SaveHook) -> bool:
    """Say whether a save hook is to be called on every rank instead of on the main process.

    Ranks: local.

    Example:
        >>> saves_on_every_rank(torch_save)
        False
    """
    return not getattr(hook, "save_on_main_only", True)


def get_default_hook(obj: Any, default_hooks: Mapping[type, HookT]) -> HookT | None:
    """Return the hook that a table has for an object, as SpeechBrain's function of this name does.

    Args:
        obj: the object.
        default_hooks: classes and their hooks, such as :data:`DEFAULT_SAVE_HOOKS`. For the three
            tables of this module SpeechBrain's marks count as well.

    Returns:
        That of the nearest class in the method resolution order; None if none has one. Unlike
        :func:`find_save_hook` and :func:`find_load_hook` it does not take ``state_dict`` and
        ``load_state_dict`` for one.

    Ranks: local.

    Example:
        >>> from torch import nn
        >>> get_default_hook(nn.Linear(1, 1), DEFAULT_SAVE_HOOKS) is torch_save
        True
    """
    role = next((role for role, known in HOOKS_OF_ROLE.items() if known is default_hooks), None)
    for cls in type(obj).__mro__:
        hook = default_hooks.get(cls) or (role and speechbrain_hook(cls, role))
        if hook:
            return cast("HookT", hook)
    return None
