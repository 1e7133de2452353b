"""Streams divided over virtual ranks: a process reads several shards of each batch, one after another.

What a shard has does not depend on the number of processes or of loader workers. A stream with a method
``shard(num_shards, index)`` that makes enough shards is divided by the virtual ranks alone, whatever the workers; any
other is read whole and dealt out in blocks, as :class:`~ddpkit.data.streams.StreamShard` deals it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert, get_worker_info

from ddpkit.compat import shuffle_digest
from ddpkit.control import start_loading
from ddpkit.data.permutation import mix_key
from ddpkit.data.streams import StreamShard, guess_batch_size, is_sharded
from ddpkit.errors import ConfigError
from ddpkit.sampler import SamplingPlan, part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpkit.data.sharded_loader import Sharding

_WORKERS = 0x5A4D  # what random numbers are for


class ShardStream(IterableDataset[Any]):
    """This process's shards of a stream, block by block.

    Args:
        whole: the stream, or a loader of batches.
        sharding: which shards.
        block_size: items of a block, which are divided over all shards.
        options: ``of_batches``, ``drop_last``, ``seed`` and ``num_workers`` of a :class:`StreamShard`.

    Attributes:
        divides_itself: whether the stream's own ``shard`` makes the shards.

    Ranks: local.

    Example:
        >>> from ddpkit.data import Sharding
        >>> list(ShardStream(range(7), Sharding(0, 1, virtual_ranks=2), 4))
        [(0, {0: [0, 2], 1: [1, 3]}), (1, {0: [4, 6], 1: [5]})]
    """

    def __init__(self, whole: Any, sharding: Sharding, block_size: int, **options: Any) -> None:
        number = sharding.shards * sharding.world_size
        self.whole, self.block_size, self.number = whole, block_size, number
        self.mine = range(sharding.rank * sharding.shards, (sharding.rank + 1) * sharding.shards)
        parts = [StreamShard(whole, shard, number, block_size, **options) for shard in self.mine]
        self.divides_itself = parts[0].divides_itself
        self.parts = parts if self.divides_itself else [StreamShard(whole, 0, 1, block_size, **options)]
        self.drop_last, self.of_batches = parts[0].drop_last, parts[0].of_batches

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes."""
        for one in self.parts:
            one.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[int, dict[int, list[Any]]]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return self._own_shards(worker, workers) if self.divides_itself else self._dealt(worker, workers)

    def _own_shards(self, worker: int, workers: int) -> Iterator[tuple[int, dict[int, list[Any]]]]:
        """Yield block by block what this worker's shards have: one item of the loader per shard, and per worker."""
        places = range(worker, len(self.parts), workers)
        readers = {place: self.parts[place].read(0, 1) for place in places}
        for block in itertools.count():
            own = {place: list(itertools.islice(readers[place], self._size(place))) for place in places}
            if not any(own.values()):
                return
            yield from ((block, {place: items}) for place, items in own.items())

    def _dealt(self, worker: int, workers: int) -> Iterator[tuple[int, dict[int, list[Any]]]]:
        items = self.parts[0].read(worker, workers)
        for block in itertools.count(worker, workers):
            rows = list(itertools.islice(items, self.block_size))
            if not rows:
                return
            own = {place: rows[shard :: self.number] for place, shard in enumerate(self.mine)}
            yield block, own if any(own.values()) else {-1: rows[-1:]}  # something to work on, that counts nothing

    def _size(self, place: int) -> int:
        start, stop = part(self.block_size, self.number, self.mine[place])
        return stop - start


