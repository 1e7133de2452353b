"""Iterable datasets and loaders of batches, divided over the ranks and the loader's workers.

A stream has no random access: it is read from its beginning. So every process that reads it (each rank, and each
worker of its loader) either reads a shard that the stream itself cuts off, or reads the whole stream and keeps its own
items. The second works only if all processes read the same items in the same order. Therefore a stream is read with
its own random numbers, which follow from seed and epoch, and without access to the worker's number.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert, get_worker_info

from ddpkit.compat import shuffle_digest
from ddpkit.control import start_loading
from ddpkit.data.likeness import MOST_ITEMS, FirstItems, sketch
from ddpkit.data.permutation import mix_key
from ddpkit.data.stream_position import (
    READ,
    ReadApart,
    Reading,
    Source,
    StreamPosition,
    is_stateful,
    one_by_one,
    tell_epoch,
)
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.sampler import SamplingPlan, part
from ddpkit.seed import own_randomness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpkit.data.likeness import Sketch, Sketches
    from ddpkit.data.sharded_loader import Sharding

logger = get_logger(__name__)

_WORKERS, _BATCHES, _SHARDS = 0x30EF, 0xBA7C, 0x5A4D  # what random numbers are for


class StreamShard(IterableDataset[Any], Source):
    """One rank's part of an iterable dataset, which its loader's workers divide further: every item is read once.

    A stream with a method ``shard(num_shards, index)`` that makes enough shards divides itself. Any other is dealt out
    in blocks, block ``n`` being the items ``[n * block_size, (n + 1) * block_size)``: it is worker ``n % num_workers``
    that reads it, so that the loader's ``n``-th batch comes from it whatever the workers; and rank ``r`` takes the
    items of it at ``r``, ``r + world_size`` and so on. So the blocks, which are the global batches, do not depend on
    ranks or workers, and the last one is divided to within one item. In training a rank without an item of it is given
    the last item again, which counts nothing: so its gradient is of what the others work on.

    While the stream is read, ``torch.utils.data.get_worker_info()`` returns None, so that a stream that shards by
    worker does not divide itself again. A stream that ddpkit divides draws its random numbers (Python's, numpy's and
    torch's on the CPU) from generators seeded by seed and epoch; the state of the process's generators is restored.
    The stream is read ahead, by a block: it must not overwrite an item or a batch that it has yielded.

    Args:
        dataset: the whole stream; all processes must be able to read it in the same order.
        rank: this rank.
        world_size: number of ranks.
        block_size: items of a global batch; ``world_size`` if None.
        drop_last: leave out an incomplete last block; only if ddpkit divides the stream item by item.
        num_workers: of the loader.
        seed: of the experiment.
        of_batches: ``dataset`` is a loader of one's own, whose items are batches; it never divides itself.

    Attributes:
        whole: the user's own stream or loader.
        divides_itself: whether the stream's own ``shard`` divides it over the ranks and their workers.
        keep_step: whether a rank without an item of the last block is given one that counts nothing.
        shows_first: whether the first thing that is read comes with a sketch of the undivided stream's first items.

    Ranks: local; all ranks must give the same arguments but ``rank``.

    Example:
        >>> list(StreamShard(range(5), 1, 2))
        [1, 3]
        >>> [list(StreamShard(range(7), rank, 2, 4)) for rank in range(2)]
        [[0, 2, 4, 6], [1, 3, 5]]
        >>> list(StreamShard(range(7), 0, 2, 4, drop_last=True))
        [0, 2]
    """

    def __init__(  # noqa: PLR0913 -- shard and kind of loader
        self,
        dataset: Any,
        rank: int,
        world_size: int,
        block_size: int | None = None,
        *,
        drop_last: bool = False,
        num_workers: int = 0,
        seed: int = 0,
        of_batches: bool = False,
    ) -> None:
        Source.__init__(self, dataset)
        self.rank, self.world_size = rank, world_size
        self.block_size = block_size or world_size
        self.drop_last = drop_last
        self.keep_step = self.shows_first = False
        self.seed, self.of_batches = seed, of_batches
        self.epoch = torch.zeros((), dtype=torch.int64)
        if num_workers:  # workers that outlive an epoch have a copy of this object, and must learn which epoch comes
            self.epoch.share_memory_()  # type: ignore[no-untyped-call]
        self.divides_itself = not of_batches and _has_shards(dataset, world_size * max(num_workers, 1))

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes, if it wants to know; also the copies that running workers have."""
        self.epoch.fill_(epoch)
        tell_epoch(self.whole, epoch)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return self.read(*((0, 1) if info is None else (info.id, info.num_workers)))

    def read(self, worker: int, workers: int) -> Iterator[Any]:
        """Yield the items of one of the processes that read this rank's part."""
        epoch = int(self.epoch)
        if get_worker_info() is not None:
            tell_epoch(self.whole, epoch)
        if self.divides_itself:
            return self._own_shard(self.rank * workers + worker, self.world_size * workers, epoch)
        return self._dealt(worker, workers, self._read_alike())

    def _read_alike(self) -> Reading:
        """Return random numbers that are the same wherever the whole is read."""
        return Reading(mix_key(self.seed, int(self.epoch), _BATCHES if self.of_batches else READ))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"StreamShard has no attribute {name!r}: it stands for the stream in a loader, and divides it over ranks "
            "and workers. A worker_init_fn has nothing to divide. A stream that does it itself says is_sharded=True."
        )

    def _own_shard(self, index: int, number: int, epoch: int) -> Iterator[Any]:
        reading = Reading(mix_key(self.seed, epoch, READ, index))
        with reading:
            part = self.whole.shard(number, index)
            tell_epoch(part, epoch)  # it need not have taken that over
        self._open(part, reading)
        with reading:
            items = iter(part)
        yield from reading.each(items)

    def _dealt(self, worker: int, workers: int, reading: Reading) -> Iterator[Any]:
        state = self._open(self.whole, reading)
        first = int(state.get("block", 0))
        with reading:
            items = one_by_one(start_loading(self.whole) if self.of_batches else iter(self.whole))
        for block in itertools.count(first):
            self._block = block
            is_mine = block % workers == worker
            sketches: list[Sketch] | None = [] if self.shows_first and is_mine and block == first else None
            with reading:
                own, read = self._read_block(items, sketches, is_mine=is_mine)
            self._block = block + 1
            if read < self.block_size and self.drop_last:
                own = []
            if sketches or (sketches is not None and not self.may_be_used_up):
                own = _with_sketches(own, FirstItems((int(self.epoch), block), sketches))
            yield from own
            if read < self.block_size:
                return

    def _read_block(
        self, items: Iterator[Any], sketches: list[Sketch] | None, *, is_mine: bool
    ) -> tuple[list[Any], int]:
        """Read one block; return this rank's items of it, and how many it had for all."""
        own: list[Any] = []
        read, item = 0, None
        for item in itertools.islice(items, self.block_size):
            if sketches is not None and read < MOST_ITEMS:
                sketches.append(sketch(item))
            if is_mine and read % self.world_size == self.rank:
                own.append(item)
            read += 1
        if is_mine and self.keep_step and read and not own:
            own.append(_Marked(item, is_again=True))
        return own, read

    def read_twice(self) -> list[Sketches] | None:
        """Read the first items twice, of a copy; return sketches of them, or None where that cannot be done."""
        number, found = min(MOST_ITEMS, self.block_size), []
        try:
            with self._read_alike():
                whole = copy.deepcopy(self.whole)
            for _ in range(2):
                with self._read_alike():
                    found.append([sketch(item) for item in itertools.islice(iter(whole), number)])
        except Exception:  # a file or a connection that cannot be copied, whatever that raises
            logger.debug("%s cannot be read once more, of a copy.", type(self.whole).__name__, exc_info=True)
            return None
        return found


