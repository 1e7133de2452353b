"""Loaders of streams: iterable datasets and loaders of batches, divided over ranks and workers."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from ddpkit.compat import shuffle_digest
from ddpkit.control import start_loading
from ddpkit.data.batch_size_guess import guess_batch_size
from ddpkit.data.plan import SamplingPlan, part, require_positive
from ddpkit.data.stream_kinds import is_sharded, is_webdataset
from ddpkit.data.stream_position import ReadApart, StreamPosition, is_stateful
from ddpkit.data.stream_shard import Block, StreamShard
from ddpkit.data.worker_copies import WorkerCopies
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.seed import mix, mix_key, own_randomness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpkit.data.sample_comparison import FirstItems
    from ddpkit.data.sharding import Sharding


logger = get_logger(__name__)


# what random numbers are for
_WORKERS = 0x30EF


class StreamLoader(DataLoader[Any]):
    """A ``DataLoader`` of a stream, with worker seeds that follow from a key and the epoch.

    It yields as many batches for each block as this rank has shards. Where their number is fixed, a
    shard without an item in a block is given another one's batch, which counts nothing.

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
        key: another one on every rank; with a fixed number of shards the same.
        options: as for ``torch.utils.data.DataLoader``; a ``generator`` is left alone.

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
        self._is_fixed = False
        options["collate_fn"] = _Collated(
            self.collate_fn,
            makes_batches=self.batch_size is not None,
        )
        if isinstance(source, StreamShard):  # which makes the batches
            options |= {"batch_size": None, "drop_last": False}
            self.is_divided = source.division.world_size > 1
            self._is_fixed = source.division.is_fixed
            self.is_dealt = self.is_divided and not source.divides_itself
        self.is_divided = self.is_divided and getattr(self.whole, "is_sharded", False) is not True
        self._inner: DataLoader[Any] = DataLoader(dataset, **options)
        can_tell = self.num_workers == 0 and is_stateful(self.whole) and not self._is_fixed
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

        With a fixed number of shards all go on to the end of a block, and another shard's batch
        has 0.
        """
        if self._is_anothers:
            return 0 if self._is_fixed else None
        return guess_batch_size(batch) if self._last_size is None else self._last_size

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.persistent_workers:
            self.worker_copies.compare(self.whole)
        source = self._source
        begin = functools.partial(start_loading, self._inner)
        if isinstance(source, StreamShard):
            source.keep_step = self.keep_step or self._is_fixed
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
    with a fixed number of shards.
    """
    division = sharding.division_of_stream
    return mix_key(sharding.seed, 0 if division.is_fixed else division.rank, _WORKERS)


def stream_loader(dataset: Any, sharding: Sharding, options: dict[str, Any]) -> StreamLoader:
    """Make the loader that gives one process its part of an iterable dataset.

    Args:
        dataset: the whole stream. A stream that divides itself over ranks and workers is left
            alone: it says ``is_sharded = True``, or is a pipeline of ``webdataset``, or one of
            ``datasets`` that was split by node.
        sharding: which part. If its global batch cannot be divided evenly, the first shards have
            one sample more.
        options: as for ``torch.utils.data.DataLoader``; used up.

    Raises:
        ConfigError: ``shuffle``, a bad batch size, or a fixed number of shards with a stream that
            divides itself over processes.

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
    division = sharding.division_of_stream
    if division.is_fixed and is_sharded(dataset):
        raise ConfigError(
            f"{division.given}: {name} divides itself over the processes, "
            "so that the bits would depend on their number. Give a stream that does not, best one "
            "with a method shard(num_shards, index)."
        )
    if is_webdataset(dataset):
        options.setdefault("batch_size", None)
    block_size = _block_size(sharding, options)
    if is_sharded(dataset):
        return StreamLoader(dataset, worker_key(sharding), **options)
    workers = options.get("num_workers") or 0
    drop_last = bool(options.get("drop_last"))
    shard = StreamShard(dataset, sharding, block_size, drop_last=drop_last, num_workers=workers)
    if shard.divides_itself and division.is_fixed:
        # one process reads the shards of a rank, block by block
        options["num_workers"] = min(workers, 1)
    number = division.world_size * max(workers, 1)
    if number > 1 and not shard.divides_itself:
        logger.info(
            "%s is dealt out by counting: %d processes (ranks x loader workers) read all of it. "
            "Give the stream shard() and at least that many num_shards, so that each process "
            "reads only its part.",
            *(name, number),
        )
    return StreamLoader(shard, worker_key(sharding), **options)


def _block_size(sharding: Sharding, options: dict[str, Any]) -> int:
    """Return the number of items in a global batch; set this rank's batch size if only the global
    one is given.
    """
    whole = sharding.global_batch_size
    division = sharding.division_of_stream
    number = division.number
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
            f"{number} {division.owners}. Give "
            f"{number * sharding.micro_batches} or more, a multiple of {sharding.micro_batches}."
        )
    start, stop = part(size, number, division.mine[0])
    options["batch_size"] = stop - start
    return size