class ShardStreamLoader:
    """Yields this process's shards of a stream, as many for each block.

    A shard without an item in a block is given another one's batch, which counts nothing.

    Args:
        dataset: the shards.
        batch_size: items of a shard; None where the stream makes the batches.
        options: for torch's ``DataLoader``.

    Attributes:
        position: None: after a restart the stream is read again from the beginning of the epoch.

    Ranks: local.

    Example:
        >>> from ddpkit.data import Sharding
        >>> loader = ShardStreamLoader(ShardStream(range(5), Sharding(0, 1, virtual_ranks=2), 4), 2)
        >>> [(batch.tolist(), loader.size_of(batch)) for batch in loader]
        [([0, 2], 2), ([1, 3], 2), ([4], 1), ([4], 0)]
    """

    position = None

    def __init__(self, dataset: ShardStream, batch_size: int | None, **options: Any) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        collate = options.pop("collate_fn", None) or (default_convert if batch_size is None else default_collate)
        self._generator = torch.Generator()
        self._loader: Any = DataLoader(
            dataset,
            batch_size=None,
            collate_fn=cast("Any", _CollatedShards(collate, makes_batches=batch_size is not None)),
            **{**options, "generator": self._generator},
        )
        self._size = 0
        self.set_epoch(1)

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes."""
        self.dataset.set_epoch(epoch)
        self._generator.manual_seed(mix_key(self.dataset.parts[0].seed, epoch, _WORKERS) >> 1)

    def size_of(self, batch: Any) -> int:
        """Return the number of items of the batch that was yielded last; 0 of another shard's."""
        return self._size

    def drawn_words(self) -> dict[str, str]:
        """Describe how the stream shuffles, for a comparison with the other ranks."""
        digest = shuffle_digest(self.dataset.whole)
        name = f"shuffle of {type(self.dataset.whole).__name__} (without a seed each process shuffles differently)"
        return {name: digest} if digest else {}

    def __iter__(self) -> Iterator[Any]:
        last: Any = None
        for _, group in itertools.groupby(start_loading(self._loader), key=lambda item: item[0]):
            found: dict[int, tuple[int, Any]] = {}
            for _, shards in group:
                found |= shards
            for place in range(len(self.dataset.mine)):
                self._size, last = found.get(place, (0, next(iter(found.values()))[1] if last is None else last))
                yield last


class _CollatedShards:
    """Collates what the shards have of a block; one without an item is left out, but for a process without any."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, makes_batches: bool) -> None:
        self.collate_fn, self.makes_batches = collate_fn, makes_batches

    def __call__(self, given: tuple[int, dict[int, list[Any]]]) -> tuple[int, dict[int, tuple[int, Any]]]:
        block, shards = given
        return block, {place: self._collated(items) for place, items in shards.items() if items}

    def _collated(self, items: list[Any]) -> tuple[int, Any]:
        batch = self.collate_fn(items if self.makes_batches else items[0])
        return (len(items) if self.makes_batches else guess_batch_size(batch)), batch


def shard_stream_loader(
    dataset: Any,
    sharding: Sharding,
    options: dict[str, Any],
    block_size: int | None = None,
    *,
    of_batches: bool = False,
) -> ShardStreamLoader:
    """Make the loader that gives one process its shards of a stream, in training.

    Args:
        dataset: the whole stream, or a loader of batches.
        sharding: which shards.
        options: as for ``torch.utils.data.DataLoader``; used up.
        block_size: items that are divided over all shards; by default ``batch_size`` for each.
        of_batches: whether it is a loader of batches.

    Raises:
        ConfigError: the stream divides itself over the processes, or ``shuffle``; or a bad batch size.

    Ranks: local.
    """
    name, number = type(dataset).__name__, sharding.shards * sharding.world_size
    if is_sharded(dataset):
        raise ConfigError(
            f"virtual_ranks={number}: {name} divides itself over the processes, so that the bits would depend on their "
            "number. Give a stream that does not, best one with a method shard(num_shards, index)."
        )
    if options.pop("shuffle", False):
        raise ConfigError(f"shuffle=True cannot be done for {name}, a stream. Shuffle inside the dataset.")
    size, workers = None if of_batches else options.pop("batch_size", 1), options.pop("num_workers", 0) or 0
    if size is not None:
        plan = SamplingPlan(1, size, number) if block_size is None else SamplingPlan(1, 1, number, False, block_size)
        size, block_size = plan.batch_size, plan.global_batch_size
    own = {"drop_last": bool(options.pop("drop_last", False)), "seed": sharding.seed, "of_batches": of_batches}
    stream = ShardStream(dataset, sharding, block_size or number, num_workers=min(workers, 1), **own)
    if stream.divides_itself:  # each worker reads shards of its own
        workers = max((one for one in range(1, workers + 1) if not sharding.shards % one), default=0)
    return ShardStreamLoader(stream, size, num_workers=workers, **options)