@dataclass
class _Marked:
    """An item with facts about it.

    Attributes:
        item: the item.
        is_again: a copy of another rank's item, only to keep step; it has weight 0.
        first: the first items read, sent along with this item.
        is_nothing: placeholder without an item; only ``first`` is sent.
    """

    item: Any
    is_again: bool = False
    first: FirstItems | None = None
    is_nothing: bool = False


def _with_sketches(items: list[Any], first: FirstItems) -> list[Any]:
    """Send the first items read along with the next item, or alone."""
    if not items:
        return [_Marked(None, first=first, is_nothing=True)]
    if isinstance(items[0], _Marked):
        return [replace(items[0], first=first), *items[1:]]
    return [_Marked(items[0], first=first), *items[1:]]


class StreamReader:
    """What every loader of a stream can tell of it; a base class.

    Attributes:
        first: the first items read of a stream that is divided over several ranks; None if there are none.
        position: where the stream is; None where it is read again from the beginning of the epoch after a restart.
        is_divided: whether every rank reads a part of it.
        is_dealt: whether every rank reads the whole, and keeps its own items of it.

    Ranks: local.
    """

    first: FirstItems | None = None
    position: StreamPosition | None = None
    is_divided = is_dealt = False
    _source: StreamShard | ReadApart

    @property
    def whole(self) -> Any:
        """The user's own stream or loader."""
        return self._source.whole

    @property
    def of_batches(self) -> bool:
        """Whether a loader of one's own is read, whose items are batches."""
        return isinstance(self._source, StreamShard) and self._source.of_batches

    def drawn_words(self) -> dict[str, str]:
        """Describe how the stream shuffles, for a comparison with the other ranks; empty if each may have its own."""
        digest = shuffle_digest(self.whole) if self.is_divided else ""
        name = f"shuffle of {type(self.whole).__name__} (without a seed each process shuffles differently: give one)"
        return {name: digest} if digest else {}

    def read_twice(self) -> list[Sketches] | None:
        """Read the first items twice; return sketches of them, or None where that cannot be done."""
        return self._source.read_twice() if isinstance(self._source, StreamShard) else None

    def size_of(self, batch: Any) -> int | None:
        """Return the number of items of the batch that was yielded last; None if it is one that another rank has."""
        raise NotImplementedError


