"""The plan inside a loader, by which its batches are divided over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddpkit.data.dealt_batches import DealtBatchSampler
from ddpkit.data.planned_batches import PlannedBatchSampler

if TYPE_CHECKING:
    from collections.abc import Iterator


def plan_of(loader: Any) -> PlannedBatchSampler | DealtBatchSampler | None:
    """Return ddpkit's batch sampler of a loader, which divides its batches over the ranks; None if
    it has none.

    Ranks: local.

    Example:
        >>> from ddpkit.dataloader import Sharding, shard
        >>> plan_of(shard(range(5), Sharding(), batch_size=2)).count(2), plan_of([1, 2])
        (1, None)
    """
    return plan_in(getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None))


def plan_in(batch_sampler: Any, sampler: Any) -> PlannedBatchSampler | DealtBatchSampler | None:
    """Return ddpkit's batch sampler among what a loader is given, or None."""
    source = sampler.planned if isinstance(sampler, SingleIndices) else batch_sampler
    return source if isinstance(source, (PlannedBatchSampler, DealtBatchSampler)) else None


class SingleIndices(torch.utils.data.Sampler[int]):
    """Turns batches of one index into indices, for datasets that give whole batches."""

    def __init__(self, planned: PlannedBatchSampler) -> None:
        self.planned = planned

    def set_epoch(self, epoch: int) -> None:
        """Tell the batch sampler which epoch comes."""
        self.planned.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.planned)

    def __iter__(self) -> Iterator[int]:
        return (indices[0] for indices in self.planned)
