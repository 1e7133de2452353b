"""The part of a stream that one process reads.

A stream has no random access: it is read from its beginning. So every process that reads it (each
rank, and each worker of its loader) either reads a shard that the stream itself cuts off, or reads
the whole stream and keeps its own items. The second works only if all processes read the same items
in the same order. Therefore a stream is read with its own random numbers, which follow from seed
and epoch, and without access to the worker's number.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ddpkit.control import start_loading
from ddpkit.data.plan import part
from ddpkit.data.sample_comparison import MOST_ITEMS, summarize
from ddpkit.data.stream_position import READ, Reading, Source, one_by_one, tell_epoch
from ddpkit.seed import mix_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpkit.data.sample_comparison import FirstItems, Summary
    from ddpkit.data.sharding import Sharding


_BATCHES = 0xBA7C
_SHARDS = 0x5A4D


class Block(NamedTuple):
    """What a process is given of a block of a stream.

    Attributes:
        items: of each of its shards that has any; under ``-1`` an item of another process, only to
            keep step.
        key: what the randomness of collating is keyed on, with the shard; None: it draws from the
            process's streams.
        first: epoch, block, and summaries of the first items of the undivided stream, sent along
            with its first block.
    """

    items: dict[int, Any]
    key: int | None = None
    first: FirstItems | None = None


class StreamShard(IterableDataset[Any], Source):
    """One rank's part of an iterable dataset, which its loader's workers divide further: every item
    is read once.

    It is read block by block: block ``n`` is the items ``[n * block_size, (n + 1) * block_size)``,
    and is divided over the shards of all ranks.

    A stream with a method ``shard(num_shards, index)`` and enough ``num_shards`` divides itself.
    Any other is dealt out: it is worker ``n % num_workers`` that reads block ``n``, so that the
    loader's ``n``-th batch comes from it; and shard ``k`` of ``K`` takes the items of it at ``k``,
    ``k + K`` and so on. So the blocks, which are the global batches, do not depend on ranks or
    workers, and the last one is divided to within one item. In training a rank without an item of
    it is given the last item again, which counts nothing: so its gradient is of what the others
    work on.

    While the stream is read, ``torch.utils.data.get_worker_info()`` returns None, so that a stream
    that shards by worker does not divide itself again. A stream that ddpkit divides draws its
    random numbers (Python's, numpy's and torch's on the CPU) from generators seeded by seed and
    epoch; the state of the process's generators is restored. The stream is read ahead, by a block:
    it must not overwrite an item or a batch that it has yielded.

    Args:
        dataset: the whole stream; all processes must be able to read it in the same order.
        sharding: which part.
        block_size: items of a global batch; one for each shard if None.
        drop_last: leave out an incomplete last batch; where ddpkit divides the stream item by item,
            on all ranks.
        num_workers: of the loader.
        of_batches: ``dataset`` is a loader of one's own, whose items are batches; it never divides
            itself.

    Attributes:
        whole: the user's own stream or loader.
        parts: into how many the ranks and their workers divide it.
        divides_itself: whether the stream's own ``shard`` divides it over the ranks and their
            workers.
        keep_step: whether a rank without an item of the last block is given one that counts
            nothing.
        shows_first: whether the first thing that is read comes with a summary of the undivided
            stream's first items.

    Ranks: local; all ranks must give the same arguments but ``sharding.rank``.

    Example:
        >>> from ddpkit.dataloader import Sharding
        >>> [block.items for block in StreamShard(range(5), Sharding(1, 2))]
        [{1: [1]}, {1: [3]}]
        >>> [
        ...     [block.items[rank] for block in StreamShard(range(7), Sharding(rank, 2), 4)]
        ...     for rank in range(2)
        ... ]
        [[[0, 2], [4, 6]], [[1, 3], [5]]]
        >>> [
        ...     block.items
        ...     for block in StreamShard(
        ...         range(7), Sharding(0, 1, virtual_ranks=2), 4, drop_last=True
        ...     )
        ... ]
        [{0: [0, 2], 1: [1, 3]}]
    """

    def __init__(
        self,
        dataset: Any,
        sharding: Sharding,
        block_size: int | None = None,
        *,
        drop_last: bool = False,
        num_workers: int = 0,
        of_batches: bool = False,
    ) -> None:
        Source.__init__(self, dataset)
        self.division = division = sharding.division_of_stream
        self.seed = sharding.seed
        self.mine = division.mine
        self.number = division.number
        self.block_size = block_size or self.number
        self.drop_last = drop_last
        self.of_batches = of_batches
        self.keep_step = self.shows_first = False
        self.epoch = torch.zeros((), dtype=torch.int64)
        # workers that outlive an epoch have a copy of this object, and must learn which epoch comes
        if num_workers:
            self.epoch.share_memory_()  # type: ignore[no-untyped-call]
        self.parts = self.number * (1 if division.is_fixed else max(num_workers, 1))
        self.divides_itself = not of_batches and _has_shards(dataset, self.parts)

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes, if it wants to know; also the copies that running
        workers have.
        """
        self.epoch.fill_(epoch)
        tell_epoch(self.whole, epoch)

    def __iter__(self) -> Iterator[Block]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        # the copy of a worker that outlives an epoch has heard of the first one alone
        if info is not None:
            tell_epoch(self.whole, int(self.epoch))
        if self.divides_itself:
            own = {
                shard: self._own_shard(shard * workers + worker, self.number * workers)
                for shard in self.mine
            }
            return self._own_blocks(own)
        # wherever the whole is read
        alike = mix_key(
            self.seed,
            int(self.epoch),
            _BATCHES if self.of_batches else READ,
        )
        return self._dealt(worker, workers, Reading(alike))

    def _own_blocks(self, own: dict[int, Iterator[Any]]) -> Iterator[Block]:
        """Yield a batch of each shard that the stream has made, until all are used up."""
        sizes = {shard: len(range(*part(self.block_size, self.number, shard))) for shard in own}
        least = sizes if self.drop_last else dict.fromkeys(sizes, 1)
        for block in itertools.count():
            read = {
                shard: list(itertools.islice(items, sizes[shard])) for shard, items in own.items()
            }
            kept = {shard: items for shard, items in read.items() if len(items) >= least[shard]}
            if not kept:
                return
            yield Block(kept, self._key(block))

    def _own_shard(self, index: int, number: int) -> Iterator[Any]:
        epoch = int(self.epoch)
        reading = Reading(mix_key(self.seed, epoch, READ, index))
        with reading:
            shard = self.whole.shard(number, index)
            tell_epoch(shard, epoch)  # it need not have taken that over
        self._open(shard, reading)
        with reading:
            items = iter(shard)
        yield from reading.each(items)

    def _dealt(
        self,
        worker: int,
        workers: int,
        reading: Reading,
    ) -> Iterator[Block]:
        state = self._open(self.whole, reading)
        begin = int(state.get("block", 0))
        with reading:
            items = one_by_one(start_loading(self.whole) if self.of_batches else iter(self.whole))
        for block in itertools.count(begin):
            self._block = block
            # whole blocks: a batch of the loader is made of what one worker yields
            is_mine = block % workers == worker
            summaries: list[Summary] | None = (
                [] if self.shows_first and is_mine and block == begin else None
            )
            with reading:
                own, read = self._read_block(items, summaries, is_mine=is_mine)
            self._block = block + 1
            # dropped by all: another process sees the same number of items
            if read < self.block_size and self.drop_last:
                own = {}
            shown = summaries or (summaries is not None and not self.may_be_used_up)
            first = ((int(self.epoch), block), summaries or []) if shown else None
            if own or shown:
                yield Block(own, self._key(block), first)
            if read < self.block_size:
                return

    def _key(self, block: int) -> int | None:
        """Return the key of a block's randomness: with a fixed number of shards it must not depend
        on the process.
        """
        if not self.division.is_fixed:
            return None
        return mix_key(self.seed, int(self.epoch), _SHARDS, block)

    def _read_block(
        self,
        items: Iterator[Any],
        summaries: list[Summary] | None,
        *,
        is_mine: bool,
    ) -> tuple[dict[int, list[Any]], int]:
        """Read one block; return this rank's items of it by shard, and how many it had for all."""
        own: dict[int, list[Any]] = {}
        read = 0
        item = None
        for item in itertools.islice(items, self.block_size):
            if summaries is not None and read < MOST_ITEMS:
                summaries.append(summarize(item))
            if is_mine and read % self.number in self.mine:
                own.setdefault(read % self.number, []).append(item)
            read += 1
        if is_mine and self.keep_step and read and not own:
            own[-1] = [item]
        return own, read


def _has_shards(dataset: Any, number: int) -> bool:
    """Return whether a stream can cut itself into so many shards."""
    available = getattr(dataset, "num_shards", 0)
    return (
        isinstance(available, int)
        and 1 < number <= available
        and callable(getattr(dataset, "shard", None))
    )
