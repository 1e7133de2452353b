"""Marks that say which methods save and load an object, and the tables of hooks that they fill.

Nothing here needs torch, so a class that is saved in checkpoints need not import what writes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from ddpkit.errors import ConfigError

SaveHook = Callable[[Any, Path], object]
LoadHook = Callable[[Any, Path, bool], object]
TransferHook = Callable[[Any, Path], object]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
ClassT = TypeVar("ClassT", bound=type)

DEFAULT_SAVE_HOOKS: dict[type, SaveHook] = {}
DEFAULT_LOAD_HOOKS: dict[type, LoadHook] = {}
DEFAULT_TRANSFER_HOOKS: dict[type, TransferHook] = {}
HOOKS_OF_ROLE: dict[str, dict[type, Any]] = {
    "saver": DEFAULT_SAVE_HOOKS,
    "loader": DEFAULT_LOAD_HOOKS,
    "transfer": DEFAULT_TRANSFER_HOOKS,
}


def mark_as_saver(method: FunctionT) -> FunctionT:
    """Mark the method that saves an object: it is called with the path to write, ending in ``.ckpt``.

    Args:
        method: takes ``(self, path)``. A subclass that overrides it by name has its own method used.

    Returns:
        The method itself.

    Raises:
        TypeError: it cannot be called with ``(self, path)``.

    Ranks: local.

    Example:
        >>> @mark_as_saver
        ... def _save(self, path):
        ...     path.write_text(str(self.count))
    """
    return _mark(method, "saver", "self", "path")


def mark_as_loader(method: FunctionT) -> FunctionT:
    """Mark the method that loads an object: it is called with the path and whether an epoch had ended.

    Args:
        method: takes ``(self, path, end_of_epoch)``.

    Returns:
        The method itself.

    Raises:
        TypeError: it cannot be called with ``(self, path, end_of_epoch)``.

    Ranks: local.

    Example:
        >>> @mark_as_loader
        ... def _load(self, path, end_of_epoch):
        ...     self.count = int(path.read_text()) + end_of_epoch
    """
    return _mark(method, "loader", "self", "path", "end_of_epoch")


def mark_as_transfer(method: FunctionT) -> FunctionT:
    """Mark the method that takes over pretrained parameters: it is called with the path.

    Args:
        method: takes ``(self, path)``.

    Returns:
        The method itself.

    Raises:
        TypeError: it cannot be called with ``(self, path)``.

    Ranks: local.

    Example:
        >>> @mark_as_transfer
        ... def _transfer(self, path):
        ...     self.count = int(path.read_text())
    """
    return _mark(method, "transfer", "self", "path")


def _mark(method: FunctionT, role: str, *arguments: str) -> FunctionT:
    signature = inspect.signature(method)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name, wanted = getattr(method, "__qualname__", repr(method)), ", ".join(arguments)
        raise TypeError(
            f"{name}{signature} is marked as {role} and must be callable with ({wanted}): {error}."
        ) from error
    setattr(method, f"_ddpkit_{role}", True)
    return method


@dataclass(frozen=True)
class MethodHook:
    """Calls a method by its name, so that an override in a subclass is found.

    Attributes:
        name: of the method.
        save_on_main_only: for a saver: whether it is called on the main process alone.

    Ranks: local.
    """

    name: str
    save_on_main_only: bool = True

    def __call__(self, obj: Any, *arguments: Any) -> object:
        """Call the method of an object."""
        return getattr(obj, self.name)(*arguments)


@overload
def register_checkpoint_hooks(cls: ClassT, save_on_main_only: bool = True) -> ClassT: ...


@overload
def register_checkpoint_hooks(cls: None = None, save_on_main_only: bool = True) -> Callable[[ClassT], ClassT]: ...


def register_checkpoint_hooks(cls: Any = None, save_on_main_only: bool = True) -> Any:
    """Class decorator that makes the marked methods the hooks of the class and of its subclasses.

    Args:
        cls: the class; may be left out when the decorator is given arguments.
        save_on_main_only: with False the saver is called on every rank with the same path and decides itself
            who writes what (for example into a folder made at that path, one file per rank).

    Returns:
        The class itself, or a decorator.

    Raises:
        ConfigError: two methods of the class carry the same mark.

    Ranks: local.

    Example:
        >>> @register_checkpoint_hooks
        ... class Counter:
        ...     count = 0
        ...     @mark_as_saver
        ...     def _save(self, path):
        ...         _ = path.write_text(str(self.count))
        ...     @mark_as_loader
        ...     def _load(self, path, end_of_epoch):
        ...         self.count = int(path.read_text())
        >>> DEFAULT_SAVE_HOOKS[Counter].name
        '_save'
    """
    if cls is None:
        return lambda decorated: register_checkpoint_hooks(decorated, save_on_main_only)
    for role, table in HOOKS_OF_ROLE.items():
        name = _marked_method(cls, role)
        if name is not None:
            table[cls] = MethodHook(name, save_on_main_only)
    return cls


def _marked_method(cls: type, role: str) -> str | None:
    for base in cls.__mro__:
        names = [name for name, value in vars(base).items() if getattr(value, f"_ddpkit_{role}", False)]
        if len(names) > 1:
            raise ConfigError(f"{base.__qualname__} has {len(names)} methods marked as {role}: {names}. Mark one.")
        if names:
            return names[0]
    return None
