"""What is saved of objects: the marks of their methods, the states of modules without their
wrappers, complete files.

Marks say which methods save and load an object; they fill the tables of hooks.

States are plain containers of tensors, of which each rank may hold a part. Such tensors are torch's
``DTensor``, as ``fully_shard`` makes them of parameters. They are known by what they can do: so a
run without them does not load ``torch.distributed.tensor``. Others are still in the files of a
checkpoint, of which a rank reads what it needs.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

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
_FIXED = frozenset(
    {
        bool,
        int,
        float,
        str,
        bytes,
        type(None),
    }
)  # values that never change


def mark_as_saver(method: FunctionT) -> FunctionT:
    """Mark the method that saves an object: it is called with the path to write, ending in
    ``.ckpt``.

    Args:
        method: takes ``(self, path)``. A subclass that overrides it by name has its own method
            used.

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
    """Mark the method that loads an object: it is called with the path and whether an epoch had
    ended.

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
        name = getattr(method, "__qualname__", repr(method))
        wanted = ", ".join(arguments)
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
def register_checkpoint_hooks(
    cls: None = None,
    save_on_main_only: bool = True,
) -> Callable[[ClassT], ClassT]: ...


def register_checkpoint_hooks(cls: Any = None, save_on_main_only: bool = True) -> Any:
    """Class decorator that makes the marked methods the hooks of the class and of its subclasses.

    Args:
        cls: the class; may be left out when the decorator is given arguments.
        save_on_main_only: with False the saver is called on every rank with the same path and
            decides itself who writes what (for example into a folder made at that path, one file
            per rank).

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
        names = [
            name for name, value in vars(base).items() if getattr(value, f"_ddpkit_{role}", False)
        ]
        if len(names) > 1:
            raise ConfigError(
                f"{base.__qualname__} has {len(names)} methods marked as {role}: {names}. Mark one."
            )
        if names:
            return names[0]
    return None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Return a context for writing a file so that its name stands for the old content or the new,
    never for a part.

    Args:
        path: of the file.

    Yields:
        The path to write to, beside it and with its suffix. At the end it takes the file's place;
        after an error it is removed.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "notes.txt")
        >>> with replacing(path) as unfinished:
        ...     number = unfinished.write_text("all of it")
        >>> path.read_text(), len(list(path.parent.iterdir()))
        ('all of it', 1)
    """
    # torch.save takes no leading dot
    unfinished = path.with_name(f"{path.stem}.{os.getpid()}.unfinished{path.suffix}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------- states


class StoredTensor(abc.ABC):
    """A tensor in the files of a checkpoint: nothing of it is in memory.

    Attributes:
        shape: of the whole.
        dtype: of its elements.

    Ranks: local.
    """

    shape: torch.Size
    dtype: torch.dtype

    @abc.abstractmethod
    def rows(self, first: int, count: int) -> torch.Tensor:
        """Read some rows into new memory.

        Args:
            first: number of the first row.
            count: how many.
        """

    def whole(self) -> torch.Tensor:
        """Read all of it into new memory."""
        return self.rows(0, self.shape[0])


# attribute of an optimizer whose state is divided over the ranks: a function that returns what this
# rank keeps of a state; of what it leaves out nothing need be read
OWN_PART = "ddpkit_own_part"


def map_values(value: Any, function: Callable[[Any], Any]) -> Any:
    """Rebuild plain containers with a function's values in the place of what they hold.

    Args:
        value: plain containers of anything.
        function: called with all that is neither a container nor a number, text or None.

    Ranks: local.

    Example:
        >>> map_values({"a": [torch.ones(1), 3]}, torch.numel)
        {'a': [1, 3]}
    """
    if type(value) in {dict, OrderedDict}:
        rebuilt = type(value)((key, map_values(inner, function)) for key, inner in value.items())
        if type(value) is OrderedDict:
            vars(rebuilt).update(vars(value))  # the versions of a module's state
        return rebuilt
    if type(value) in {list, tuple}:
        if _FIXED.issuperset(map(type, value)):  # long ones of numbers are many
            return type(value)(value)
        return type(value)(map_values(inner, function) for inner in value)
    return value if type(value) in _FIXED else function(value)


def map_named(
    value: Any,
    function: Callable[[str, Any], Any],
    name: str = "",
) -> Any:
    """Rebuild plain containers as :func:`map_values` does; the function is told the names that lead
    to a value, too.

    Args:
        value: plain containers of anything.
        function: called with the names, joined by slashes, and the value.
        name: of the container itself.

    Ranks: local.

    Example:
        >>> map_named({"a": [torch.ones(1), 3]}, lambda name, _: name)
        {'a': ['a/0', 3]}
    """
    begin = f"{name}/" if name else ""
    if type(value) in {dict, OrderedDict}:
        rebuilt = type(value)(
            (key, map_named(inner, function, f"{begin}{key}")) for key, inner in value.items()
        )
        if type(value) is OrderedDict:
            vars(rebuilt).update(vars(value))  # the versions of a module's state
        return rebuilt
    if type(value) in {list, tuple}:
        if _FIXED.issuperset(map(type, value)):
            return type(value)(value)
        return type(value)(
            map_named(inner, function, f"{begin}{number}") for number, inner in enumerate(value)
        )
    return value if type(value) in _FIXED else function(name, value)


def is_sharded(value: Any) -> bool:
    """Say whether a value is a tensor that is divided over the ranks.

    Ranks: local.

    Example:
        >>> is_sharded(torch.ones(2))
        False
    """
    return hasattr(value, "full_tensor") and hasattr(value, "device_mesh")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a sharded tensor, in the same memory; of another tensor, the
    tensor itself.

    Ranks: local.

    Example:
        >>> local_part(torch.ones(2))
        tensor([1., 1.])
    """
    own: Any = tensor.detach()
    return own.to_local() if is_sharded(tensor) else tensor


