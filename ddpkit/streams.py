"""Iterable datasets, divided over the ranks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ddpkit.errors import ConfigError
from ddpkit.sampler import SamplingPlan

if TYPE_CHECKING:
    from collections.abc import Iterator


class StreamShard(IterableDataset[Any]):
    """One rank's part of an iterable dataset: through its own ``shard(num_shards, index)``, or every n-th item.

    Args:
        dataset: the whole stream; every rank must be able to read it in the same order.
        rank: this rank.
        world_size: number of ranks.

    Ranks: local.

    Example:
        >>> list(StreamShard(range(5), 1, 2))
        [1, 3]
    """

    def __init__(self, dataset: Any, rank: int, world_size: int) -> None:
        self.dataset = dataset
        self.rank, self.world_size = rank, world_size

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes, if it wants to know."""
        setter = getattr(self.dataset, "set_epoch", None)
        if setter is not None:
            setter(epoch)

    def __iter__(self) -> Iterator[Any]:
        divide = getattr(self.dataset, "shard", None)
        if divide is not None:
            return iter(divide(self.world_size, self.rank))
        return itertools.islice(iter(self.dataset), self.rank, None, self.world_size)


def stream_loader(dataset: Any, rank: int, world_size: int, options: dict[str, Any]) -> DataLoader[Any]:
    """Make the loader that gives one process its part of an iterable dataset.

    Args:
        dataset: the whole stream.
        rank: this rank.
        world_size: number of ranks that divide the stream.
        options: as for ``torch.utils.data.DataLoader``; used up.

    Raises:
        ConfigError: ``shuffle``, or a bad batch size.

    Ranks: local.

    Example:
        >>> from torch.utils.data import IterableDataset
        >>> class Numbers(IterableDataset):
        ...     def __iter__(self):
        ...         return iter(range(5))
        >>> [batch.tolist() for batch in stream_loader(Numbers(), 1, 2, {"batch_size": 2})]
        [[1, 3]]
    """
    if options.pop("shuffle", False):
        raise ConfigError(
            f"shuffle=True cannot be done for {type(dataset).__name__}, an IterableDataset: it has no length and no "
            "positions. Shuffle inside the dataset."
        )
    if options.get("batch_size", 1) is not None:
        SamplingPlan(num_samples=1, batch_size=options.get("batch_size", 1))  # refuses a bad size
    if isinstance(dataset, StreamShard):  # of a loader that was made for one rank: divide the whole, not the part
        dataset = dataset.dataset
    if world_size > 1:
        dataset = StreamShard(dataset, rank, world_size)
    if options.get("generator") is None:
        options["generator"] = torch.Generator()
    return DataLoader(dataset, **options)