class StreamLoader(DataLoader[Any], StreamReader):
    """A ``DataLoader`` of a stream, with worker seeds that follow from a key and the epoch.

    Attributes:
        last_size: items of the batch that was yielded last; None where the stream makes the batches.
        keep_step: whether a rank without a share of the last batch is given one that counts nothing, as in training.

    Args:
        dataset: this rank's part of the stream.
        key: another one on every rank.
        options: as for ``torch.utils.data.DataLoader``; a ``generator`` among them stays as it is.

    Ranks: local.

    Example:
        >>> [batch.tolist() for batch in StreamLoader(StreamShard(range(3), 0, 1), key=5, batch_size=2)]
        [[0, 1], [2]]
    """

    position: StreamPosition

    def __init__(self, dataset: Any, key: int, **options: Any) -> None:
        self.key = key if options.get("generator") is None else None
        if self.key is not None:
            options["generator"] = torch.Generator()
        super().__init__(dataset, **options)
        self.last_size: int | None = None
        self.keep_step = self._is_again = False
        self.collate_fn = _Counting(self.collate_fn, makes_batches=self.batch_size is not None)
        self._source = source = dataset if isinstance(dataset, StreamShard) else ReadApart(dataset, key)
        is_whole = isinstance(source, StreamShard) and source.world_size == 1
        self.is_divided = not (is_whole or getattr(self.whole, "is_sharded", False) is True)
        self.is_dealt = isinstance(source, StreamShard) and source.world_size > 1 and not source.divides_itself
        can_tell = self.num_workers == 0 and is_stateful(self._source.whole)
        self.position = StreamPosition(self._source if can_tell else None)
        self._seed_workers(1)

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes; the next iteration follows its worker seeds."""
        self._source.set_epoch(epoch)
        self._seed_workers(epoch)

    def _seed_workers(self, epoch: int) -> None:
        if self.key is not None and self.generator is not None:
            self.generator.manual_seed(mix_key(self.key, epoch) >> 1)

    def size_of(self, batch: Any) -> int | None:
        """Return the number of items of the batch that was yielded last; None if it is one that another rank has."""
        if self._is_again:
            return None
        return guess_batch_size(batch) if self.last_size is None else self.last_size

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        source, begin = self._source, functools.partial(start_loading, self, super().__iter__)
        if isinstance(source, StreamShard):
            source.keep_step, source.shows_first = self.keep_step, self.is_dealt
        elif self.num_workers == 0:
            begin = functools.partial(source.read, begin)
        return self._sized(self.position.marked(begin))

    def _sized(self, inner: Iterator[Any]) -> Iterator[Any]:
        self.first = None
        for self.last_size, mark, batch in inner:
            self._is_again = mark is not None and mark.is_again
            if mark is not None and mark.first is not None:
                self.first = mark.first
            if mark is None or not mark.is_nothing:
                yield batch


class _Counting:
    """A collate function that also counts the items, and marks batches of weight 0."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, makes_batches: bool) -> None:
        self.collate_fn, self.makes_batches = collate_fn, makes_batches

    def __call__(self, given: Any) -> tuple[int | None, _Marked | None, Any]:
        first = given[0] if self.makes_batches else given
        mark, size = None, len(given) if self.makes_batches else None
        if isinstance(first, _Marked):
            mark, first = replace(first, item=None), first.item
            if mark.is_nothing:
                return size, mark, None
            given = [first, *given[1:]] if self.makes_batches else first
        return size, mark, self.collate_fn(given)


