"""How large a batch is: lengths to which its samples were padded show in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_DEEPEST = 4  # levels of containers


def first_tensor(batch: Any, depth: int = 0) -> torch.Tensor | None:
    """Return the first tensor of a batch; None where there is none.

    Args:
        batch: a tensor, or tensors in tuples, lists, mappings and objects with attributes.
        depth: of containers around it.

    Example:
        >>> first_tensor({"names": ["a"], "sound": (torch.ones(2, 3), [2, 3])}).shape
        torch.Size([2, 3])
    """
    if isinstance(batch, torch.Tensor):
        return batch
    if depth >= _DEEPEST or isinstance(batch, (str, bytes)):
        return None
    for part in _parts_of(batch):
        found = first_tensor(part, depth + 1)
        if found is not None:
            return found
    return None


def _parts_of(batch: Any) -> list[Any]:
    is_usual = isinstance(batch, (list, tuple))  # to ask an abstract class takes longer
    if not is_usual and isinstance(batch, Mapping):
        return list(batch.values())
    if is_usual or isinstance(batch, Sequence):
        return list(batch[:1]) if _is_alike(batch) else list(batch)
    return list(getattr(batch, "__dict__", {}).values())


def _is_alike(batch: Sequence[Any]) -> bool:
    """Say whether a sequence has one plain value per sample, as names and lengths have."""
    return bool(batch) and isinstance(batch[0], (str, int, float))
