"""Methods that SpeechBrain's decorators have marked as savers, loaders and transfer hooks.

A recipe that has moved to ddpkit keeps modules of SpeechBrain, whose state its own Checkpointer
finds by these marks. What the decorators leave behind is read where it is loaded already; nothing
of SpeechBrain is imported. A class without marks, or marks of another kind, has no hook here: it is
then saved by ``state_dict``, or by a hook that is registered for it, which are the public ways.

Source: ``mark_as_saver``, ``mark_as_loader``, ``mark_as_transfer`` and the hooks in
``speechbrain.utils.checkpoints``; ``main_process_only`` and ``MAIN_PROC_ONLY`` in
``speechbrain.utils.distributed``, SpeechBrain 1.0 and 1.1.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from ddpkit.base import MethodHook, temporarily

_SB_DISTRIBUTED = "speechbrain.utils.distributed"
_SB_CHECKPOINTS = "speechbrain.utils.checkpoints"


def speechbrain_hook(cls: type, role: str) -> MethodHook | None:
    """Return the hook for a method of this very class that SpeechBrain's decorators have marked, or
    None.

    Args:
        cls: a class.
        role: ``"saver"``, ``"loader"`` or ``"transfer"``.

    Ranks: local.

    Example:
        >>> speechbrain_hook(dict, "saver") is None
        True
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
