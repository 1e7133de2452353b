"""Which samples a rank reads in an evaluation: their indices, batch by batch."""

from __future__ import annotations

import copy
import operator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data.distributed import DistributedSampler

from ddpkit.data import StreamShard, nested_samplers
from ddpkit.dataloader import plan_of
from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


class SampleIndices:
    """The indices of the samples of each batch that this rank reads in an evaluation.

    Args:
        loader: this rank's.
        divided: whether the data is divided over the ranks.

    Attributes:
        are_known: whether the indices are those of the whole data. Else they count what this rank
            has read.

    Raises:
        ConfigError: the loader does not yield batches in their order, or repeats samples.

    Ranks: local; ``are_known`` is alike on every rank.

    Example:
        >>> from ddpkit.dataloader import Sharding, shard
        >>> loader = shard(range(5), Sharding(1, 2, keep_step=False), batch_size=2)
        >>> SampleIndices(loader, divided=True).next(2)
        [2, 3]
    """

    def __init__(self, loader: Any, *, divided: bool) -> None:
        require_in_order("predict with output", loader)
        if divided:
            _require_no_repeats(loader)
        plan = plan_of(loader)
        self._loader = loader
        self._read = 0
        self._planned: Iterator[list[Any]] | None = None
        if plan is not None:
            self.are_known = is_number(plan.first_index())
            # of its own: the loader's is iterated ahead, by its workers
            self._planned = iter(copy.copy(plan)) if self.are_known else None
        else:
            self.are_known = not divided or stream_places(loader, 0, 0) is not None

    def next(self, count: int) -> list[int]:
        """Return the indices of the samples of the next batch.

        Args:
            count: of its samples.
        """
        start = self._read
        self._read += count
        if self._planned is not None:
            return [operator.index(index) for index in next(self._planned)]
        places = stream_places(self._loader, start, count) if self.are_known else None
        if places is not None:
            found: list[int] = places.tolist()
            return found
        return list(range(start, start + count))


def is_number(index: Any) -> bool:
    """Return whether what a sampler yields is the number of a sample, and no name."""
    try:
        operator.index(index)
    except TypeError:
        return False
    return True


def _require_no_repeats(loader: Any) -> None:
    if any(isinstance(sampler, DistributedSampler) for sampler in nested_samplers(loader)):
        raise ConfigError(
            "predict with output cannot know which outputs count once: the loader is divided by a "
            "DistributedSampler, which repeats samples. Give the dataset itself."
        )


def require_in_order(call: str, loader: Any) -> None:
    """Refuse a loader whose workers hand out batches as they are ready.

    Args:
        call: that needs to know the order, for the message.
        loader: any.

    Raises:
        ConfigError: ``in_order=False`` with several workers.
    """
    is_in_order = getattr(loader, "in_order", True) is not False
    if is_in_order or getattr(loader, "num_workers", 0) <= 1:
        return
    raise ConfigError(
        f"{call} cannot know which samples the batches held: the loader was made with "
        "in_order=False. Leave it out."
    )


def stream_places(loader: Any, start: int, count: int) -> NDArray[np.int64] | None:
    """Return where in the whole stream some items of a rank stand, if it is dealt out by counting.

    Args:
        loader: this rank's.
        start: number of the first, among the items of this rank.
        count: of the items.

    Returns:
        Their positions; None where the loader cannot tell.
    """
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, StreamShard) or dataset.of_batches or dataset.divides_itself:
        return None
    division = dataset.division
    if division.each > 1:  # which items a block's shards have depends on how full the last one is
        return None
    (shard,) = division.mine
    own = len(range(shard, dataset.block_size, division.number))
    blocks, places = np.divmod(np.arange(start, start + count), own)
    whole: NDArray[np.int64] = blocks * dataset.block_size + places * division.number + shard
    return whole
