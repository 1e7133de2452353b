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

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from ddpkit.base import (
    DEFAULT_LOAD_HOOKS,
    DEFAULT_SAVE_HOOKS,
    DEFAULT_TRANSFER_HOOKS,
    HOOKS_OF_ROLE,
    LoadHook,
    MethodHook,
    SaveHook,
    TransferHook,
    temporarily,
)
from ddpkit.checkpointing.hooks import torch_recovery, torch_save
from ddpkit.types import Stateful

HookT = TypeVar("HookT", bound=Callable[..., object])

# What SpeechBrain's decorators leave behind is read where it is loaded already; nothing of it is
# imported.
_SB_DISTRIBUTED = "speechbrain.utils.distributed"
_SB_CHECKPOINTS = "speechbrain.utils.checkpoints"


class _SpeechBrainSaver(MethodHook):
    """Calls a saver of SpeechBrain on the main process alone, as its own Checkpointer does.

    Its ``main_process_only`` broadcasts to all ranks, and would wait forever for ranks that do not
    call. So it is skipped as the outermost decorator, and has no effect as an inner one.
    """

    def __call__(self, obj: Any, *arguments: Any) -> object:
        if not self.save_on_main_only:
            return super().__call__(obj, *arguments)
        method = getattr(obj, self.name)
        function = getattr(method, "__func__", None)
        while getattr(function, "__globals__", {}).get("__name__") == _SB_DISTRIBUTED:
            inner = getattr(function, "__wrapped__", None)
            if inner is None:
                break
            function = inner
            method = inner.__get__(obj)
        with _alone_in_speechbrain():
            return method(*arguments)


def _alone_in_speechbrain() -> contextlib.AbstractContextManager[None]:
    """Have SpeechBrain's collectives do nothing, as inside of its own main-only code."""
    module = sys.modules.get(_SB_DISTRIBUTED)
    depth = getattr(module, "MAIN_PROC_ONLY", None)
    return (
        contextlib.nullcontext() if depth is None else temporarily(module, MAIN_PROC_ONLY=depth + 1)
    )


def _speechbrain_hook(cls: type, role: str) -> MethodHook | None:
    """Return the hook for a method of this very class that SpeechBrain's decorators have marked, or
    None.
    """
    mark = f"_speechbrain_{role}"
    names = [
        name
        for name, value in vars(cls).items()
        if callable(value) and getattr(value, mark, None) is True
    ]
    if not names:
        return None
    name = names[-1]  # SpeechBrain would use the last one
    if role != "saver":
        return MethodHook(name)
    registered = getattr(sys.modules.get(_SB_CHECKPOINTS), "DEFAULT_SAVE_HOOKS", {}).get(cls)
    # unwrapped: for every rank
    return _SpeechBrainSaver(name, save_on_main_only=registered is not vars(cls)[name])


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
        hook = default_hooks.get(cls) or (role and _speechbrain_hook(cls, role))
        if hook:
            return cast("HookT", hook)
    return None
