"""Attributes of objects, put back after code has run that is not to leave anything behind."""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CONTAINERS = frozenset(
    {
        list,
        dict,
        set,
        collections.deque,
        collections.Counter,
        collections.OrderedDict,
        collections.defaultdict,
    }
)
MOST_INSIDE = 100  # entries of a container, in which containers are kept, too


@contextlib.contextmanager
def kept_attributes(owners: Iterable[Any]) -> Iterator[None]:
    """Return a context after which the attributes of some objects are what they were.

    Numbers, texts and all that is assigned anew are put back; so are the contents of lists, dicts,
    sets and deques, of tensors and arrays, and the states of random generators, among the
    attributes and in a small container among them. What another object has inside stays as it is.

    Args:
        owners: objects with a ``__dict__``.

    Ranks: local.

    Example:
        >>> from types import SimpleNamespace
        >>> recipe = SimpleNamespace(seen=1, losses=[0.5], by_name={"a": [1]})
        >>> with kept_attributes([recipe]):
        ...     recipe.seen += 1
        ...     recipe.losses.append(0.25)
        ...     recipe.by_name["a"].append(2)
        ...     recipe.new = True
        >>> recipe
        namespace(seen=1, losses=[0.5], by_name={'a': [1]})
    """
    undo = [_kept(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def _kept(contents: dict[str, Any]) -> Callable[[], None]:
    """Return what gives a dict of attributes its contents again, and those their own."""
    before = dict(contents)
    # nearly all that a module has, such as the dicts of its hooks: quick to keep
    empty = [value for value in before.values() if type(value) in CONTAINERS and not value]
    filled = [value for value in before.values() if type(value) not in CONTAINERS or value]
    inside = [undo for value in filled if (undo := _undo_of(value, is_outer=True)) is not None]

    def put_back() -> None:
        for name in contents.keys() - before.keys():
            del contents[name]
        for name, value in before.items():
            if contents.get(name, put_back) is not value:  # never put_back: it may be gone
                contents[name] = value
        for container in filter(None, empty):
            container.clear()
        for undo in inside:
            undo()

    return put_back


def _undo_of(value: Any, *, is_outer: bool = False) -> Callable[[], object] | None:
    """Return what gives a value its present contents again; None where nothing is known of it."""
    kind = type(value)
    if kind in CONTAINERS:
        return _undo_container(value, is_outer=is_outer)
    if kind is torch.Tensor:
        return _undo_tensor(value)
    if kind is np.ndarray and value.flags.writeable:
        return functools.partial(np.copyto, value, value.copy())
    if kind is torch.Generator:
        return functools.partial(value.set_state, value.get_state())
    if kind is random.Random:
        return functools.partial(value.setstate, value.getstate())
    if kind is np.random.Generator:
        bits = value.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return None


def _undo_container(value: Any, *, is_outer: bool) -> Callable[[], None]:
    before = value.copy()
    entries = [*before.values()] if isinstance(before, dict) else [*before]
    inside: list[Callable[[], object] | None] = []
    if is_outer and len(entries) <= MOST_INSIDE:
        inside = [_undo_of(entry) for entry in entries]

    def put_back() -> None:
        # left alone where nothing has changed: another thread may be reading it
        if not _is_same(value, before):
            _fill(value, before)
        for undo in inside:
            if undo is not None:
                undo()

    return put_back


def _is_same(value: Any, before: Any) -> bool:
    """Say whether a container has the very objects that it had, in the same order."""
    if isinstance(value, set):
        return bool(value == before)
    now = [*value.items()] if isinstance(value, dict) else [*value]
    then = [*before.items()] if isinstance(before, dict) else [*before]
    if len(now) != len(then):
        return False
    if isinstance(value, dict):
        pairs = zip(now, then, strict=True)
        return all(one[0] is other[0] and one[1] is other[1] for one, other in pairs)
    return all(map(operator.is_, now, then))


def _fill(value: Any, before: Any) -> None:
    if isinstance(value, list):
        value[:] = before
        return
    value.clear()
    if isinstance(value, collections.deque):
        value.extend(before)
    else:
        value.update(before)


def _undo_tensor(value: torch.Tensor) -> Callable[[], None] | None:
    if value.is_inference() or value.is_meta or value.layout is not torch.strided:
        return None
    before = value.detach().clone()
    # tells of changes in place, without a comparison for which a GPU would be waited for
    version = getattr(value, "_version", 0)

    def put_back() -> None:
        if getattr(value, "_version", 0) != version:
            with torch.no_grad():
                value.copy_(before)

    return put_back
