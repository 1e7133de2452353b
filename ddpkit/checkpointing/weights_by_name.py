"""Loads into a module the weights that a state has under the same names. Everything that does not
fit is reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from ddpkit.base import StoredTensor, unwrap
from ddpkit.checkpointing.base_weights import base_of, other_base, without_base
from ddpkit.checkpointing.module_state import state_for_module
from ddpkit.checkpointing.state_names import plain_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

MISSING = "missing"
UNEXPECTED = "unexpected"
OTHER_SHAPE = "other shape"
OTHER_BASE = "other base"


@dataclass(frozen=True)
class Misfits:
    """What of a state and a module does not fit, with shapes in words.

    Attributes:
        missing: entries of the module that the state does not have, with their shapes.
        unexpected: entries of the state that the module does not have, with their shapes.
        reshaped: entries of two shapes: in the state, and in the module.
        based: base weights that the module has with other values, and what is so.

    Ranks: local.

    Example:
        >>> Misfits({"bias": "(3)"}).lines()
        ['missing      bias (3)']
    """

    missing: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    reshaped: dict[str, tuple[str, str]] = field(default_factory=dict)
    based: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """Count the entries."""
        return len(self.names())

    def names(self) -> list[str]:
        """Return the names of the entries."""
        return [*self.missing, *self.unexpected, *self.reshaped, *self.based]

    def lines(self, limit: int | None = None) -> list[str]:
        """Return a line for each entry, or for so many of each kind.

        Args:
            limit: lines of each kind; None: all.
        """
        kinds = (
            (MISSING, [f"{name} {shape}" for name, shape in self.missing.items()]),
            (UNEXPECTED, [f"{name} {shape}" for name, shape in self.unexpected.items()]),
            (
                OTHER_SHAPE,
                [
                    f"{name} {there} in the file, {here} in the module"
                    for name, (there, here) in self.reshaped.items()
                ],
            ),
            (OTHER_BASE, [f"{name}: {words}" for name, words in self.based.items()]),
        )
        return [line for kind, rows in kinds for line in _shortened(kind, rows, limit)]

    def renamed(self, rename: Callable[[str], str]) -> Misfits:
        """Return them with other names."""
        return Misfits(
            {rename(name): shape for name, shape in self.missing.items()},
            {rename(name): shape for name, shape in self.unexpected.items()},
            {rename(name): shapes for name, shapes in self.reshaped.items()},
            {rename(name): words for name, words in self.based.items()},
        )

    def without(self, is_left_out: Callable[[str], bool]) -> Misfits:
        """Return those whose names do not pass a test."""
        return Misfits(
            {name: shape for name, shape in self.missing.items() if not is_left_out(name)},
            {name: shape for name, shape in self.unexpected.items() if not is_left_out(name)},
            {name: shapes for name, shapes in self.reshaped.items() if not is_left_out(name)},
            {name: words for name, words in self.based.items() if not is_left_out(name)},
        )

    def __or__(self, other: Misfits) -> Misfits:
        """Return those of both."""
        return Misfits(
            self.missing | other.missing,
            self.unexpected | other.unexpected,
            self.reshaped | other.reshaped,
            self.based | other.based,
        )


def _shortened(kind: str, rows: list[str], limit: int | None) -> Iterator[str]:
    shown = rows if limit is None or len(rows) <= limit + 1 else rows[:limit]
    for row in shown:
        yield f"{kind:<12} {row}"
    if len(shown) < len(rows):
        yield f"{kind:<12} ... and {len(rows) - len(shown)} more"


def load_by_name(module: nn.Module, state: Mapping[str, Any]) -> Misfits:
    """Load what a state and a module both have, by name and of one shape.

    An entry that shares its tensor with another one that is loaded is not missing: files of
    safetensors have one of the two. Nor is a base weight that the state names and does not hold;
    the module's is compared with it.

    Args:
        module: wrapped or not; its tensors may be divided over the ranks.
        state: of a module.

    Returns:
        What does not fit, with the names that the module has without wrappers.

    Raises:
        CheckpointError: what was given is no state.
        ValueError: the module is on the meta device.

    Ranks: local; all, if the state leaves out base weights that are divided over the ranks.

    Example:
        >>> load_by_name(torch.nn.Linear(2, 1), {"weight": torch.ones(1, 2), "old": torch.ones(3)})
        Misfits(missing={'bias': '(1)'}, unexpected={'old': '(3)'}, reshaped={}, based={})
    """
    found = load_without_base(module, state)
    base = base_of(state)
    return found | Misfits(based=other_base(module, base)) if base else found


def load_without_base(module: nn.Module, state: Mapping[str, Any]) -> Misfits:
    """Load as :func:`load_by_name` does; the caller compares the base, if the state names one.

    Ranks: local.
    """
    inner = unwrap(module)
    own = inner.state_dict(keep_vars=True)
    base = base_of(state)
    given = state_for_module(inner, without_base(state) if base else state)
    reshaped = {
        name: (shape_text(given[name]), shape_text(value))
        for name, value in own.items()
        if name in given and not _is_alike(given[name], value)
    }
    for name in reshaped:
        del given[name]
    keys = inner.load_state_dict(given, strict=False)
    loaded = {id(value) for name, value in own.items() if name in given}
    missing = {
        name: shape_text(own.get(name))
        for name in keys.missing_keys
        if name not in reshaped
        and id(own.get(name)) not in loaded
        and plain_key(inner, name) not in base
    }
    unexpected = {name: shape_text(given[name]) for name in keys.unexpected_keys}
    return Misfits(missing, unexpected, reshaped).renamed(lambda name: plain_key(inner, name))


def nothing_fits(module: nn.Module) -> Misfits:
    """Return what is missing where there is no state for a module: all."""
    inner = unwrap(module)
    own = inner.state_dict()
    return Misfits({plain_key(inner, name): shape_text(value) for name, value in own.items()})


def _is_alike(given: Any, own: Any) -> bool:
    """Say whether torch would copy one entry into the other."""
    if not (isinstance(given, torch.Tensor) and isinstance(own, torch.Tensor)) or is_lazy(own):
        return True
    # as torch, which takes the number of what an old version has saved in a row
    return given.shape == own.shape or (own.shape == () and given.shape == (1,))


def shape_text(value: Any) -> str:
    """Return the shape of a tensor in words; nothing for anything else."""
    is_tensor = isinstance(value, torch.Tensor) and not is_lazy(value)
    if not (is_tensor or isinstance(value, StoredTensor)):
        return ""
    return f"({', '.join(map(str, value.shape))})"
