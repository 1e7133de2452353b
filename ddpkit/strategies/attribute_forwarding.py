"""A wrapper of a module through which the module's attributes are reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator


class AttributeForwarding(nn.Module):
    """Makes the attributes of the wrapped ``module`` reachable through its wrapper, for reading and
    for writing.

    What the wrapper has itself, or got while it was made, is its own; all else is the module's. A
    base class, beside torch's own wrapper.
    """

    _is_made = False

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if value.__class__ is bool and name in own:
            own[name] = (
                value  # DDP writes one in every forward pass; torch's own way takes a microsecond
            )
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
