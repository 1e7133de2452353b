"""Iterable datasets and loaders of batches, divided over the ranks and the loader's workers.

What is not asked for by position can only be read from its beginning. So every process that takes part (each rank, and
each worker of its loader) either reads a shard that the stream itself cuts off, or the whole, of which it keeps its own
items. The second works only if all of them read the same in the same order: therefore a stream is read with random
numbers of its own, that follow from seed and epoch, and without a look at the worker it is read in.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ddpkit.control.loader_workers import start_loading
from ddpkit.data.likeness import MOST_ITEMS, FirstItems, sketch
from ddpkit.data.permutation import mix_key
from ddpkit.data.stream_position import END, READ, Bookmarks, ReadApart, Reading, is_stateful
from ddpkit.distributed import get_world_size
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.sampler import SamplingPlan, set_epoch_inside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddpkit.data.likeness import Sketch, Sketches

logger = get_logger(__name__)

_WORKERS, _BATCHES = 0x30EF, 0xBA7C  # what random numbers are for


class StreamShard(IterableDataset[Any]):
    """One rank's part of an iterable dataset, which its loader's workers divide further: every item is read once.

    A stream with a method ``shard(num_shards, index)`` that makes enough shards divides itself. Any other is dealt out
    in blocks, block ``n`` being the items ``[n * block_size, (n + 1) * block_size)``: it is worker ``n % num_workers``
    that reads it, so that the loader's ``n``-th batch comes from it whatever the workers; and rank ``r`` takes the
    items of it at ``r``, ``r + world_size`` and so on. So the blocks, which are the global batches, do not depend on
    ranks or workers, and the last one is divided to within one item. In training a rank without an item of it is given
    the last item again, which counts nothing: so its gradient is of what the others work on.

    While the stream is read, ``torch.utils.data.get_worker_info()`` returns None, so that a stream that minds its
    workers does not divide itself again. A stream that is dealt out draws its random numbers (Python's, numpy's and
    torch's on the CPU) from streams that follow from seed and epoch; those of the process are left as they were. It may
    be read ahead of what has been used of it.

    Args:
        dataset: the whole stream; all processes must be able to read it in the same order.
        rank: this rank.
        world_size: number of ranks.
        block_size: items of a global batch; ``world_size`` if None.
        drop_last: leave out an incomplete last block; only where the stream is dealt out.
        num_workers: of the loader.
        seed: of the experiment.

    Attributes:
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

    def __init__(
        self,
        dataset: Any,
        rank: int,
        world_size: int,
        block_size: int | None = None,
        *,
        drop_last: bool = False,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.rank, self.world_size = rank, world_size
        self.block_size = block_size or world_size
        self.drop_last = drop_last
        self.keep_step = self.shows_first = False
        self.seed = seed
        self.epoch = torch.zeros((), dtype=torch.int64)
        if num_workers:  # workers that outlive an epoch have a copy of this object, and must learn which epoch comes
            self.epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._enough: dict[int, bool] = {}
        self._part: Any = None  # what is being read, where the stream has cut it off
        self._reading = Reading()
        self._block = 0
        self._goes_on: dict[str, Any] | None = None
        self.divides_itself(max(num_workers, 1))

    @property
    def has_state(self) -> bool:
        """Whether the stream can say where it is, and go on from there."""
        return is_stateful(self.dataset)

    @property
    def whole(self) -> Any:
        """The user's own stream."""
        return self.dataset

    @staticmethod
    def numbered(state: dict[str, Any], number: int) -> dict[str, Any]:
        """Return a state for a number of batches, which another number of ranks may count in another way."""
        return {**state, "block": number}

    def state_dict(self) -> dict[str, Any]:
        """Return where the reading is, between two items of this rank's: the stream's own state, and random streams."""
        part = self.dataset if self._part is None else self._part
        return {
            "stream": copy.deepcopy(part.state_dict()) if is_stateful(part) else None,
            "block": self._block,
            "random": self._reading.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on from a state."""
        self._goes_on = state

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes, if it wants to know; also the copies that running workers have."""
        self.epoch.fill_(epoch)
        _tell(self.dataset, epoch)

    def divides_itself(self, workers: int) -> bool:
        """Say whether the stream's own ``shard`` divides it over the ranks and so many workers of each."""
        number = self.world_size * workers
        if number not in self._enough:
            self._enough[number] = _has_shards(self.dataset, number)
        return self._enough[number]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch = int(self.epoch)
        if info is not None:
            _tell(self.dataset, epoch)
        if self.divides_itself(workers):
            return self._own_shard(self.rank * workers + worker, self.world_size * workers, epoch)
        return self._dealt(worker, workers, Reading(mix_key(self.seed, epoch, READ)))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"StreamShard has no attribute {name!r}: it stands for the stream in a loader, and divides it over ranks "
            "and workers. A worker_init_fn has nothing to divide. A stream that does it itself says is_sharded=True."
        )

    def _own_shard(self, index: int, number: int, epoch: int) -> Iterator[Any]:
        reading = Reading(mix_key(self.seed, epoch, READ, index))
        with reading:
            part = self.dataset.shard(number, index)
            _tell(part, epoch)  # it need not have taken that over
            self._part = part
            self._take_up(part, reading)
            items = iter(part)
        while True:
            with reading:
                item = next(items, END)
            if item is END:
                return
            yield item

    def _dealt(self, worker: int, workers: int, reading: Reading) -> Iterator[Any]:
        first = self._take_up(self.dataset, reading)
        with reading:
            items = iter(self.dataset)
        for block in itertools.count(first):
            self._block = block
            is_mine = block % workers == worker
            sketches: list[Sketch] | None = [] if self.shows_first and is_mine and block == first else None
            with reading:
                own, read = self._read_block(items, sketches, is_mine=is_mine)
            self._block = block + 1
            if read < self.block_size and self.drop_last:
                own = []
            if sketches is not None:
                own = _with_sketches(own, FirstItems((int(self.epoch), block), sketches))
            yield from own
            if read < self.block_size:
                return

    def _take_up(self, source: Any, reading: Reading) -> int:
        """Put a stream where it was, if there is a state to go on from; return the number of its next block."""
        self._reading = reading
        state, self._goes_on = self._goes_on, None
        if state is None:
            return 0
        if state["stream"] is not None:
            source.load_state_dict(state["stream"])
        reading.load_state_dict(state["random"])
        return int(state["block"])

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

    def read_again(self) -> list[Sketches] | None:
        """Read the first items twice more, of a copy; return sketches of them, or None where that cannot be done."""
        key, number = mix_key(self.seed, int(self.epoch), READ), min(MOST_ITEMS, self.block_size)
        return _read_twice(self.dataset, key, number)


def _read_twice(data: Any, key: int, number: int) -> list[Sketches] | None:
    try:
        with Reading(key):
            whole = copy.deepcopy(data)
        found = []
        for _ in range(2):
            with Reading(key):
                found.append([sketch(item) for item in itertools.islice(iter(whole), number)])
    except Exception:  # a file or a connection that cannot be copied, whatever that raises
        logger.debug("%s cannot be read once more, of a copy.", type(data).__name__, exc_info=True)
        return None
    return found


@dataclass
class _Marked:
    """An item of which more is known.

    Attributes:
        item: itself.
        is_again: it is another rank's: only to keep step with, it counts nothing.
        first: what was read first, which comes with it.
        is_nothing: there is no item; what was read first comes alone.
    """

    item: Any
    is_again: bool = False
    first: FirstItems | None = None
    is_nothing: bool = False


def _with_sketches(items: list[Any], first: FirstItems) -> list[Any]:
    """Send what was read first along with the first of some items, or alone."""
    if not items:
        return [_Marked(None, first=first, is_nothing=True)]
    if isinstance(items[0], _Marked):
        return [replace(items[0], first=first), *items[1:]]
    return [_Marked(items[0], first=first), *items[1:]]


class StreamLoader(DataLoader[Any]):
    """A ``DataLoader`` of a stream, with worker seeds that follow from a key and the epoch.

    Attributes:
        last_size: items of the batch that was yielded last; None where the stream makes the batches.
        first: what was read first of a stream that is dealt out to several ranks; None if nothing was.
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

    def __init__(self, dataset: Any, key: int, **options: Any) -> None:
        self.key = key if options.get("generator") is None else None
        if self.key is not None:
            options["generator"] = torch.Generator()
        super().__init__(dataset, **options)
        self.last_size: int | None = None
        self.first: FirstItems | None = None
        self.keep_step = self._is_again = False
        self._reader = dataset if isinstance(dataset, StreamShard) else ReadApart(dataset, key)
        self.marks = Bookmarks(self._reader if self.num_workers == 0 and self._reader.has_state else None)
        self.set_epoch(1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose worker seeds the next iteration follows."""
        if isinstance(self._reader, ReadApart):
            self._reader.epoch = epoch
        if self.key is not None and self.generator is not None:
            self.generator.manual_seed(mix_key(self.key, epoch) >> 1)

    @property
    def whole(self) -> Any:
        """The user's own stream."""
        return self._reader.whole

    @property
    def is_dealt(self) -> bool:
        """Whether every rank reads the whole, and keeps its own items of it."""
        reader = self._reader
        return (
            isinstance(reader, StreamShard)
            and reader.world_size > 1
            and not reader.divides_itself(max(self.num_workers, 1))
        )

    def read_again(self) -> list[Sketches] | None:
        """Read the first items twice more; return sketches of them, or None where that cannot be done."""
        return self._reader.read_again() if isinstance(self._reader, StreamShard) else None

    def size_of(self, batch: Any) -> int | None:
        """Return the number of items of the batch that was yielded last; None if it is one that another rank has."""
        if self._is_again:
            return None
        return guess_batch_size(batch) if self.last_size is None else self.last_size

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        is_counted = self.batch_size is not None
        if isinstance(self._reader, StreamShard):
            self._reader.keep_step, self._reader.shows_first, is_counted = self.keep_step, self.is_dealt, True
        begin = self._counted if is_counted else functools.partial(start_loading, self, super().__iter__)
        if self.num_workers == 0 and isinstance(self._reader, ReadApart):
            reader = self._reader
            batches = self.marks.marked(lambda: reader.read(begin))
        else:
            batches = self.marks.marked(begin)
        return self._sized(batches) if is_counted else batches

    def _counted(self) -> Iterator[Any]:
        view = copy.copy(self)
        vars(view)["collate_fn"] = _Counting(self.collate_fn, makes_batches=self.batch_size is not None)
        inner = start_loading(view, super(StreamLoader, view).__iter__)
        self._iterator = view._iterator  # noqa: SLF001 -- persistent workers stay with this loader
        return inner

    def _sized(self, inner: Iterator[Any]) -> Iterator[Any]:
        self.first = None
        for self.last_size, mark, batch in inner:
            self._is_again = mark is not None and mark.is_again
            if mark is not None and mark.first is not None:
                self.first = mark.first
            if mark is None or not mark.is_nothing:
                yield batch


class _Counting:
    """Collates, counts what it is given, and tells what counts nothing."""

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


class BatchShard:
    """One rank's part of a loader that cannot be asked for anything but its batches: every ``world_size``-th of them.

    Every rank reads all batches, with random numbers that follow from seed and epoch, and keeps its own. In training a
    rank that has none of the last ones is given the very last, which counts nothing there.

    Args:
        loader: yields batches; anew whenever it is iterated.
        rank: this rank.
        world_size: number of ranks.
        seed: of the experiment.

    Attributes:
        keep_step: whether a rank that has none of the last batches is given one that counts nothing.
        first: the first batch that was read, if there are several ranks; None if none was.

    Ranks: local; all ranks must give the same arguments but ``rank``.

    Example:
        >>> list(BatchShard(["ab", "cd", "e"], 0, 2))
        ['ab', 'e']
    """

    def __init__(self, loader: Iterable[Any], rank: int, world_size: int, *, seed: int = 0) -> None:
        self.loader: Any = loader
        self.rank, self.world_size = rank, world_size
        self.seed = seed
        self.epoch = 0
        self.first: FirstItems | None = None
        self.keep_step = self._is_again = False
        self._reading = Reading()
        self._batch = 0
        self._goes_on: dict[str, Any] | None = None
        self.marks = Bookmarks(self if is_stateful(loader) else None)

    @property
    def whole(self) -> Any:
        """The user's own loader."""
        return self.loader

    @staticmethod
    def numbered(state: dict[str, Any], number: int) -> dict[str, Any]:  # noqa: ARG004 -- its own count is kept
        """Return a state for a number of batches."""
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is, between two batches, and the random numbers that it is read with."""
        state = copy.deepcopy(self.loader.state_dict())
        return {"stream": state, "batch": self._batch, "random": self._reading.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on from a state."""
        self._goes_on = state

    @property
    def is_dealt(self) -> bool:
        """Whether every rank reads all, and keeps its own batches."""
        return self.world_size > 1

    def read_again(self) -> list[Sketches] | None:
        """Read the first batch twice more, of a copy; return sketches of it, or None where that cannot be done."""
        return _read_twice(self.loader, mix_key(self.seed, self.epoch, _BATCHES), 1)

    def size_of(self, batch: Any) -> int | None:
        """Return the number of samples of the batch that was yielded last; None if it is one that another rank has."""
        return None if self._is_again else guess_batch_size(batch)

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, and what is inside it, which epoch comes."""
        self.epoch = epoch
        set_epoch_inside(self.loader, epoch)
        set_epoch_inside(getattr(self.loader, "dataset", None), epoch)

    def __iter__(self) -> Iterator[Any]:
        key = mix_key(self.seed, self.epoch, _BATCHES)
        return self.marks.marked(lambda: self._dealt(Reading(key)))

    def _dealt(self, reading: Reading) -> Iterator[Any]:
        self._reading = reading
        state, self._goes_on = self._goes_on, None
        first = 0
        if state is not None:
            self.loader.load_state_dict(state["stream"])
            reading.load_state_dict(state["random"])
            first = state["batch"]
        with reading:
            batches = start_loading(self.loader)
        before, self._is_again, self.first = END, False, None
        for number in itertools.count(first):
            with reading:
                batch = next(batches, END)
            if batch is END:
                break
            self._batch, before = number + 1, batch
            if self.is_dealt and number == first:
                self.first = FirstItems((self.epoch, first), [sketch(batch)])
            if number % self.world_size == self.rank:
                yield batch
        if self.keep_step and before is not END and 0 < number % self.world_size <= self.rank:
            self._is_again = True
            yield before


def stream_loader(
    dataset: Any,
    rank: int,
    world_size: int,
    options: dict[str, Any],
    *,
    seed: int = 0,
    global_batch_size: int | None = None,
) -> DataLoader[Any]:
    """Make the loader that gives one process its part of an iterable dataset.

    Args:
        dataset: the whole stream. One that divides itself, over ranks and workers, is left as it is: it says
            ``is_sharded = True``, or is a pipeline of ``webdataset``, or one of ``datasets`` that was split by node. A
            pipeline of ``webdataset`` without a node splitter is given one.
        rank: this rank.
        world_size: number of ranks that divide the stream.
        options: as for ``torch.utils.data.DataLoader``; used up.
        seed: of the experiment.
        global_batch_size: samples of a batch over all ranks, if not ``world_size`` times that of one; it takes the
            place of ``batch_size``, and the first ranks have one sample more where it cannot be divided evenly.

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
        >>> [batch.tolist() for batch in stream_loader(Numbers(), 0, 2, {}, global_batch_size=3)]
        [[0, 2], [3]]
    """
    name = type(dataset).__name__
    if options.pop("shuffle", False):
        raise ConfigError(
            f"shuffle=True cannot be done for {name}, an IterableDataset: it has no length and no positions. Shuffle "
            "inside the dataset."
        )
    if isinstance(dataset, StreamShard):  # of a loader that was made for one rank: divide the whole, not the part
        dataset = dataset.dataset
    if _is_webdataset(dataset):
        options.setdefault("batch_size", None)
        dataset = _divisible(dataset, world_size, max(options.get("num_workers") or 0, 1))
    block_size = _block_size(rank, world_size, options, global_batch_size)
    if is_sharded(dataset):
        logger.info("%s divides itself over ranks and workers: it is left as it is.", type(dataset).__name__)
    else:
        workers = options.get("num_workers") or 0
        drop_last = bool(options.get("drop_last"))
        dataset = StreamShard(
            dataset, rank, world_size, block_size, drop_last=drop_last, num_workers=workers, seed=seed
        )
        _tell_how(dataset, max(workers, 1))
    return StreamLoader(dataset, mix_key(seed, rank, _WORKERS), **options)


def is_ordered(data: Any) -> bool:
    """Say whether data comes in an order of its own, so that no sampler can give it one.

    Args:
        data: a dataset, or a source of batches.

    Returns:
        True for an ``IterableDataset``, and where :func:`is_batches` is.

    Ranks: local.

    Example:
        >>> is_ordered(iter([1, 2])), is_ordered([1, 2])
        (True, False)
    """
    return isinstance(data, IterableDataset) or is_batches(data)


def is_batches(data: Any) -> bool:
    """Say whether an object is nothing but a source of batches: no dataset, and no loader that can be made anew.

    Args:
        data: what was given as a set to train on.

    Returns:
        True for what can be iterated, and neither derives from torch's ``Dataset`` or ``DataLoader`` nor has
        ``__getitem__``, as map-style datasets do.

    Ranks: local.

    Example:
        >>> is_batches(iter([1, 2])), is_batches([1, 2])
        (True, False)
    """
    if isinstance(data, (Dataset, DataLoader)):
        return False
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


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


def _block_size(rank: int, world_size: int, options: dict[str, Any], global_batch_size: int | None) -> int:
    """Return the items of a global batch; set this rank's batch size where only that of all ranks is given."""
    if global_batch_size is not None:
        options["batch_size"] = SamplingPlan(num_samples=1, batch_size=global_batch_size).batch_size
        each, more = divmod(global_batch_size, world_size)
        if each < 1:
            raise ConfigError(
                f"global_batch_size={global_batch_size} gives {world_size} processes less than one item each. Set it "
                f"to {world_size} or more, or start fewer processes."
            )
        options["batch_size"] = each + (1 if rank < more else 0)
        return global_batch_size
    batch_size = options.get("batch_size", 1)
    if batch_size is None:  # the stream gives whole batches
        return world_size
    return SamplingPlan(num_samples=1, batch_size=batch_size, world_size=world_size).global_batch_size


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


def _tell_how(shard: StreamShard, workers: int) -> None:
    """Say it where a stream is read whole by several processes, and why."""
    number, name = shard.world_size * workers, type(shard.dataset).__name__
    if number == 1 or shard.divides_itself(workers):
        return
    if callable(getattr(shard.dataset, "shard", None)):
        logger.warning_once(
            "%s cannot be cut into %d shards (ranks x loader workers): it is dealt out by counting, and every process "
            "reads all of it. Nothing is lost or repeated; give it more files, or use fewer workers, to read faster.",
            name,
            number,
        )
    else:
        logger.info(
            "%s is dealt out by counting: %d processes (ranks x loader workers) read all of it. A method "
            "shard(num_shards, index) would let each read its own part.",
            name,
            number,
        )


def _tell(stream: Any, epoch: int) -> None:
    """Tell a stream which epoch comes, if it wants to know and somebody has said."""
    setter = getattr(stream, "set_epoch", None)
    if setter is not None and epoch:
        setter(epoch)


def _is_webdataset(data: Any) -> bool:
    return _comes_from(data, "webdataset")


def _divisible(pipeline: Any, world_size: int, workers: int) -> Any:
    """Return a pipeline of ``webdataset`` that does not refuse several processes, as one without a node splitter does.

    Its shards are divided, or, if there are too few of them or every rank takes the whole, it is handed out as it is.
    """
    stages = getattr(pipeline, "pipeline", [])
    refusing = next((stage for stage in stages if _refuses(stage)), None)
    if refusing is None or get_world_size() == 1:
        _require_splitter_inside(stages)
        return pipeline
    urls = getattr(stages[0], "urls", None)
    found = copy.copy(pipeline)
    if world_size > 1 and urls is not None and len(urls) >= world_size * workers:
        logger.info("%s has no nodesplitter: its %d shards are divided by node.", type(pipeline).__name__, len(urls))
        split = sys.modules[refusing.__module__].split_by_node
        found.pipeline = [split if stage is refusing else stage for stage in stages]
        return found
    found.pipeline = [stage for stage in stages if stage is not refusing]
    return _Items(found)


def _refuses(stage: Any) -> bool:
    return getattr(stage, "__name__", "") == "single_node_only" and stage.__module__.startswith("webdataset.")


def _require_splitter_inside(stages: list[Any]) -> None:
    """Refuse a ``WebLoader`` whose pipeline would fail in the loader's workers."""
    inner = getattr(stages[0], "dataset", None) if stages and get_world_size() > 1 else None
    if any(map(_refuses, getattr(inner, "pipeline", []))):
        raise ConfigError(
            f"the {type(inner).__name__} inside a WebLoader has no node splitter, and there are {get_world_size()} "
            "processes, each of which needs shards of its own. Give it nodesplitter=webdataset.split_by_node, or give "
            "the WebDataset itself instead of the WebLoader."
        )


class _Items(IterableDataset[Any]):
    """What a pipeline yields, as nothing more than a stream."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pipeline)


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
