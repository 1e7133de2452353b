"""Iterable datasets and loaders of batches, divided over the ranks and the loader's workers.

A stream has no random access: it is read from its beginning. So every process that reads it (each
rank, and each worker of its loader) either reads a shard that the stream itself cuts off, or reads
the whole stream and keeps its own items. The second works only if all processes read the same items
in the same order. Therefore a stream is read with its own random numbers, which follow from seed
and epoch, and without access to the worker's number.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddpkit.compat import is_split_by_node, shuffle_digest
from ddpkit.control import start_loading
from ddpkit.data.likeness import MOST_ITEMS, summarize
from ddpkit.data.plan import SamplingPlan, part, require_positive
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
from ddpkit.data.worker_copies import WorkerCopies
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.seed import mix, mix_key, own_randomness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpkit.data.likeness import FirstItems, Summary
    from ddpkit.data.sharding import Sharding

logger = get_logger(__name__)

# what random numbers are for
_WORKERS = 0x30EF
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

    Ranks: local.

    Example:
        >>> Block({0: ["a", "b"]}).first is None
        True
    """

    items: dict[int, Any]
    key: int | None = None
    first: FirstItems | None = None


class StreamShard(IterableDataset[Any], Source):
    """One rank's part of an iterable dataset, which its loader's workers divide further: every item
    is read once.

    It is read block by block: block ``n`` is the items ``[n * block_size, (n + 1) * block_size)``,
    and is divided over the shards: one of each rank, or several of each with virtual ranks.

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
        self.rank = sharding.rank
        self.world_size = sharding.world_size
        self.seed = sharding.seed
        self.mine = sharding.shards_of_stream
        self.is_virtual = sharding.is_virtual
        self.number = len(self.mine) * self.world_size
        self.block_size = block_size or self.number
        self.drop_last = drop_last
        self.of_batches = of_batches
        self.keep_step = self.shows_first = False
        self.epoch = torch.zeros((), dtype=torch.int64)
        # workers that outlive an epoch have a copy of this object, and must learn which epoch comes
        if num_workers:
            self.epoch.share_memory_()  # type: ignore[no-untyped-call]
        self.parts = self.number * (1 if self.is_virtual else max(num_workers, 1))
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
            is_mine = block % workers == worker
            summaries: list[Summary] | None = (
                [] if self.shows_first and is_mine and block == begin else None
            )
            with reading:
                own, read = self._read_block(items, summaries, is_mine=is_mine)
            self._block = block + 1
            if read < self.block_size and self.drop_last:
                own = {}
            shown = summaries or (summaries is not None and not self.may_be_used_up)
            first = ((int(self.epoch), block), summaries or []) if shown else None
            if own or shown:
                yield Block(own, self._key(block), first)
            if read < self.block_size:
                return

    def _key(self, block: int) -> int | None:
        """Return the key of a block's randomness: with virtual ranks it must not depend on the
        process.
        """
        return mix_key(self.seed, int(self.epoch), _SHARDS, block) if self.is_virtual else None

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


class StreamLoader(DataLoader[Any]):
    """A ``DataLoader`` of a stream, with worker seeds that follow from a key and the epoch.

    With virtual ranks it yields as many batches for each block as this rank has shards. A shard
    without an item in a block is given another one's batch, which counts nothing.

    Attributes:
        first: the first items read of a stream that is divided over several ranks; None if there
            are none.
        position: where the stream is, where it can say that.
        is_divided: whether every rank reads a part of it.
        is_dealt: whether every rank reads the whole, and keeps its own items of it.
        keep_step: whether a rank without a share of the last batch is given one that counts
            nothing, as in training.
        worker_copies: what persistent workers know of the stream.

    Args:
        dataset: this rank's part of the stream.
        key: another one on every rank; with virtual ranks the same.
        options: as for ``torch.utils.data.DataLoader``; a ``generator`` among them stays as it is.

    Ranks: local.

    Example:
        >>> from ddpkit.dataloader import Sharding
        >>> [
        ...     batch.tolist()
        ...     for batch in StreamLoader(StreamShard(range(3), Sharding(), 2), key=5, batch_size=2)
        ... ]
        [[0, 1], [2]]
        >>> shards = StreamShard(range(5), Sharding(0, 1, virtual_ranks=2), 4)
        >>> loader = StreamLoader(shards, key=5, batch_size=2)
        >>> [(batch.tolist(), loader.size_of(batch)) for batch in loader]
        [([0, 2], 2), ([1, 3], 2), ([4], 1), ([4], 0)]
    """

    def __init__(
        self,
        dataset: Any,
        key: int,
        **options: Any,
    ) -> None:
        self.key = key if options.get("generator") is None else None
        if self.key is not None:
            options["generator"] = torch.Generator()
        super().__init__(dataset, **options)
        self.first: FirstItems | None = None
        self.worker_copies = WorkerCopies()
        self.keep_step = self._is_anothers = False
        self._last_size: int | None = None
        source = dataset if isinstance(dataset, StreamShard) else ReadApart(dataset, key)
        self._source: StreamShard | ReadApart = source
        self.is_divided = True
        self.is_dealt = False
        self._is_virtual = False
        options["collate_fn"] = _Collated(
            self.collate_fn,
            makes_batches=self.batch_size is not None,
        )
        if isinstance(source, StreamShard):  # which makes the batches
            options |= {"batch_size": None, "drop_last": False}
            self.is_divided, self._is_virtual = source.world_size > 1, source.is_virtual
            self.is_dealt = self.is_divided and not source.divides_itself
        self.is_divided = self.is_divided and getattr(self.whole, "is_sharded", False) is not True
        self._inner: DataLoader[Any] = DataLoader(dataset, **options)
        can_tell = self.num_workers == 0 and is_stateful(self.whole) and not self._is_virtual
        self.position = StreamPosition(source if can_tell else None)
        self._seed_workers(1)

    @property
    def whole(self) -> Any:
        """The user's own stream or loader."""
        return self._source.whole

    @property
    def of_batches(self) -> bool:
        """Whether a loader of one's own is read, whose items are batches."""
        return isinstance(self._source, StreamShard) and self._source.of_batches

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes; the next iteration follows its worker seeds."""
        with self.worker_copies.telling(self.whole):
            self._source.set_epoch(epoch)
        self._seed_workers(epoch)

    def _seed_workers(self, epoch: int) -> None:
        if self.key is not None and self.generator is not None:
            self.generator.manual_seed(mix_key(self.key, epoch) >> 1)

    def drawn_words(self) -> dict[str, str]:
        """Describe how the stream shuffles, for a comparison with the other ranks; empty if each
        may have its own.
        """
        digest = shuffle_digest(self.whole) if self.is_divided else ""
        name = (
            f"shuffle of {type(self.whole).__name__} (without a seed each process shuffles "
            "differently: give one)"
        )
        return {name: digest} if digest else {}

    def size_of(self, batch: Any) -> int | None:
        """Return the number of items in the batch just yielded; None for another rank's batch.

        Of virtual ranks all go on to the end of a block, and another shard's batch has 0.
        """
        if self._is_anothers:
            return 0 if self._is_virtual else None
        return guess_batch_size(batch) if self._last_size is None else self._last_size

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.persistent_workers:
            self.worker_copies.compare(self.whole)
        source = self._source
        begin = functools.partial(start_loading, self._inner)
        if isinstance(source, StreamShard):
            source.keep_step = self.keep_step or self._is_virtual
            source.shows_first = self.is_dealt
        elif self.num_workers == 0:
            begin = functools.partial(source.read, begin)
        return self._batches(self.position.marked(begin))

    def _batches(self, blocks: Iterator[Any]) -> Iterator[Any]:
        self.first = None
        for batches, first in blocks:
            self.first = first or self.first
            for shard in self._source.mine if batches else ():
                self._is_anothers = shard not in batches
                self._last_size, batch = batches[
                    next(iter(batches)) if self._is_anothers else shard
                ]
                yield batch


class _Collated:
    """Collates what each shard has of a block, and counts its items."""

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        *,
        makes_batches: bool,
    ) -> None:
        self.collate_fn = collate_fn
        self.makes_batches = makes_batches

    def __call__(
        self,
        given: Any,
    ) -> tuple[dict[int, tuple[int | None, Any]], FirstItems | None]:
        if not isinstance(given, Block):  # of a stream that divides itself, read by torch
            given = Block({0: given if self.makes_batches else [given]})
        collated = {}
        for shard, items in given.items.items():
            own = (
                contextlib.nullcontext()
                if given.key is None
                else own_randomness(mix(given.key ^ shard))
            )
            with own:
                batch = self.collate_fn(items if self.makes_batches else items[0])
            collated[shard] = len(items) if self.makes_batches else None, batch
        return collated, given.first


def worker_key(sharding: Sharding) -> int:
    """Return the key of the worker seeds of a stream's loader: another one on every rank, but not
    with virtual ranks.

    Ranks: local.
    """
    return mix_key(sharding.seed, 0 if sharding.is_virtual else sharding.rank, _WORKERS)


def stream_loader(dataset: Any, sharding: Sharding, options: dict[str, Any]) -> StreamLoader:
    """Make the loader that gives one process its part of an iterable dataset.

    Args:
        dataset: the whole stream. One that divides itself, over ranks and workers, is left as it
            is: it says ``is_sharded = True``, or is a pipeline of ``webdataset``, or one of
            ``datasets`` that was split by node.
        sharding: which part. If its global batch cannot be divided evenly, the first shards have
            one sample more.
        options: as for ``torch.utils.data.DataLoader``; used up.

    Raises:
        ConfigError: ``shuffle``, a bad batch size, or virtual ranks with a stream that divides
            itself over processes.

    Ranks: local.

    Example:
        >>> from ddpkit.dataloader import Sharding
        >>> from torch.utils.data import IterableDataset
        >>> class Numbers(IterableDataset):
        ...     def __iter__(self):
        ...         return iter(range(5))
        >>> [
        ...     batch.tolist()
        ...     for batch in stream_loader(Numbers(), Sharding(1, 2), {"batch_size": 2})
        ... ]
        [[1, 3]]
        >>> [
        ...     batch.tolist()
        ...     for batch in stream_loader(Numbers(), Sharding(0, 2, global_batch_size=3), {})
        ... ]
        [[0, 2], [3]]
    """
    # of a loader that was made for one rank
    dataset = dataset.whole if isinstance(dataset, StreamShard) else dataset
    name = type(dataset).__name__
    if options.pop("shuffle", False):
        raise ConfigError(
            f"shuffle=True cannot be done for {name}, an IterableDataset: it has no length and no "
            "positions. Shuffle inside the dataset."
        )
    if sharding.is_virtual and is_sharded(dataset):
        raise ConfigError(
            f"virtual_ranks={sharding.virtual_ranks}: {name} divides itself over the processes, "
            "so that the bits would depend on their number. Give a stream that does not, best one "
            "with a method shard(num_shards, index)."
        )
    if _is_webdataset(dataset):
        options.setdefault("batch_size", None)
    block_size = _block_size(sharding, options)
    if is_sharded(dataset):
        return StreamLoader(dataset, worker_key(sharding), **options)
    workers = options.get("num_workers") or 0
    drop_last = bool(options.get("drop_last"))
    shard = StreamShard(dataset, sharding, block_size, drop_last=drop_last, num_workers=workers)
    if shard.divides_itself and shard.is_virtual:
        # one process reads the shards of a rank, block by block
        options["num_workers"] = min(workers, 1)
    number = sharding.world_size * max(workers, 1)
    if number > 1 and not shard.divides_itself:
        logger.info(
            "%s is dealt out by counting: %d processes (ranks x loader workers) read all of it. "
            "Give the stream shard() and at least that many num_shards, so that each process "
            "reads only its part.",
            *(name, number),
        )
    return StreamLoader(shard, worker_key(sharding), **options)


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
    return _comes_from(data, "datasets") and is_split_by_node(data)


def _block_size(sharding: Sharding, options: dict[str, Any]) -> int:
    """Return the number of items in a global batch; set this rank's batch size if only the global
    one is given.
    """
    whole = sharding.global_batch_size
    mine = sharding.shards_of_stream
    number = sharding.world_size * len(mine)
    if whole is None:
        batch_size = options.get("batch_size", 1)  # None: the stream gives whole batches
        return (
            number if batch_size is None else SamplingPlan(1, batch_size, number).global_batch_size
        )
    require_positive("global_batch_size", whole, "every step needs at least one sample")
    size, rest = divmod(whole, sharding.micro_batches)
    if rest or size < number:
        raise ConfigError(
            f"global_batch_size={whole} cannot divide a stream: a step is "
            f"{sharding.micro_batches} equal batch(es), each with an item for every one of "
            f"{number} {'virtual ranks' if sharding.is_virtual else 'processes'}. Give "
            f"{number * sharding.micro_batches} or more, a multiple of {sharding.micro_batches}."
        )
    start, stop = part(size, number, mine[0])
    options["batch_size"] = stop - start
    return size


def _has_shards(dataset: Any, number: int) -> bool:
    """Return whether a stream can cut itself into that many shards."""
    available = getattr(dataset, "num_shards", 0)
    return (
        isinstance(available, int)
        and 1 < number <= available
        and callable(getattr(dataset, "shard", None))
    )


def _is_webdataset(data: Any) -> bool:
    return _comes_from(data, "webdataset")


def _comes_from(data: Any, package: str) -> bool:
    return any(one.__module__.partition(".")[0] == package for one in type(data).__mro__)


def guess_batch_size(batch: Any) -> int:
    """Return the number of samples of a batch: its ``batchsize``, or the length of its first tensor
    or array.

    Args:
        batch: an object that knows its ``batchsize``; a tensor; a list, tuple or dict with one
            among its fields; or a list of samples.

    Returns:
        1 where nothing tells, with a warning.

    Ranks: local.

    Example:
        >>> (
        ...     guess_batch_size([torch.zeros(3, 2), torch.zeros(3)]),
        ...     guess_batch_size({"x": torch.zeros(2)}),
        ... )
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
            "A batch of the type %s does not tell how many samples it has, and counts as one: "
            "give it an attribute `batchsize`.",
            type(batch).__name__,
        )
        return 1
