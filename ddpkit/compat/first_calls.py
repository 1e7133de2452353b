"""Tells when a module is called, without a change to what is compiled of it.

A hook on a compiled module is a part of what is compiled: torch may compile the module anew for it,
or not call it. What the call of a module that was compiled in place goes through is an attribute of
the module, which is private to torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_COMPILED = "_compiled_call_impl"


class CallNotice:
    """Has a function called before each call of a module, until it is removed.

    Otherwise, where torch has no such attribute, by a hook that torch offers.

    Args:
        module: compiled or not.
        note: takes nothing.

    Example:
        >>> import torch
        >>> layer, calls = torch.nn.Linear(1, 1), []
        >>> notice = CallNotice(layer, lambda: calls.append("called"))
        >>> _ = layer(torch.ones(1, 1)); notice.remove(); _ = layer(torch.ones(1, 1)); calls
        ['called']
    """

    def __init__(self, module: torch.nn.Module, note: Callable[[], object]) -> None:
        self._module = module
        self._compiled: Any = getattr(module, _COMPILED, None)
        self._handle: Any = None
        if self._compiled is None:
            self._handle = module.register_forward_pre_hook(_Hook(note), prepend=True)
        else:
            self._stand_in = _StandIn(self._compiled, note)
            vars(module)[_COMPILED] = self._stand_in

    def remove(self) -> None:
        """Stop; the module is as it was."""
        if self._handle is not None:
            self._handle.remove()
        elif vars(self._module).get(_COMPILED) is self._stand_in:
            vars(self._module)[_COMPILED] = self._compiled


class _Hook:
    """Calls a function. A copy of the module, or one that is saved, has a hook that does
    nothing.
    """

    def __init__(self, note: Callable[[], object]) -> None:
        self._note = note

    def __call__(self, *_: Any) -> None:
        self._note()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


class _StandIn:
    """Calls a function, then what is compiled."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        note: Callable[[], object],
    ) -> None:
        self._compiled = compiled
        self._note = note

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        self._note()
        return self._compiled(*inputs, **kwargs)


def _nothing() -> None:
    """Do nothing."""