def first_row(sharded: Any) -> int:
    """Return the number of this rank's first row in the whole of a tensor that is sharded by its
    first dimension; the number of all rows, where it has none.

    Ranks: local.

    Source: the rows of a rank are those of ``torch.chunk``, as in ``Shard(0)`` of torch 2.13.
    """
    rows: int = sharded.shape[0]
    mesh = sharded.device_mesh
    size: int = -(-rows // mesh.size())
    rank: int = mesh.get_local_rank()
    return min(rank * size, rows)


def sharded_like(value: Any, own: Any) -> Any:
    """Divide a whole tensor as another one is divided; what is of another shape, or divided, stays
    as it is.

    Args:
        value: the same on all ranks, such as an entry of a checkpoint. Of a tensor that is still in
            files only this rank's rows are read.
        own: sharded by its first dimension, or not at all.

    Returns:
        A tensor with a copy of this rank's rows, on the device of ``own``; or ``value``, read from
        its files.

    Ranks: local.

    Example:
        >>> sharded_like(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])
    """
    if (
        not is_sharded(own)
        or is_sharded(value)
        or not isinstance(value, (torch.Tensor, StoredTensor))
        or value.shape != own.shape
    ):
        return value.whole() if isinstance(value, StoredTensor) else value
    from torch.distributed.tensor import DTensor  # is loaded: `own` is one

    part = local_part(own)
    start = first_row(own)
    if isinstance(value, StoredTensor):
        rows = value.rows(start, part.shape[0]).to(part.device)
    else:
        rows = value.detach()[start : start + part.shape[0]].to(part.device, copy=True)
    return DTensor.from_local(
        rows,
        own.device_mesh,
        own.placements,
        run_check=False,
        shape=own.shape,
        stride=own.stride(),
    )


def gather_whole(tensor: Any, *, keep: bool) -> torch.Tensor:
    """Gather a sharded tensor.

    Args:
        tensor: sharded; its part may be in host memory while the ranks communicate on GPUs.
        keep: whether this rank wants it.

    Returns:
        The whole tensor on the CPU; empty where it is not kept.

    Ranks: collective, in the same order on all ranks.
    """
    gathered: torch.Tensor = tensor.detach().to(tensor.device_mesh.device_type).full_tensor()
    return gathered.cpu() if keep else gathered.new_empty(0)


# ---------------------------------------------------------------------------------------- wrappers


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """Return a module's direct submodules, past any forwarding of attributes; also those of two
    names.

    Ranks: local.
    """
    children: Mapping[str, nn.Module | None] = vars(module)["_modules"]
    return children


def inner_name(module: nn.Module) -> str | None:
    """Return the name under which a wrapper (DDP, DataParallel, ``torch.compile``) holds its
    module, or None.

    Ranks: local.
    """
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "module"
    return "_orig_mod" if "_orig_mod" in children_of(module) else None


def unwrap(obj: Any) -> Any:
    """Take DDP, DataParallel and ``torch.compile`` off a module; return any other object as it is.

    Ranks: local.

    Example:
        >>> inner = nn.Linear(1, 1)
        >>> unwrap(nn.DataParallel(inner)) is inner
        True
    """
    while isinstance(obj, nn.Module) and (name := inner_name(obj)) is not None:
        obj = children_of(obj)[name]
    return obj