def batch_loader(loader: Any, sharding: Sharding) -> StreamLoader | ShardStreamLoader:
    """Deal an opaque iterable of batches out: rank r keeps every ``world_size``-th batch, from the r-th on.

    Args:
        loader: yields batches; can be iterated again.
        sharding: which part.

    Ranks: local; all ranks must give the same arguments but ``sharding.rank``.

    Example:
        >>> from ddpkit.data import Sharding
        >>> list(batch_loader(["ab", "cd", "e"], Sharding(0, 2)))
        ['ab', 'e']
    """
    if sharding.is_virtual:
        return _shard_stream_loader(loader, sharding, {"collate_fn": _as_it_is}, of_batches=True)
    shard = StreamShard(loader, sharding.rank, sharding.world_size, seed=sharding.seed, of_batches=True)
    return StreamLoader(shard, mix_key(sharding.seed, sharding.rank, _WORKERS), batch_size=None, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


def stream_loader(dataset: Any, sharding: Sharding, options: dict[str, Any]) -> StreamLoader | ShardStreamLoader:
    """Make the loader that gives one process its part of an iterable dataset.

    Args:
        dataset: the whole stream. One that divides itself, over ranks and workers, is left as it is: it says
            ``is_sharded = True``, or is a pipeline of ``webdataset``, or one of ``datasets`` that was split by node.
        sharding: which part. If its global batch cannot be divided evenly, the first ranks have one sample more.
        options: as for ``torch.utils.data.DataLoader``; used up.

    Raises:
        ConfigError: ``shuffle``, or a bad batch size.

    Ranks: local.

    Example:
        >>> from ddpkit.data import Sharding
        >>> from torch.utils.data import IterableDataset
        >>> class Numbers(IterableDataset):
        ...     def __iter__(self):
        ...         return iter(range(5))
        >>> [batch.tolist() for batch in stream_loader(Numbers(), Sharding(1, 2), {"batch_size": 2})]
        [[1, 3]]
        >>> [batch.tolist() for batch in stream_loader(Numbers(), Sharding(0, 2, global_batch_size=3), {})]
        [[0, 2], [3]]
    """
    name = type(dataset).__name__
    if options.pop("shuffle", False):
        raise ConfigError(
            f"shuffle=True cannot be done for {name}, an IterableDataset: it has no length and no positions. Shuffle "
            "inside the dataset."
        )
    if isinstance(options.get("collate_fn"), _Counting):  # of a loader that was made for one rank
        options["collate_fn"] = options["collate_fn"].collate_fn
    dataset = dataset.whole if isinstance(dataset, StreamShard) else dataset
    if sharding.is_virtual:
        return _shard_stream_loader(dataset, sharding, options, sharding.batch_of_all_ranks)
    if _is_webdataset(dataset):
        options.setdefault("batch_size", None)
    rank, world_size, seed = sharding.rank, sharding.world_size, sharding.seed
    block_size = _block_size(sharding, options)
    if is_sharded(dataset):
        logger.info("%s divides itself over ranks and workers: it is left as it is.", type(dataset).__name__)
    else:
        workers = options.get("num_workers") or 0
        drop_last = bool(options.get("drop_last"))
        dataset = StreamShard(
            dataset, rank, world_size, block_size, drop_last=drop_last, num_workers=workers, seed=seed
        )
        number = world_size * max(workers, 1)
        if number > 1 and not dataset.divides_itself:
            _tell_dealt(type(dataset.whole).__name__, number)
    return StreamLoader(dataset, mix_key(seed, rank, _WORKERS), **options)


_Block = tuple[int, dict[int, list[Any]], FirstItems | None]  # number, items by shard, the first that were read


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
        [(0, {0: [0, 2], 1: [1, 3]}, None), (1, {0: [4, 6], 1: [5]}, None)]
    """

    def __init__(self, whole: Any, sharding: Sharding, block_size: int, **options: Any) -> None:
        number = sharding.shards * sharding.world_size
        self.whole, self.block_size, self.number = whole, block_size, number
        self.mine = range(sharding.rank * sharding.shards, (sharding.rank + 1) * sharding.shards)
        parts = [StreamShard(whole, shard, number, block_size, **options) for shard in self.mine]
        self.divides_itself = parts[0].divides_itself
        self.is_divided = sharding.world_size > 1
        self.parts = parts if self.divides_itself else [StreamShard(whole, 0, 1, block_size, **options)]
        self.parts[0].shows_first = self.is_divided and not self.divides_itself
        self.drop_last, self.of_batches = parts[0].drop_last, parts[0].of_batches

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes."""
        for one in self.parts:
            one.set_epoch(epoch)

    def __iter__(self) -> Iterator[_Block]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return self._own_shards(worker, workers) if self.divides_itself else self._dealt(worker, workers)

    def _own_shards(self, worker: int, workers: int) -> Iterator[_Block]:
        """Yield block by block what this worker's shards have: one item of the loader per shard, and per worker."""
        places = range(worker, len(self.parts), workers)
        readers = {place: self.parts[place].read(0, 1) for place in places}
        for block in itertools.count():
            own = {place: list(itertools.islice(readers[place], self._size(place))) for place in places}
            if not any(own.values()):
                return
            yield from ((block, {place: items}, None) for place, items in own.items())

    def _dealt(self, worker: int, workers: int) -> Iterator[_Block]:
        items = self.parts[0].read(worker, workers)
        for block in itertools.count(worker, workers):
            rows, first = list(itertools.islice(items, self.block_size)), None
            if rows and isinstance(rows[0], _Marked):
                first, rows[:1] = rows[0].first, [] if rows[0].is_nothing else [rows[0].item]
            if not rows:
                return
            own = {place: rows[shard :: self.number] for place, shard in enumerate(self.mine)}
            yield block, own if any(own.values()) else {-1: rows[-1:]}, first  # -1: to work on, counts nothing

    def _size(self, place: int) -> int:
        start, stop = part(self.block_size, self.number, self.mine[place])
        return stop - start


class ShardStreamLoader(StreamReader):
    """Yields this process's shards of a stream, as many for each block.

    A shard without an item in a block is given another one's batch, which counts nothing.

    Args:
        dataset: the shards.
        batch_size: items of a shard; None where the stream makes the batches.
        options: for torch's ``DataLoader``.

    Ranks: local.

    Example:
        >>> from ddpkit.data import Sharding
        >>> loader = ShardStreamLoader(ShardStream(range(5), Sharding(0, 1, virtual_ranks=2), 4), 2)
        >>> [(batch.tolist(), loader.size_of(batch)) for batch in loader]
        [([0, 2], 2), ([1, 3], 2), ([4], 1), ([4], 0)]
    """

    def __init__(self, dataset: ShardStream, batch_size: int | None, **options: Any) -> None:
        self.dataset, self.batch_size, self._source = dataset, batch_size, dataset.parts[0]
        self.is_divided, self.is_dealt = dataset.is_divided, self._source.shows_first
        collate = options.pop("collate_fn", None) or (default_convert if batch_size is None else default_collate)
        self._generator = torch.Generator()
        self._loader: Any = DataLoader(
            dataset,
            batch_size=None,
            collate_fn=cast("Any", _CollatedShards(collate, dataset, makes_batches=batch_size is not None)),
            **{**options, "generator": self._generator},
        )
        self._size = 0
        self.set_epoch(1)

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes."""
        self.dataset.set_epoch(epoch)
        self._generator.manual_seed(mix_key(self.dataset.parts[0].seed, epoch, _SHARDS) >> 1)

    def size_of(self, batch: Any) -> int:
        """Return the number of items of the batch that was yielded last; 0 of another shard's."""
        return self._size

    def __iter__(self) -> Iterator[Any]:
        last, self.first = cast("Any", None), None
        for _, group in itertools.groupby(start_loading(self._loader), key=lambda item: item[0]):
            found: dict[int, tuple[int, Any]] = {}
            for _, shards, first in group:
                found |= shards
                self.first = first or self.first
            for place in range(len(self.dataset.mine)):
                self._size, last = found.get(place, (0, next(iter(found.values()))[1] if last is None else last))
                yield last


class _CollatedShards:
    """Collates what the shards have of a block; one without an item is left out, but for a process without any."""

    def __init__(self, collate_fn: Callable[[Any], Any], stream: ShardStream, *, makes_batches: bool) -> None:
        self.collate_fn, self.stream, self.makes_batches = collate_fn, stream, makes_batches

    def __call__(self, given: _Block) -> tuple[int, dict[int, tuple[int, Any]], FirstItems | None]:
        block, shards, first = given
        return block, {place: self._collated(items, block, place) for place, items in shards.items() if items}, first

    def _collated(self, items: list[Any], block: int, place: int) -> tuple[int, Any]:
        part = self.stream.parts[0]
        with own_randomness(mix_key(part.seed, int(part.epoch), _SHARDS, block, self.stream.mine[place])):
            batch = self.collate_fn(items if self.makes_batches else items[0])
        return (len(items) if self.makes_batches else guess_batch_size(batch)), batch


def _shard_stream_loader(
    dataset: Any,
    sharding: Sharding,
    options: dict[str, Any],
    block_size: int | None = None,
    *,
    of_batches: bool = False,
) -> ShardStreamLoader:
    """Make the loader that gives one process its shards of a whole stream, or of a loader of batches, in training.

    A block has ``block_size`` items, which are divided over all shards; by default ``batch_size`` for each.
    """
    name, number = type(dataset).__name__, sharding.shards * sharding.world_size
    if is_sharded(dataset):
        raise ConfigError(
            f"virtual_ranks={number}: {name} divides itself over the processes, so that the bits would depend on their "
            "number. Give a stream that does not, best one with a method shard(num_shards, index)."
        )
    size, workers = None if of_batches else options.pop("batch_size", 1), options.pop("num_workers", 0) or 0
    if size is not None:
        plan = SamplingPlan(1, size, number) if block_size is None else SamplingPlan(1, 1, number, False, block_size)
        size, block_size = plan.batch_size, plan.global_batch_size
    own = {"drop_last": bool(options.pop("drop_last", False)), "seed": sharding.seed, "of_batches": of_batches}
    stream = ShardStream(dataset, sharding, block_size or number, num_workers=min(workers, 1), **own)
    if stream.divides_itself:  # each worker reads shards of its own
        workers = max((one for one in range(1, workers + 1) if not sharding.shards % one), default=0)
    return ShardStreamLoader(stream, size, num_workers=workers, **options)


def is_sharded(data: Any) -> bool:
    """Say whether a stream or a loader divides itself over ranks and workers.

    Args:
        data: a dataset or a loader.

    Returns:
        True if it says ``is_sharded = True``, is a pipeline of ``webdataset``, or was split with
        ``datasets.distributed.split_dataset_by_node``.

    Ranks: local.

    Example:
        >>> is_sharded([1, 2])
        False
    """
    if getattr(data, "is_sharded", False) is True or _is_webdataset(data):
        return True
    return _comes_from(data, "datasets") and getattr(data, "_distributed", None) is not None


def _block_size(sharding: Sharding, options: dict[str, Any]) -> int:
    """Return the number of items in a global batch; set this rank's batch size if only the global one is given."""
    whole, world_size = sharding.batch_of_all_ranks, sharding.world_size
    if whole is None:
        batch_size = options.get("batch_size", 1)  # None: the stream gives whole batches
        return world_size if batch_size is None else SamplingPlan(1, batch_size, world_size).global_batch_size
    start, stop = part(SamplingPlan(num_samples=1, batch_size=whole).batch_size, world_size, sharding.rank)
    if whole < world_size:
        raise ConfigError(
            f"global_batch_size={whole} gives {world_size} processes less than one item each. Set it to {world_size} "
            "or more, or start fewer processes."
        )
    options["batch_size"] = stop - start
    return whole


def _has_shards(dataset: Any, number: int) -> bool:
    """Say whether a stream can cut itself into so many shards; alike in all processes, and before any of them reads."""
    if number == 1 or not callable(getattr(dataset, "shard", None)):
        return False
    available = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    if isinstance(available, Integral):
        return int(available) >= number
    try:
        dataset.shard(number, number - 1)
    except (IndexError, ValueError):  # it has fewer
        return False
    return True


@functools.cache  # once, for the loaders of all stages
def _tell_dealt(name: str, number: int) -> None:
    logger.info(
        "%s is dealt out by counting: %d processes (ranks x loader workers) read all of it. A method "
        "shard(num_shards, index) that makes so many shards would let each read its own part.",
        name,
        number,
    )


def _is_webdataset(data: Any) -> bool:
    return _comes_from(data, "webdataset")


def _comes_from(data: Any, package: str) -> bool:
    return any(one.__module__.partition(".")[0] == package for one in type(data).__mro__)


def guess_batch_size(batch: Any) -> int:
    """Return the number of samples of a batch: its ``batchsize``, or the length of its first tensor or array.

    Args:
        batch: an object that knows its ``batchsize``; a tensor; a list, tuple or dict with one among its fields; or a
            list of samples.

    Returns:
        1 where nothing tells, with a warning.

    Ranks: local.

    Example:
        >>> guess_batch_size([torch.zeros(3, 2), torch.zeros(3)]), guess_batch_size({"x": torch.zeros(2)})
        (3, 2)
    """
    if hasattr(batch, "batchsize"):
        return int(batch.batchsize)
    fields = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(fields, (list, tuple)):
        for field in fields:
            shape = getattr(field, "shape", ())
            if isinstance(field, (torch.Tensor, np.ndarray)) and shape:
                return int(shape[0])
    first: Any = next(iter(fields), None) if isinstance(batch, Mapping) else batch
    if isinstance(batch, Mapping) and isinstance(first, (Mapping, tuple)):
        return guess_batch_size(first)
    try:
        return len(first)
    except TypeError:
        logger.warning_once(
            "A batch of the type %s does not tell how many samples it has, and counts as one: give it an attribute "
            "`batchsize`.",
            type(batch).__name__,
        )
        return 1
