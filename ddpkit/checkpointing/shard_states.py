"""Takes apart states of which each rank holds some rows, for a save in shards."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.base import first_row, gather_whole, is_sharded, local_part, map_named
from ddpkit.checkpointing.hooks import saved_state, whole_states
from ddpkit.checkpointing.module_state import ON_META, has_any, is_on_meta
from ddpkit.distributed import get_rank, require_all_ranks
from ddpkit.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, eq=False)
class ShardedState:
    """What a rank has of a state that is divided over the ranks.

    Attributes:
        skeleton: the state, where the divided tensors are on the meta device.
        rows: this rank's rows of the divided tensors, by name; they share memory with the object.
        first_rows: numbers of the first of them.
        gather: returns the state whole on rank 0, collectively, for what is loaded by a hook of its
            own; None: it cannot be gathered.

    Ranks: local.
    """

    skeleton: Any
    rows: dict[str, torch.Tensor]
    first_rows: dict[str, int]
    gather: Callable[[], Any] | None = None


def sharded_states(objects: Mapping[str, Any]) -> dict[str, ShardedState]:
    """Take those states apart whose tensors are divided over the ranks.

    What is divided in another way than by its rows is gathered whole.

    Args:
        objects: by name, as for :func:`~ddpkit.checkpointing.hooks.torch_save`.

    Raises:
        CheckpointError: a state is on the meta device, or two names of it are alike.
        LaunchError: in main-only code, if a state is divided.

    Ranks: collective; the same objects in the same order on all ranks.

    Example:
        >>> from torch import nn
        >>> sharded_states({"net": nn.Linear(1, 1)})
        {}
    """
    found = {}
    for name, obj in objects.items():
        state = saved_state(obj)
        if has_any(state, is_sharded):
            require_all_ranks("save_checkpoint")
            found[name] = _take_apart(name, state, functools.partial(_gathered, obj))
    return found


@dataclass(frozen=True, eq=False)
class GatheredState:
    """What is saved in the place of an object whose state was divided over the ranks.

    Attributes:
        state: whole on rank 0, empty on the others.

    Ranks: local.
    """

    state: Any

    def state_dict(self) -> Any:
        """Return the state."""
        return self.state


def gathered_states(states: Mapping[str, ShardedState]) -> dict[str, GatheredState]:
    """Gather those of some states that can be.

    Args:
        states: taken apart, by name.

    Ranks: collective; the same states in the same order on all ranks.

    Example:
        >>> gathered_states({"net": ShardedState({}, {}, {})})
        {}
    """
    return {
        name: GatheredState(state.gather())
        for name, state in states.items()
        if state.gather is not None
    }


def _gathered(obj: Any) -> Any:
    return whole_states({"": obj})[""]


def _take_apart(
    name: str,
    state: Any,
    gather: Callable[[], Any],
) -> ShardedState:
    if has_any(state, is_on_meta):
        raise CheckpointError(ON_META.format("save"))
    rows: dict[str, torch.Tensor] = {}
    first_rows: dict[str, int] = {}

    def without_values(key: str, value: Any) -> Any:
        if not is_sharded(value):
            return value
        if not _is_divided_by_rows(value):
            return gather_whole(value, keep=not get_rank())
        if key in rows:
            raise CheckpointError(
                f"saving the recoverable {name!r}: two entries of its state are called {key!r}."
            )
        rows[key] = local_part(value)
        first_rows[key] = first_row(value)
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return ShardedState(map_named(state, without_values), rows, first_rows, gather)


def _is_divided_by_rows(tensor: Any) -> bool:
    (placement, *others) = tensor.placements
    return not others and type(placement).__name__ == "Shard" and placement.dim == 0
